"""What a run says of itself while it goes on."""

from __future__ import annotations

import io

from rich.console import Console

from kvsidecar.bench.options import MEASUREMENTS, USUAL_SECONDS
from kvsidecar.bench.report import Measurement
from kvsidecar.bench.run import SAID_EVERY_SECONDS, Progress, plan_text


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_outside_a_terminal_a_step_is_said_every_few_seconds() -> None:
    clock, out = Clock(), io.StringIO()
    with Progress(Console(file=out), clock) as progress:
        progress.begin("bandwidth", "3 of 9, store and load")
        for second in range(12):
            clock.now = float(second)
            progress.detail(f"step {second}")
        progress.end(Measurement("bandwidth", "ok", seconds=12.0))
    assert out.getvalue().splitlines() == [
        "bandwidth: 3 of 9, store and load",
        f"bandwidth: step {SAID_EVERY_SECONDS:.0f}",
        f"bandwidth: step {2 * SAID_EVERY_SECONDS:.0f}",
        "bandwidth: ok, 12 s",
    ]


def test_the_plan_says_what_comes_and_how_long_it_takes() -> None:
    text = plan_text(["limit", "pin"], "cuda", quick=False)
    assert text == "measuring limit, pin on the cuda device, about 1 min; --quick takes less, --only NAME measures one"
    assert plan_text(["limit"], "cuda", quick=True) == "measuring limit on the cuda device", "nobody has measured that"
    assert "about" not in plan_text(["limit", "pacing"], "cuda", quick=False), "of benchmarks.daemon"


def test_every_measurement_has_a_usual_time() -> None:
    for usual in USUAL_SECONDS.values():
        assert usual.keys() == MEASUREMENTS.keys()
