from __future__ import annotations

from pathlib import Path

import pytest

from kvsidecar.bench.report import Measurement, Report, Row
from tests.bench import support

pytest.importorskip("matplotlib")

import itertools

from matplotlib.axes import Axes

from benchmarks.daemon import plots
from kvsidecar.bench.layouts import LAYOUTS


def heights(axis: Axes) -> list[float]:
    return [round(bar.get_height(), 3) for bar in axis.patches]  # type: ignore[attr-defined]


def test_every_plot_is_drawn_from_a_full_report(tmp_path: Path) -> None:
    report = support.report(pacing=True)
    peers: list[Row] = [{"system": "Other", "layout": "contiguous", "blocks": 512, "direction": "store", "gbps": 30.0}]
    peers += [{"system": "Other", "hashes": 64, "hits": 64, "p50_us": 260.0}]
    names = [file.name for file in plots.write_plots(report, peers, tmp_path)]
    assert names == ["bandwidth.png", "systems.png", "token-latency.png", "lookup.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    empty = Report("0", "2026-11-21T00:00:00+00:00", "host", {}, {})
    assert plots.write_plots(empty, [], tmp_path) == []


def test_bars_are_shares_of_the_limit_one_a_layout_and_number_of_blocks() -> None:
    figure = plots.bandwidth(support.report(0.5))
    assert figure is not None
    for axis in figure.axes:
        assert heights(axis) == [50.0] * len(LAYOUTS) * 4


def test_title_names_machine_version_and_day() -> None:
    figure = plots.bandwidth(support.report())
    assert figure is not None
    texts = [text.get_text() for text in figure.texts]
    assert "NVIDIA H200 (32.0 GT/s PCIe x16), kvsidecar 0.1.0, 2026-11-21" in texts


def test_scaling_has_a_line_for_each_kind_of_job_and_one_for_plain_copies() -> None:
    report = support.report()
    measured = report.measurements["scaling"] = Measurement("scaling")
    for layout, blocks, gbps in (("bulk copies", 0, (98.0, 148.0)), ("stacked-64k", 32, (75.0, 140.0))):
        for devices, each in enumerate(gbps, 1):
            measured.add(layout=layout, blocks=blocks, devices=devices, gbps=each)
    figure = plots.scaling(report)
    assert figure is not None
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[98.0, 148.0], [75.0, 140.0]]


def test_no_two_labels_below_an_axis_overlap() -> None:
    figure = plots.bandwidth(support.report())
    assert figure is not None
    figure.canvas.draw()
    for axis in figure.axes:
        boxes = [label.get_window_extent() for label in axis.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_other_systems_are_drawn_by_their_own_limit_and_only_where_they_have_figures() -> None:
    report = support.report(0.9)
    of_other = {"system": "Other", "blocks": 512, "gbps": 30.0, "of_limit": 0.4}
    peers = [{**of_other, "layout": "contiguous", "direction": "store"}]
    figure = plots.systems(report, peers)
    assert figure is not None
    store, load = figure.axes
    assert heights(store) == [90.0, 40.0]
    assert heights(load) == [90.0]
