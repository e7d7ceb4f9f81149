"""The slower tier behind the pool: what it is told, and what it brings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.core.fetches import Fetches
from kvsidecar.core.metrics import Metrics, TierGauges
from kvsidecar.core.writes import Writes
from kvsidecar.tiers.policy import Admission, FetchRefusal, WriteBudget, WriteRefusal
from kvsidecar.tiers.tier import Tier
from kvsidecar.types import Namespace

BIT = 1
"""Of the tier, in `SpaceBlocks.tiers`."""


class Tiering:
    """Used from the event loop.

    Args:
        write_bytes_per_day: None for no limit.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        cache: BlockCache,
        tier: Tier,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        admission: Admission = Admission.SECOND_USE,
        write_bytes_per_day: int | None = None,
    ) -> None:
        self.tier = tier
        # 0 from the start: an alert sees the first one. Found once: each lookup may count one.
        unfetched = {reason: metrics.unfetched.labels(tier.name, reason.value) for reason in FetchRefusal}
        unwritten = {reason: metrics.unwritten.labels(tier.name, reason.value) for reason in WriteRefusal}
        self.writes = Writes(
            cache,
            tier,
            BIT,
            admission,
            WriteBudget(write_bytes_per_day, clock()),
            clock,
            lambda reason, blocks: unwritten[reason].inc(blocks),
            soon=_behind_the_answers,
        )
        self.fetches = Fetches(
            cache,
            tier,
            BIT,
            clock,
            lambda reason, blocks: unfetched[reason].inc(blocks),
            may_be_cleared=self.writes.may_bring_back,
        )

    def gauges(self) -> TierGauges:
        tier = self.tier
        return TierGauges(
            tier.name,
            tier.off,
            tier.stats,
            tier.counts,
            self.fetches.reading_bytes,
            self.writes.writing_bytes,
            self.writes.budget_left,
        )

    def forget(self, namespace: Namespace | None) -> None:
        """A namespace is cleared, or all."""
        self.fetches.forget(namespace)
        self.writes.forget(namespace)


def _behind_the_answers(call: Callable[[], object]) -> None:
    """uvloop sends what was written to a socket at the end of a turn of the loop. This may be the begin of one."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, call)
