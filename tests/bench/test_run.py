"""What a run says of itself while it goes on."""

from __future__ import annotations

import io
import threading

from rich.console import Console

from kvsidecar.bench.options import MEASUREMENTS, USUAL_SECONDS
from kvsidecar.bench.report import Measurement
from kvsidecar.bench.run import SAID_EVERY_SECONDS, BenchProgress, plan_text
from tests.clock import Clock
from tests.harness import SECONDS


def test_outside_a_terminal_a_step_is_said_every_few_seconds() -> None:
    clock, out = Clock(0.0), io.StringIO()
    progress = BenchProgress(Console(file=out), clock)
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


def test_a_step_that_goes_on_is_said_again_also_one_that_began_just_after_a_line() -> None:
    clock, out = Clock(0.0), io.StringIO()
    progress = BenchProgress(Console(file=out), clock)
    progress.begin("jobs", "6 of 9")
    clock.now = 1.0
    progress.detail("attaching rank 3")
    asked_again = []
    while clock.now < 16.0:
        asked_again.append(progress.remind())
        clock.now += asked_again[-1]
    assert asked_again == [SAID_EVERY_SECONDS - 1.0, SAID_EVERY_SECONDS, SAID_EVERY_SECONDS, SAID_EVERY_SECONDS]
    assert out.getvalue().splitlines() == [
        "jobs: 6 of 9",
        "jobs: attaching rank 3",
        "jobs: attaching rank 3, for 9 s",
        "jobs: attaching rank 3, for 14 s",
    ]


class Lines(io.StringIO):
    """Tells when a third line has been written."""

    def __init__(self) -> None:
        super().__init__()
        self.three = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") >= 3:
            self.three.set()
        return written


def test_the_step_under_way_is_said_while_the_measurement_is_busy() -> None:
    out = Lines()
    with BenchProgress(Console(file=out), every=0.01) as progress:
        progress.begin("limit", "1 of 9")
        assert out.three.wait(SECONDS), "nothing but the reminder speaks here"
    assert out.getvalue().splitlines()[2].startswith("limit: 1 of 9, for ")


def test_a_terminal_shows_the_step_in_place() -> None:
    clock, out = Clock(0.0), io.StringIO()
    progress = BenchProgress(Console(file=out, force_terminal=True, width=80), clock)
    progress.begin("jobs", "6 of 9")
    clock.now = 60.0
    assert progress.remind() == SAID_EVERY_SECONDS
    assert out.getvalue() == "", "its spinner turns, from the beginning to the end of the run"


def test_the_plan_says_what_comes_and_how_long_it_takes() -> None:
    text = plan_text(["limit", "pin"], "cuda", quick=False)
    assert text == "measuring limit, pin on the cuda device, about 1 min; --quick takes less, --only NAME measures one"
    assert plan_text(["limit"], "cuda", quick=True) == "measuring limit on the cuda device", "nobody has measured that"
    assert "about" not in plan_text(["limit", "pacing"], "cuda", quick=False), "of benchmarks.daemon"


def test_every_measurement_has_a_usual_time() -> None:
    for usual in USUAL_SECONDS.values():
        assert usual.keys() == MEASUREMENTS.keys()
