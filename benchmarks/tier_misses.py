"""What a slower tier adds to the daemon's part of a lookup that misses.

Without a tier, with one that has nothing, and with one that is off; in one process, in turns, in a loop: no socket, and
no process of a tier.

    python -m benchmarks.tier_misses [--rounds 200] [--lookups 200]

Printed are medians over the rounds of the microseconds of a lookup, and of its ratio to the one without a tier in the
same round, with the first and the last quartile.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.turns import turns
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.core.hashes import PackedHashes
from kvsidecar.core.lookups import LookupService
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.tiering import Tiering, TierPlan
from kvsidecar.support.units import MiB
from kvsidecar.tiers.link import TierOptions
from kvsidecar.tiers.tier import Tier
from kvsidecar.types import LookupMode, Namespace

COUNTS = (64, 512)
PAGE = 4096
NAMESPACE = Namespace("m", "bf16", "LBNHC", 16, 1, 1, "sha256")
NO_POOL: Any = None


def lookups(tier: Tier | None) -> LookupService:
    """A daemon's lookups over a pool that has none of the blocks."""
    cache, metrics, readiness = BlockCache(SlotAllocator(MiB, MiB)), Metrics("host"), DaemonReadiness(MiB)
    cache.open_space(NAMESPACE, 0, 1, 0, PAGE)
    readiness.pinning()
    readiness.become_ready()
    tiering = None if tier is None else Tiering(cache, [TierPlan(tier)], metrics, time.monotonic)
    return LookupService(cache, readiness, metrics, time.monotonic, lease_max=60.0, tiering=tiering)


def new_tier(*, works: bool) -> Tier:
    tier = Tier("disk", TierOptions("disk", {}, capacity_bytes=1 << 30), NO_POOL)
    if works:
        tier.down = ""
    else:
        tier._filter.replace(None)  # of an engine that did not get far enough to know what it has
    return tier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--lookups", type=int, default=200, help="of each kind in a round")
    options = parser.parse_args()
    services = {
        "no tier": lookups(None),
        "no tier again": lookups(None),
        "it has nothing": lookups(new_tier(works=True)),
        "it is off": lookups(new_tier(works=False)),
    }
    table = Table(title="us of a lookup that misses all (ratio to no tier; quartiles)")
    for column in ("hashes", *services):
        table.add_column(column, justify="right")
    for count in COUNTS:
        packed = PackedHashes(b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(count)), 32)

        def once(service: LookupService, hashes: PackedHashes = packed) -> None:
            service.lookup(NAMESPACE, [(0, hashes)], LookupMode.PREFIX, fetch_seconds=0.05, prefill_rate=20_000.0)

        taken = in_turns([lambda service=each: once(service) for each in services.values()], options)  # type: ignore[misc]
        cells = []
        for each in taken:
            ratios = [one / first for one, first in zip(each, taken[0], strict=True)]
            low, _, high = quantiles(ratios, n=4)
            cells.append(f"{median(each) * 1e6:.1f} ({median(ratios):.3f}; {low:.2f}-{high:.2f})")
        table.add_row(str(count), *cells)
    Console(width=140).print(table)


def in_turns(calls: list[Callable[[], None]], options: argparse.Namespace) -> list[list[float]]:
    """Seconds of one call in each round, by call."""
    taken: list[list[float]] = [[] for _ in calls]
    for counts, order in turns(options.rounds, range(len(calls))):
        for which in order:
            began = time.perf_counter()
            for _ in range(options.lookups):
                calls[which]()
            if counts:
                taken[which].append((time.perf_counter() - began) / options.lookups)
    return taken


if __name__ == "__main__":
    main()
