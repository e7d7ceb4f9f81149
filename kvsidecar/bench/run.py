"""`kvsidecar bench`: runs the measurements in turn, then reports them."""

from __future__ import annotations

import contextlib
import datetime
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kvsidecar import __version__
from kvsidecar.bench import bandwidth, job_rate, latency, limit, machine, pinning, scaling, token_copy, verify
from kvsidecar.bench.errors import Skipped
from kvsidecar.bench.options import MEASUREMENTS, USUAL_SECONDS, BenchOptions
from kvsidecar.bench.report import BenchReport, Measurement
from kvsidecar.bench.setting import Setting
from kvsidecar.bench.tables import TABLES, WIDTH, Tables, console_of, print_report
from kvsidecar.errors import KVSidecarError
from kvsidecar.support.units import format_duration

EXIT_INTERRUPTED = 130
SAID_EVERY_SECONDS = 5.0
"""Interval between lines of progress that do not go to a terminal."""

Measure = Callable[[Setting, Measurement], None]
MEASURE: Mapping[str, Measure] = {
    "limit": limit.measure,
    "verify": verify.measure,
    "bandwidth": bandwidth.measure,
    "lookup": latency.lookups,
    "submit": latency.submit,
    "jobs": job_rate.measure,
    "scaling": scaling.measure,
    "token": token_copy.measure,
    "pin": pinning.measure,
}


def run(options: BenchOptions, measure: Mapping[str, Measure] = MEASURE, tables: Mapping[str, Tables] = TABLES) -> int:
    """Measure and report. Returns the exit code: 1 if a measurement failed, 130 if it was interrupted.

    Args:
        measure: the functions that measure, by name, in the order in which they run.
        tables: the functions that show their results.

    Raises:
        KVSidecarError: the run could not begin; the text is one sentence.
    """
    # The limit belongs to everything that is compared with it.
    chosen = {name: each for name, each in measure.items() if not options.only or name in (*options.only, "limit")}
    progress = BenchProgress(Console(stderr=True))
    # SIGTERM ends a run as Ctrl-C does: in order, and with what there is.
    terminable = _handling(signal.default_int_handler, signal.SIGTERM)
    with terminable, tempfile.TemporaryDirectory(prefix="kvs-bench-") as directory, progress:
        setting = Setting(options, Path(directory), progress.detail)
        report = BenchReport(
            version=__version__,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            device=setting.device,
            machine=machine.facts(setting.cuda),
            options=options.to_json(),
        )
        if setting.divisor > 1:
            report.machine["rows_divided_by"] = setting.divisor
        progress.say(plan_text(list(chosen), setting.device, quick=options.quick))
        interrupted = _measure_all(setting, chosen, report, progress)
    _show(report, options, tables)
    failed = any(each.status == "failed" for each in report.measurements.values())
    return EXIT_INTERRUPTED if interrupted else int(failed)


def plan_text(names: Sequence[str], device: str, *, quick: bool) -> str:
    """The announcement of what is measured, and of how long that took elsewhere."""
    usual = USUAL_SECONDS.get((device, quick), {})
    known = [usual[name] for name in names if name in usual]
    took = f", about {format_duration(max(60, round(sum(known) / 60) * 60))}" if len(known) == len(names) else ""
    less = "" if quick else "; --quick takes less, --only NAME measures one"
    return f"measuring {', '.join(names)} on the {device} device{took}{less}"


def _measure_all(setting: Setting, chosen: Mapping[str, Measure], report: BenchReport, progress: BenchProgress) -> bool:
    """Run the chosen measurements. Returns whether the run was interrupted."""
    interrupted = False
    try:
        for number, (name, measure) in enumerate(chosen.items(), 1):
            measurement = report.measurements[name] = Measurement(name)
            progress.begin(name, f"{number} of {len(chosen)}, {MEASUREMENTS.get(name, '')}")
            _measure(measure, setting, measurement)
            progress.end(measurement)
            _write(report, setting.options)  # so that a machine that goes away takes one measurement with it, not all
    except KeyboardInterrupt:
        interrupted = True
    # From here on everything has a time limit of its own, and a second Ctrl-C would leave a daemon behind.
    with _handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
        for measurement in report.measurements.values():
            if measurement.status == "running":
                measurement.status = "interrupted"
                progress.end(measurement)
        progress.begin("stopping")
        setting.close()
    return interrupted


def _measure(measure: Measure, setting: Setting, measurement: Measurement) -> None:
    started = time.perf_counter()
    try:
        measure(setting, measurement)
        measurement.status = "ok"
    except Skipped as error:
        measurement.status, measurement.reason = "skipped", str(error)
    except KVSidecarError as error:
        measurement.status, measurement.reason = "failed", str(error)
    except Exception as error:  # noqa: BLE001 - the others go on: this one's failure is reported, and the exit code says so
        measurement.status, measurement.reason = "failed", f"{type(error).__name__}: {error}"
    finally:
        measurement.seconds = round(time.perf_counter() - started, 2)


def _show(report: BenchReport, options: BenchOptions, tables: Mapping[str, Tables]) -> None:
    to_stdout = options.json == "-"
    print_report(report, console_of(WIDTH, stderr=to_stdout), tables)
    if to_stdout:
        sys.stdout.write(report.to_json() + "\n")
    _write(report, options)


def _write(report: BenchReport, options: BenchOptions) -> None:
    if options.json not in (None, "-"):
        Path(str(options.json)).write_text(report.to_json() + "\n")


class BenchProgress:
    """Progress on standard error: what follows, a line for each measurement, and its steps. A terminal shows the
    current step in place. Elsewhere it is printed every ``every`` seconds while it lasts, which depends on the machine.

    Args:
        clock: returns seconds.
        every: most seconds without a line.
    """

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, every: float = SAID_EVERY_SECONDS
    ) -> None:
        self._console = console
        self._status = console.status("starting") if console.is_terminal else None
        self._name = ""
        self._step = "starting"
        self._clock = clock
        self._every = every
        self._began = self._printed_at = clock()
        """When the step began, and when the last line was printed."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._remind, name="bench-progress", daemon=True)

    def __enter__(self) -> BenchProgress:
        if self._status is not None:
            self._status.start()
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
        else:
            self._over.set()
            self._thread.join()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self._print(text)

    def begin(self, name: str, what: str = "") -> None:
        """Begin a measurement; prints its first step at once."""
        with self._lock:
            self._name = name
            self._set_step(what)
            if self._status is None and what:
                self._print(self._step)

    def detail(self, text: str) -> None:
        """Note the next step; `remind` prints it when it is due."""
        with self._lock:
            self._set_step(text)
        self.remind()

    def remind(self) -> float:
        """Print the current step if nothing was printed for ``every`` seconds, unless a terminal shows it. Returns in
        how many seconds to call this again."""
        with self._lock:
            now = self._clock()
            if now < self._printed_at + self._every:
                return self._printed_at + self._every - now
            if self._status is None:
                lasts = now - self._began
                self._print(f"{self._step}, for {format_duration(lasts)}" if lasts >= self._every else self._step)
            return self._every

    def end(self, measurement: Measurement) -> None:
        text = f"{measurement.name}: {measurement.status}, {format_duration(measurement.seconds)}"
        if measurement.reason:
            text += f": {measurement.reason}"
        self.say(text)

    def _remind(self) -> None:
        while not self._over.wait(self.remind()):
            pass

    def _set_step(self, text: str) -> None:
        self._step = f"{self._name}: {text}" if text else self._name
        self._began = self._clock()
        if self._status is not None:
            self._status.update(self._step)

    def _print(self, text: str) -> None:
        self._printed_at = self._clock()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
