"""The project's targets: what is judged, by which rows."""

from __future__ import annotations

from typing import Any

from benchmarks.daemon import targets
from kvsidecar.bench.report import Measurement, Report
from tests.bench import support


def change(report: Report, name: str, match: dict[str, Any], **values: Any) -> Report:
    for row in report.rows(name, **match):
        row.update(values)
    return report


STORE_512 = "store / load, layer-stacked 32 x 64 KiB, 512 blocks"


def judged(report: Report, what: str) -> dict[str, Any]:
    return next(row for row in targets.evaluate(report) if row["what"] == what)


def test_a_bandwidth_target_needs_both_directions_with_one_job_in_flight() -> None:
    assert judged(support.report(0.97), STORE_512)["met"] == "yes"
    assert judged(support.report(0.97), STORE_512)["measured"] == "97.0% / 97.0% (4 in flight: 97.0% / 97.0%)"
    assert judged(support.report(0.89), STORE_512)["met"] == "no"
    cell = {"layout": "stacked-64k", "blocks": 512, "direction": "load"}
    slow = change(support.report(0.97), "bandwidth", {**cell, "in_flight": 1}, gbps=40.0)
    assert judged(slow, STORE_512)["met"] == "4 in flight"
    slow = change(slow, "bandwidth", {**cell, "in_flight": 4}, gbps=40.0)
    assert judged(slow, STORE_512)["met"] == "no"


def test_the_token_target_needs_the_bandwidth_as_well_as_the_latency() -> None:
    what = "token copy p50 / p99 while stores run at ≥ 44 GB/s"
    row = {"traffic": "store", "mode": "paced"}
    assert judged(support.report(), what)["met"] == "yes"
    assert judged(change(support.report(), "token", row, store_gbps=43.9), what)["met"] == "no"
    assert judged(change(support.report(), "token", row, p99_us=201), what)["met"] == "no"
    assert judged(change(support.report(), "token", row, p50_us=81), what)["met"] == "no"


def test_lookups_are_judged_with_a_lease() -> None:
    what = "lookup p50: 64 / 512 hashes / 4096 misses"
    assert judged(support.report(), what) == {
        "what": what, "target": "≤ 130 / 300 / 1000 µs", "measured": "96 / 208 / 800 µs", "met": "yes",
    }  # fmt: skip
    slow = change(support.report(), "lookup", {"hashes": 4096}, p50_us=1001)
    assert judged(slow, what)["met"] == "no"


def test_submitting_is_judged_by_the_slowest_of_small_and_large_jobs() -> None:
    report = support.report()
    submit = report.measurements["submit"] = Measurement("submit", "ok")
    for call, blocks in (("store", 1), ("load", 1), ("store", 512), ("load", 512), ("poll", 0)):
        submit.add(call=call, blocks=blocks, **support.latency(4.0))
    (row,) = (row for row in targets.evaluate(report) if row["what"].startswith("submit"))
    assert (row["measured"], row["met"]) == ("1: 4 / 4, 512: 4 / 4, poll 4.0 µs", "yes")
    change(report, "submit", {"call": "load", "blocks": 512}, p50_us=21.0)
    assert judged(report, row["what"])["met"] == "no"
    change(report, "submit", {"call": "load"}, p50_us=4.0)
    change(report, "submit", {"call": "poll"}, p50_us=6.0)
    assert judged(report, row["what"])["met"] == "no"


def test_pinning_is_judged_by_the_longest_step_beyond_the_idle_one() -> None:
    report = support.report()
    pin = report.measurements["pin"] = Measurement("pin", "ok")
    pin.add(phase="idle", max_ms=3.0)
    pin.add(phase="daemon pins", max_ms=3.9)
    pin.add(phase="pool", pool_bytes=64 << 30, ms_per_gib=120.0, beyond_prefault_ms_per_gib=36.0, pages="thp")
    delay, register = "engine step delayed by pinning", "pin: registration beyond the prefault"
    assert judged(report, delay)["met"] == "yes"
    assert judged(report, register) == {
        "what": register, "target": "≤ 35 ms/GiB with huge pages", "measured": "36 of 120 ms/GiB (thp)", "met": "no",
    }  # fmt: skip
    change(report, "pin", {"phase": "daemon pins"}, max_ms=4.1)
    change(report, "pin", {"phase": "pool"}, beyond_prefault_ms_per_gib=28.0)
    assert judged(report, delay)["met"] == "no"
    assert judged(report, register)["met"] == "yes"


def test_jobs_are_judged_only_on_two_cores_of_the_host_device() -> None:
    report = support.report()
    jobs = report.measurements["jobs"] = Measurement("jobs", "ok")
    what = "jobs per second, 8 ranks, 2 cores, host device: stores / loads"
    for direction, rate in (("store", 2500.0), ("load", 2100.0)):
        row = {"ranks": 8, "attached": 8, "direction": direction, "jobs_per_second": rate}
        jobs.add(**row, device="cuda", cores=16)
        assert judged(report, what)["met"] == "-"
    for direction, rate in (("store", 2500.0), ("load", 2100.0)):
        jobs.add(ranks=8, attached=8, direction=direction, jobs_per_second=rate, device="host", cores=2)
    assert judged(report, what)["met"] == "yes"
    change(report, "jobs", {"device": "host", "direction": "load"}, jobs_per_second=1999.0)
    assert judged(report, what)["met"] == "no"


def test_what_was_not_measured_is_not_judged() -> None:
    empty = Report("0", "2026-11-21T00:00:00+00:00", "host", {}, {})
    assert {row["met"] for row in targets.evaluate(empty)} == {"-"}
