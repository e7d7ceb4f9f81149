"""Rates from two samples of a daemon's counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvsidecar.v1 import sidecar_pb2 as pb


@dataclass(frozen=True, slots=True)
class Sample:
    """A status reply and the time of its arrival."""

    at: float
    """Seconds on a monotonic clock."""
    reply: pb.StatusReply


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes and blocks per second, unless stated otherwise."""

    stored_bytes: float
    loaded_bytes: float
    hits: float
    misses: float
    evicted_bytes: float
    refusals: Mapping[str, int]
    """New refusals by reason: counts, not rates. Only reasons that occurred."""
    ranks: Mapping[int, tuple[float, float]]
    """Bytes stored and loaded per second, by session; without ranks that have just attached."""

    @property
    def hit_rate(self) -> float | None:
        """The share of requested blocks that were hits; None if no block was requested."""
        requested = self.hits + self.misses
        return self.hits / requested if requested else None


def rates_between(before: Sample, after: Sample) -> Rates | None:
    """None if no time has passed, or if the daemon was restarted, which resets its counters."""
    seconds = after.at - before.at
    old, new = before.reply, after.reply
    if seconds <= 0 or old.epoch != new.epoch:
        return None
    ranks_before = {rank.session: rank for rank in old.ranks}
    return Rates(
        stored_bytes=(new.jobs.stored_bytes - old.jobs.stored_bytes) / seconds,
        loaded_bytes=(new.jobs.loaded_bytes - old.jobs.loaded_bytes) / seconds,
        hits=(new.lookups.hits - old.lookups.hits) / seconds,
        misses=(new.lookups.misses - old.lookups.misses) / seconds,
        evicted_bytes=(new.pool.evicted_bytes - old.pool.evicted_bytes) / seconds,
        refusals=Counter(new.refusals) - Counter(old.refusals),
        ranks={
            rank.session: (
                (rank.stored_bytes - ranks_before[rank.session].stored_bytes) / seconds,
                (rank.loaded_bytes - ranks_before[rank.session].loaded_bytes) / seconds,
            )
            for rank in new.ranks
            if rank.session in ranks_before
        },
    )
