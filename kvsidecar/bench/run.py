"""`kvsidecar bench`: runs the measurements in turn, then reports them."""

from __future__ import annotations

import contextlib
import datetime
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console

from kvsidecar import __version__
from kvsidecar.bench import (
    bandwidth,
    job_rate,
    latency,
    limit,
    machine,
    pinning,
    scaling,
    token_copy,
    verify,
)
from kvsidecar.bench.errors import Skipped
from kvsidecar.bench.options import Options
from kvsidecar.bench.report import Measurement, Report
from kvsidecar.bench.setting import Setting
from kvsidecar.bench.tables import TABLES, WIDTH, Tables, print_report
from kvsidecar.errors import KVSidecarError
from kvsidecar.support.units import format_duration

EXIT_INTERRUPTED = 130

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


def run(options: Options, measure: Mapping[str, Measure] = MEASURE, tables: Mapping[str, Tables] = TABLES) -> int:
    """Measure and report. Returns the exit code: 1 if a measurement failed, 130 if it was interrupted.

    Args:
        measure: how, by name, in the order in which they run.
        tables: how each is shown.

    Raises:
        KVSidecarError: it could not begin; the text is one sentence.
    """
    # The limit belongs to everything that is compared with it.
    chosen = {name: each for name, each in measure.items() if not options.only or name in (*options.only, "limit")}
    progress = Progress(Console(stderr=True))
    # SIGTERM ends a run as Ctrl-C does: in order, and with what there is.
    with _terminable(), tempfile.TemporaryDirectory(prefix="kvs-bench-") as directory, progress:
        setting = Setting(options, Path(directory), progress.detail)
        report = Report(
            version=__version__,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            device=setting.device,
            machine=machine.facts(setting.cuda),
            options=options.to_json(),
        )
        if setting.divisor > 1:
            report.machine["rows_divided_by"] = setting.divisor
        interrupted = _measure_all(setting, chosen, report, progress)
    _show(report, options, tables)
    failed = any(each.status == "failed" for each in report.measurements.values())
    return EXIT_INTERRUPTED if interrupted else int(failed)


def _measure_all(setting: Setting, chosen: Mapping[str, Measure], report: Report, progress: Progress) -> bool:
    """Returns whether it was interrupted."""
    interrupted = False
    try:
        for name, measure in chosen.items():
            measurement = report.measurements[name] = Measurement(name)
            progress.begin(name)
            _measure(measure, setting, measurement)
            progress.end(measurement)
            _write(report, setting.options)  # so that a machine that goes away takes one measurement with it, not all
    except KeyboardInterrupt:
        interrupted = True
    # From here on everything has a time limit of its own, and a second Ctrl-C would leave a daemon behind.
    with _deaf():
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


def _show(report: Report, options: Options, tables: Mapping[str, Tables]) -> None:
    to_stdout = options.json == "-"
    console = Console(stderr=to_stdout)
    if not console.is_terminal:
        console = Console(stderr=to_stdout, width=WIDTH)
    print_report(report, console, tables)
    if to_stdout:
        sys.stdout.write(report.to_json() + "\n")
    _write(report, options)


def _write(report: Report, options: Options) -> None:
    if options.json not in (None, "-"):
        Path(str(options.json)).write_text(report.to_json() + "\n")


class Progress:
    """Progress on standard error: one line per measurement, and on a terminal the current step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting") if console.is_terminal else None
        self._name = ""

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def begin(self, name: str) -> None:
        self._name = name
        self.detail("")

    def detail(self, text: str) -> None:
        if self._status is not None:
            self._status.update(f"{self._name}: {text}" if text else self._name)

    def end(self, measurement: Measurement) -> None:
        text = f"{measurement.name}: {measurement.status}, {format_duration(measurement.seconds)}"
        if measurement.reason:
            text += f": {measurement.reason}"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
