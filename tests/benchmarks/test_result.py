"""Results and figures of other systems, as they are read from files and shown."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.daemon import show, tables
from benchmarks.daemon.result import load_peers, read
from kvsidecar.bench.errors import BadOption
from kvsidecar.bench.tables import print_tables
from tests.bench import support

ROOT = Path(__file__).resolve().parents[2]
TRANSFER = {
    "system": "Other", "layout": "stacked-64k", "blocks": 512, "in_flight": 1, "direction": "store", "gbps": 30.5,
}  # fmt: skip


def written(directory: Path, content: object) -> Path:
    file = directory / "peers.json"
    file.write_text(json.dumps(content))
    return file


def test_rows_of_other_systems_are_read(tmp_path: Path) -> None:
    rows = [
        {**TRANSFER, "variant": "kernel", "of_limit": 0.55, "ms_p50": 3, "verified": True},
        {**TRANSFER, "layout": "separate-64k", "ids": "consecutive"},
        {**TRANSFER, "gbps": 400.0, "valid": False},
    ]
    lookups = [
        {"system": "Other", "hashes": 64, "hit": True, "us_p50": 260},
        {"system": "Other", "hashes": 4096, "hit": False, "us_p50": 1600},
    ]
    peers = load_peers(written(tmp_path, {"rows": rows, "lookups": lookups}))
    assert [row.get("layout") for row in peers] == ["stacked-64k", "separate-64k-consecutive", None, None]
    assert peers[0]["system"] == "Other kernel"
    assert peers[0]["of_limit"] == 0.55
    assert [(row["hashes"], row["hits"]) for row in peers[2:]] == [(64, 64), (4096, 0)]


def test_what_json_wrote_is_read_as_another_system(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(support.report(0.5).to_json())
    peers = load_peers(file)
    assert {row["system"] for row in peers} == {"kvsidecar 0.1.0 (2026-11-21)"}
    assert {round(row["of_limit"], 6) for row in peers if "gbps" in row} == {0.5}
    assert sum("hashes" in row for row in peers) == 5


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({}, "KeyError: 'rows'"),
        ([TRANSFER], "AttributeError|TypeError"),
        ({"rows": [{**TRANSFER, "gbps": "fast"}]}, "gbps='fast'"),
        ({"rows": [{**TRANSFER, "direction": "both"}]}, "neither store nor load"),
        ({"rows": [], "lookups": [{"system": "Other", "hashes": 1}]}, "hit=None"),
        ({"schema": 99}, "its schema is 99, this version reads 1"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: object, what: str) -> None:
    with pytest.raises(BadOption, match=what):
        load_peers(written(tmp_path, content))


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    file.write_text("rows")
    with pytest.raises(BadOption, match="is not JSON"):
        load_peers(file)


def test_other_systems_stand_beside_this_one_with_the_limit_of_their_own_run(tmp_path: Path) -> None:
    report = support.report()
    peers = load_peers(written(tmp_path, {"rows": [{**TRANSFER, "of_limit": 0.42}, {**TRANSFER, "blocks": 7}]}))
    console = Console(file=io.StringIO(), width=show.WIDTH)
    print_tables(console, tables.other_systems(report, peers))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.startswith("stacked-64k")]
    assert ["stacked-64k", "store", "512", "1", "53.4", "97%", "30.5", "42%"] in lines
    assert ["stacked-64k", "store", "7", "1", "-", "30.5", "55%"] in lines


# -- results -----------------------------------------------------------------------------------------------------


def show_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["show", *arguments])
    show.main()


def test_results_of_several_runs_are_one_report(tmp_path: Path) -> None:
    own = support.report(pacing=True)
    first, second = tmp_path / "run.json", tmp_path / "more.json"
    pacing = own.measurements.pop("pacing")
    first.write_text(own.to_json())
    own.measurements = {"pacing": pacing}
    second.write_text(own.to_json())
    report = read([first, second])
    assert list(report.measurements) == ["limit", "bandwidth", "lookup", "token", "pacing"]
    assert report.limit("store") == 55.0
    assert report.find("pacing", chunk="2 MiB") == {
        "chunk": "2 MiB",
        **support.latency(58),
        "store_gbps": 45,
        "load_gbps": 0,
    }


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([], "TypeError"),
        ({"schema": 99}, "its schema is 99, this version reads 1"),
        ({"schema": 1, "measurements": {}}, "KeyError: 'version'"),
        ({"schema": 1, "measurements": {"limit": {"speed": 1}}}, "TypeError"),
    ],
)
def test_a_file_that_is_no_result_ends_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, what: str
) -> None:
    with pytest.raises(SystemExit, match=rf"peers\.json' is not a result.*{what}"):
        show_of(monkeypatch, str(written(tmp_path, content)))
    with pytest.raises(SystemExit, match="cannot be read"):
        show_of(monkeypatch, str(tmp_path / "none.json"))


def test_the_targets_of_the_page_are_what_its_result_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_of(monkeypatch, str(ROOT / "benchmarks/results/h200-2026-11-21.json"), "--targets")
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(said) > 200
    targets = said[next(n for n, line in enumerate(said) if line.startswith("Targets (for")) :]
    assert len(targets) > 20
    page = {line.rstrip() for line in (ROOT / "benchmarks/history.md").read_text().splitlines()}
    assert [line for line in targets if line not in page] == []


def test_an_earlier_result_and_plots_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, plots = tmp_path / "run.json", tmp_path / "new" / "plots"
    file.write_text(support.report().to_json())
    show_of(monkeypatch, str(file), "--compare", str(file), "--plot", str(plots))
    said = capsys.readouterr().out
    assert "Beside other systems" in said
    assert "kvsidecar 0.1.0 (2026-11-21)" in said
    assert "Targets" not in said
    assert len(list(plots.glob("*.png"))) == said.count("wrote ") == 4
