"""One-block jobs per second with 1 to 8 attached ranks, which the daemon's own overhead limits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from kvsidecar.bench.layouts import TINY
from kvsidecar.bench.processes import BenchChild, Daemon
from kvsidecar.bench.report import Measurement, Row
from kvsidecar.bench.setting import Setting
from kvsidecar.support.units import MiB
from kvsidecar.types import Direction

RANKS = (1, 2, 4, 8)
IN_FLIGHT = 8
"""Outstanding jobs of each rank."""
SECONDS = 1.5
TWO_CORES = 2
HOST_POOL = 4 * MiB


def measure(setting: Setting, out: Measurement) -> None:
    _rates(setting, out, RANKS, setting.daemon(), setting.device, cores=None)
    mine = sorted(os.sched_getaffinity(0))
    cores = frozenset(mine[:TWO_CORES])
    if setting.is_private and (setting.device != "host" or len(mine) > TWO_CORES):
        # The figure that machines share: daemon and ranks on two cores, and no GPU.
        with setting.private_daemon(HOST_POOL, device="host", cores=cores) as daemon:
            _rates(setting, out, RANKS[-1:], daemon, "host", cores=cores)
    if setting.is_private:
        devices = ["host", *(f"host-{number}" for number in range(1, max(RANKS)))]
        flags = ["--devices", ",".join(devices)]
        with setting.private_daemon(HOST_POOL, flags, device="host", cores=cores) as daemon:
            _rates(setting, out, RANKS[-1:], daemon, "host", cores=cores, devices=devices)


def _rates(
    setting: Setting,
    out: Measurement,
    numbers: tuple[int, ...],
    daemon: Daemon,
    device: str,
    cores: frozenset[int] | None,
    devices: Sequence[str] = (),
) -> None:
    """A row for each number of ranks and direction.

    Args:
        devices: the ranks' devices, in turn; empty: one device for all.
    """
    with ExitStack() as stack:
        children: list[BenchChild] = []
        for number in range(max(numbers)):
            setting.say(f"attaching rank {number} on {device}")
            rank = setting.rank(
                TINY, 1, IN_FLIGHT, tuple(Direction), daemon=daemon, device=device, cores=cores, number=number,
                on=devices[number % len(devices)] if devices else None,
            )  # fmt: skip
            children.append(stack.enter_context(rank))
        for count in numbers:
            for direction in Direction:
                setting.say(f"{count} rank{'s' if count > 1 else ''}, {direction}")
                (rate,) = rates(children[:count], [direction], "jobs", setting.seconds(SECONDS))
                out.add(
                    ranks=count,
                    attached=len(children),
                    direction=direction.value,
                    device=device,
                    copiers=len(devices) or 1,
                    cores=len(cores or os.sched_getaffinity(0)),
                    jobs_per_second=round(rate, 1),
                )


def rates(
    children: list[BenchChild],
    directions: Sequence[Direction],
    what: str,
    seconds: float,
    meanwhile: Callable[[float], None] = time.sleep,
) -> list[float]:
    """``jobs`` or ``bytes`` a second by direction, of all ranks together while all of them are at work.

    Args:
        meanwhile: called once during that; takes ``seconds``.
    """
    for child in children:
        child.call("start", directions=[direction.value for direction in directions], idle=True)
    time.sleep(seconds / 5)
    before = [child.call("count") for child in children]
    meanwhile(seconds)
    after = [child.call("count") for child in children]
    for child in children:
        child.call("stop")
    return list(per_second(before, after, map(str, directions), what).values())


def per_second(before: list[Row], after: list[Row], directions: Iterable[str], what: str) -> dict[str, float]:
    """``jobs`` or ``bytes`` a second of all ranks together, by direction, from two counts of each."""
    pairs = list(zip(before, after, strict=True))
    return {
        name: sum((late[name][what] - early[name][what]) / (late["time"] - early["time"]) for early, late in pairs)
        for name in directions
    }
