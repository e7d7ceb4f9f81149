"""The process's own metrics: the same as prometheus_client's, and cheap however many descriptors there are."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

from kvsidecar.core.process_metrics import ProcessMetrics, open_descriptors


def by_name(found: list[Metric]) -> dict[str, Metric]:
    return {each.name: each for each in found}


def test_they_are_those_of_the_library() -> None:
    usual = by_name(list(ProcessCollector(registry=CollectorRegistry()).collect()))
    own = by_name(list(ProcessMetrics().collect()))
    assert own.keys() == usual.keys()
    for name, metric in own.items():
        expected = usual[name]
        assert (metric.type, metric.documentation) == (expected.type, expected.documentation)
        assert [each.name for each in metric.samples] == [each.name for each in expected.samples]
    for name, within in (("process_start_time_seconds", 2.0), ("process_max_fds", 0.0), ("process_open_fds", 2.0)):
        assert abs(own[name].samples[0].value - usual[name].samples[0].value) <= within, name


def test_descriptors_are_counted_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.stat("/proc/self/fd").st_size:
        pytest.skip("this kernel does not count them")

    def listed(_: Path) -> NoReturn:
        raise AssertionError("all descriptors are listed")

    before = open_descriptors()
    monkeypatch.setattr(Path, "iterdir", listed)
    with ExitStack() as stack:
        for _ in range(100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert open_descriptors() == before + 100
