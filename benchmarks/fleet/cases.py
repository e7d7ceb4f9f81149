"""What is simulated: sections of cases, each in a process of its own."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.fleet.node import STORE_BLOCKS, Hardware
from benchmarks.fleet.replay import MANY_NODES, Case, replay
from benchmarks.fleet.trace import Mix, Trace, generate, read
from kvsidecar.support.units import GiB, MiB
from kvsidecar.tiers.policy import Admission


class Model(NamedTuple):
    block_bytes: int
    """Of 512 tokens."""
    gpu_bytes: int
    """KV cache of one engine."""
    prefill_rate: float
    """Tokens a second of one engine."""
    twice_at: float
    """Position of the token that takes twice as long as the first one: to attend to all before it takes as many
    operations as all else."""


MODELS: Final = {
    "70b": Model(160 * MiB, 384 * GiB, 10_000.0, 53_000.0),  # 8 GPUs of 80 GB
    "8b": Model(64 * MiB, 48 * GiB, 20_000.0, 30_000.0),  # one GPU of 80 GB
}
SECTIONS: Final = ("pool", "disk", "budget", "speed", "returns", "fleet")
NONE, SECOND_USE = Admission.NONE.value, Admission.SECOND_USE.value
ADMISSIONS: Final = (SECOND_USE, Admission.ALL.value, Admission.ON_EVICT.value)
HOURS: Final = 12.0
"""Of the generated trace."""
WARM_SHARE: Final = 0.25
"""Of a generated trace. A real one is short: it is counted from its start."""


@dataclass(frozen=True)
class Task:
    section: str
    source: Mix | Path
    case: Case


@lru_cache(maxsize=1)
def load(source: Mix | Path) -> Trace:
    return generate(source) if isinstance(source, Mix) else read(source)


def run(task: Task) -> dict[str, Any]:
    mix = {} if isinstance(task.source, Path) else {"mix": dataclasses.asdict(task.source)}
    return {"section": task.section, **mix, **replay(load(task.source), task.case)}


def mix_of(options: argparse.Namespace) -> Mix:
    """The generated trace of one node."""
    hours = HOURS if options.hours is None else options.hours
    return Mix(hours, options.rate, options.agents, options.returns, options.seed)


def plan(options: argparse.Namespace) -> Iterator[Task]:
    """Sections of the report, one after the other."""
    model = MODELS[options.model]
    pool, disk = options.pool[len(options.pool) // 2 - 1], options.disk[len(options.disk) // 2]
    node = Hardware(
        model.block_bytes,
        options.gpu or model.gpu_bytes,
        pool,
        prefill_rate=model.prefill_rate,
        disk_read=options.disk_read,
        disk_write=options.disk_write,
    )
    one = mix_of(options)
    mine = replace(one, rate=one.rate * options.nodes)
    source = options.trace or mine
    base = Case(node, options.nodes, True, 0.0 if options.trace else WARM_SHARE, options.seed)

    def task(section: str, source: Mix | Path = source, case: Case = base, **changes: Any) -> Task:
        return Task(section, source, replace(case, hardware=replace(case.hardware, **changes)))

    for size in options.pool:
        yield task("pool", pool_bytes=size, admission=NONE)
    for size in options.disk:
        for admission in options.admissions:
            yield task("disk", disk_bytes=size, admission=admission)
    for per_day in options.budget:
        for admission in options.admissions:
            yield task("budget", disk_bytes=disk, admission=admission, write_bytes_per_day=per_day)
    for rate in (options.disk_read / 2, options.disk_read * 2):
        for admission in options.admissions:
            yield task("speed", disk_bytes=disk, disk_read=rate, admission=admission)
    for returns in () if options.trace else (0.0, 0.3):
        for admission in options.admissions:
            yield task("returns", replace(mine, returns=returns), disk_bytes=disk, admission=admission)
    for nodes in options.fleet:
        fleet = options.trace or replace(one, rate=one.rate * nodes, hours=options.fleet_hours)
        for affinity in (True, False):
            chunk = STORE_BLOCKS if nodes >= MANY_NODES else 1
            case = replace(base, nodes=nodes, affinity=affinity, hardware=replace(node, chunk_blocks=chunk))
            yield task("fleet", fleet, case, admission=NONE)
            yield task("fleet", fleet, case, disk_bytes=options.cluster)
            for admission in options.admissions:
                yield task("fleet", fleet, case, cluster_bytes=options.cluster * nodes, admission=admission)
