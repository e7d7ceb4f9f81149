"""The project's targets on an H200, and for each the goal, the measured value and whether it is met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsidecar.bench.bandwidth import PACED, UNPACED
from kvsidecar.bench.latency import SUBMIT_BLOCKS
from kvsidecar.bench.layouts import CONTIGUOUS, STACKED
from kvsidecar.bench.report import BenchReport, Row
from kvsidecar.support.units import GiB, MiB

YES, NO, OVERLAPPED, UNKNOWN = "yes", "no", "4 in flight", "-"
"""Whether it is met: with one job outstanding, not, only with four, or the run does not say."""

Verdict = tuple[str, str]
"""Measured, met."""


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    goal: str
    judge: Callable[[BenchReport], Verdict | None]
    """None: the run does not say."""


def evaluate(report: BenchReport) -> list[Row]:
    """One row a target."""
    rows = []
    for target in TARGETS:
        measured, met = target.judge(report) or (UNKNOWN, UNKNOWN)
        rows.append({"what": target.what, "target": target.goal, "measured": measured, "met": met})
    return rows


def _yes(met: bool) -> str:
    return YES if met else NO


def ratio(
    report: BenchReport, layout: str, blocks: int, direction: str, in_flight: int, mode: str = UNPACED
) -> float | None:
    """GB/s of a bandwidth row, as a share of the limit."""
    row = report.find("bandwidth", layout=layout, blocks=blocks, direction=direction, in_flight=in_flight, mode=mode)
    limit = report.limit(direction)
    return None if row is None or not limit else float(row["gbps"]) / limit


def _bandwidth(layout: str, blocks: int, goals: tuple[float, float]) -> Callable[[BenchReport], Verdict | None]:
    def judge(report: BenchReport) -> Verdict | None:
        texts, met = [], []
        for in_flight in (1, 4):
            ratios = [ratio(report, layout, blocks, direction, in_flight) for direction in ("store", "load")]
            if None in ratios:
                return None
            values = [each for each in ratios if each is not None]
            texts.append(" / ".join(f"{value:.1%}" for value in values))
            met.append(all(value >= goal for value, goal in zip(values, goals, strict=True)))
        return f"{texts[0]} (4 in flight: {texts[1]})", YES if met[0] else OVERLAPPED if met[1] else NO

    return judge


def _one_block(goals_ms: tuple[float, float]) -> Callable[[BenchReport], Verdict | None]:
    def judge(report: BenchReport) -> Verdict | None:
        texts, met = [], True
        for layout in (CONTIGUOUS.name, STACKED.name):
            rows = [
                report.find("bandwidth", layout=layout, blocks=1, direction=direction, in_flight=1, mode=UNPACED)
                for direction in ("store", "load")
            ]
            if None in rows:
                return None
            times = [float(row["ms_p50"]) for row in rows if row is not None]
            texts.append(f"{layout} {times[0]:.2f} / {times[1]:.2f} ms")
            met = met and all(took <= goal for took, goal in zip(times, goals_ms, strict=True))
        return ", ".join(texts), _yes(met)

    return judge


def _lookups(goals_us: Sequence[tuple[int, int, float]]) -> Callable[[BenchReport], Verdict | None]:
    """A check of lookups by (hashes, hits, microseconds); hits are looked up with a lease, as schedulers do."""

    def judge(report: BenchReport) -> Verdict | None:
        rows = [
            report.find("lookup", hashes=hashes, hits=hits, lease=bool(hits), mode="prefix")
            for hashes, hits, _ in goals_us
        ]
        if None in rows:
            return None
        times = [float(row["p50_us"]) for row in rows if row is not None]
        met = all(took <= goal for took, (_, _, goal) in zip(times, goals_us, strict=True))
        return " / ".join(f"{took:.0f}" for took in times) + " µs", _yes(met)

    return judge


def _submit(goal_us: float, goal_poll_us: float) -> Callable[[BenchReport], Verdict | None]:
    def judge(report: BenchReport) -> Verdict | None:
        poll = report.find("submit", call="poll")
        if poll is None:
            return None
        texts, met = [], float(poll["p50_us"]) <= goal_poll_us
        for blocks in SUBMIT_BLOCKS:
            rows = [report.find("submit", call=call, blocks=blocks) for call in ("store", "load")]
            if None in rows:
                return None
            times = [float(row["p50_us"]) for row in rows if row is not None]
            texts.append(f"{blocks}: {times[0]:.0f} / {times[1]:.0f}")
            met = met and max(times) <= goal_us
        return f"{', '.join(texts)}, poll {poll['p50_us']:.1f} µs", _yes(met)

    return judge


def _token(report: BenchReport) -> Verdict | None:
    row = report.find("token", traffic="store", mode=PACED)
    if row is None:
        return None
    met = row["p50_us"] <= 80 and row["p99_us"] <= 200 and row["store_gbps"] >= 44
    return f"{row['p50_us']:.0f} / {row['p99_us']:.0f} µs at {row['store_gbps']:.1f} GB/s", _yes(met)


def _decode(report: BenchReport) -> Verdict | None:
    row = report.find("interference", work="decode", traffic="store+load")
    if row is None:
        return None
    gbps = row["store_gbps"] + row["load_gbps"]
    return f"{row['slowdown']:.2%} at {gbps:.1f} GB/s", _yes(row["slowdown"] <= 0.015)


def _pin_delay(report: BenchReport) -> Verdict | None:
    idle, pins = (report.find("pin", phase=phase) for phase in ("idle", "daemon pins"))
    pool = report.find("pin", phase="pool")
    if idle is None or pins is None or pool is None:
        return None
    delay = pins["max_ms"] - idle["max_ms"]
    text = f"longest {pins['max_ms']:.2f} ms, idle {idle['max_ms']:.2f} ms, {pool['pool_bytes'] / GiB:g} GiB pinned"
    return text, _yes(delay <= 1.0)


def _pin_register(report: BenchReport) -> Verdict | None:
    pool = report.find("pin", phase="pool")
    if pool is None:
        return None
    beyond = pool["beyond_prefault_ms_per_gib"]
    return f"{beyond:.0f} of {pool['ms_per_gib']:.0f} ms/GiB ({pool['pages']})", _yes(beyond <= 35)


def _gpu_memory(report: BenchReport) -> Verdict | None:
    row = report.find("footprint")
    if row is None or row["gpu_bytes"] is None:
        return None
    return f"{row['gpu_bytes'] / MiB:.0f} MiB", _yes(row["gpu_bytes"] <= 280 * MiB)


def _host_memory(report: BenchReport) -> Verdict | None:
    row = report.find("footprint")
    if row is None or row["host_bytes"] is None or not row["blocks"]:
        return None
    text = f"{row['host_bytes'] / MiB:.0f} MiB + {row['bytes_per_block']:.0f} B ({row['blocks']} blocks)"
    met = row["host_bytes_with_blocks"] <= 200 * MiB + 250 * row["blocks"]
    return text, _yes(met)


def _jobs(report: BenchReport) -> Verdict | None:
    rows = [
        report.find("jobs", ranks=8, attached=8, device="host", cores=2, direction=direction)
        for direction in ("store", "load")
    ]
    if None in rows:
        return None
    rates = [float(row["jobs_per_second"]) for row in rows if row is not None]
    return " / ".join(f"{rate:.0f}" for rate in rates), _yes(min(rates) >= 2000)


TARGETS: tuple[Target, ...] = (
    Target("store / load, block-contiguous, 512 blocks", "≥ 95 / 95 %", _bandwidth("contiguous", 512, (0.95, 0.95))),
    Target(
        "store / load, layer-stacked 32 x 64 KiB, 64 blocks", "≥ 85 / 85 %", _bandwidth("stacked-64k", 64, (0.85, 0.85))
    ),
    Target(
        "store / load, layer-stacked 32 x 64 KiB, 512 blocks",
        "≥ 90 / 90 %",
        _bandwidth("stacked-64k", 512, (0.90, 0.90)),
    ),
    Target(
        "store / load, 32 allocations of 64 KiB pages, 512 consecutive ids",
        "≥ 88 / 88 %",
        _bandwidth("separate-64k-consecutive", 512, (0.88, 0.88)),
    ),
    Target("the same, random ids", "≥ 60 / 55 %", _bandwidth("separate-64k", 512, (0.60, 0.55))),
    Target("store / load, 160 x 4 KiB (TP 8), 512 blocks", "≥ 50 / 78 %", _bandwidth("tp8-4k", 512, (0.50, 0.78))),
    Target("store / load of one block, p50", "≤ 0.30 / 0.25 ms", _one_block((0.30, 0.25))),
    Target(
        "lookup p50: 64 / 512 hashes / 4096 misses",
        "≤ 130 / 300 / 1000 µs",
        _lookups(((64, 64, 130), (512, 512, 300), (4096, 0, 1000))),
    ),
    Target("submit a store / a load of 1 and of 512 blocks, an empty poll, p50", "≤ 20 / 20, 5 µs", _submit(20, 5)),
    Target("token copy p50 / p99 while stores run at ≥ 44 GB/s", "≤ 80 / 200 µs", _token),
    Target("decode graph slowed by both directions at full speed", "≤ 1.5 %", _decode),
    Target("engine step delayed by pinning", "longest within 1 ms of idle", _pin_delay),
    Target("pin: registration beyond the prefault", "≤ 35 ms/GiB with huge pages", _pin_register),
    Target("GPU memory of the daemon, per GPU", "≤ 280 MiB", _gpu_memory),
    Target("daemon memory beyond the pool", "≤ 200 MiB + 250 B per block", _host_memory),
    Target("jobs per second, 8 ranks, 2 cores, host device: stores / loads", "≥ 2000", _jobs),
)
