"""The slower tiers behind the pool, the fastest first: what they are sent, and what they bring."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.space_blocks import Space
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.tier_fetches import CHUNK_BYTES, NOTHING, ExpectedHits, Fetches, FetchGain, TierHits, shard_space
from kvsidecar.core.tier_metrics import TierGauges
from kvsidecar.core.tier_writes import Writes, queue_share
from kvsidecar.core.zeroing import Zeroing
from kvsidecar.tiers.backend import ShardSpace
from kvsidecar.tiers.policy import Admission, FetchRefusal, WriteBudget, WriteRefusal
from kvsidecar.tiers.tier import OnReport, Tier
from kvsidecar.types import Namespace


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier, and what it may take."""

    tier: Tier
    admission: Admission = Admission.SECOND_USE
    write_bytes_per_day: int | None = None
    """Budget for writes; None for no limit."""
    own: bool = False
    """It belongs to this node alone, and knows what it has: watchers are sent its blocks, too."""


@dataclass(frozen=True, slots=True)
class _TierWork:
    tier: Tier
    writes: Writes
    fetches: Fetches


class Tiering:
    """Used from the event loop.

    Args:
        plans: the fastest tier first; at most eight.
        clock: seconds, the clock of leases.
        chunk_bytes: approximate size of a chunk.
        queue_bytes: the most bytes that wait to be written to all tiers, or are being written; None for a share of the
            pool.
        soon: makes a call a little later, see `Writes`; None: behind the answers that the event loop has to send.
    """

    def __init__(
        self,
        cache: BlockCache,
        plans: Sequence[TierPlan],
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        queue_bytes: int | None = None,
        soon: Callable[[Callable[[], object]], object] | None = None,
        zeroing: Zeroing | None = None,
    ) -> None:
        all_bytes = queue_share(cache.stats().total_bytes) if queue_bytes is None else queue_bytes

        def tier_work(plan: TierPlan, bit: int) -> _TierWork:
            tier = plan.tier
            # 0 from the start: an alert sees the first one. Found once: each lookup may count one.
            unfetched = {reason: metrics.unfetched.labels(tier.name, reason.value) for reason in FetchRefusal}
            unwritten = {reason: metrics.unwritten.labels(tier.name, reason.value) for reason in WriteRefusal}
            writes = Writes(
                cache,
                tier,
                bit,
                plan.admission,
                WriteBudget(plan.write_bytes_per_day, clock()),
                clock,
                lambda reason, blocks: unwritten[reason].inc(blocks),
                chunk_bytes=chunk_bytes,
                queue_bytes=all_bytes // len(plans),
                soon=soon or _behind_the_answers,
            )
            fetches = Fetches(
                cache,
                tier,
                bit,
                clock,
                lambda reason, blocks: unfetched[reason].inc(blocks),
                may_be_cleared=writes.may_bring_back,
                chunk_bytes=chunk_bytes,
                zeroing=zeroing,
            )
            return _TierWork(tier, writes, fetches)

        self._tiers = [tier_work(plan, 1 << number) for number, plan in enumerate(plans)]
        self._own = next((plan.tier for plan in plans if plan.own), None)
        only = self._tiers[0].fetches if len(plans) == 1 else None
        self.may_come: Callable[[Space, bytes], bool] = (lambda *_: True) if only is None else only.may_come
        """Asks `Fetches.may_come` before `coming`: nearly every miss ends here, and with one tier in one call. With
        several, `coming` asks each."""

    def gauges(self) -> list[TierGauges]:
        self.count()
        return [
            TierGauges(
                each.tier.name,
                each.tier.off,
                each.tier.stats,
                each.tier.counts,
                each.fetches.reading_bytes,
                each.writes.writing_bytes,
                each.writes.budget_left,
                each.tier.deaths,
            )
            for each in self._tiers
        ]

    def count(self) -> None:
        """`Fetches.count` in all tiers."""
        for each in self._tiers:
            each.fetches.count()

    def off(self) -> dict[str, str]:
        """The reason why each tier is not used at present, by its name; empty while it is."""
        return {each.tier.name: each.tier.off for each in self._tiers}

    def stored(self, grant: StoreGrant) -> None:
        """`Writes.stored` in all tiers."""
        for each in self._tiers:
            each.writes.stored(grant)

    def used(self, grant: LoadGrant) -> None:
        """`Writes.used` in all tiers."""
        for each in self._tiers:
            each.writes.used(grant)

    def coming(
        self,
        space: Space,
        hashes: Sequence[bytes],
        hits: int,
        seconds: float,
        prefill_rate: float,
        gain: FetchGain | None = None,
    ) -> ExpectedHits:
        """`Fetches.coming` across all tiers, if the first miss `may_come`. A run of blocks comes from the first tier
        that has its first block, and what follows it from another one at the same time: one run of each tier."""
        first, asking = hits, False
        for _ in self._tiers:
            block_hash = hashes[first]
            for each in self._tiers:
                if not each.fetches.may_come(space, block_hash):
                    continue
                piece = each.fetches.coming(space, hashes, first, seconds, prefill_rate, gain)
                if piece.blocks or piece.asking:
                    break
            else:
                break
            first, asking = first + piece.blocks, piece.asking
            if asking or first >= len(hashes):
                break
        return ExpectedHits(first - hits, asking) if asking or first > hits else NOTHING

    def held(self, space: Space, hashes: Sequence[bytes], hits: Sequence[bool]) -> TierHits:
        """`Fetches.held` across all tiers. A tier is asked for what the faster ones do not have."""
        there, places = list(hits), list[int]()
        for each in self._tiers:
            held = each.fetches.held(space, hashes, there)
            places += held.places
            for place in held.places:
                there[place] = True
            if held.asking or False not in there:
                break
        return TierHits(sorted(places), held.asking)

    def watch(self, space: Space, tell: OnReport) -> ShardSpace | None:
        """Report what the node's own tier has of a space, and changes; from the beginning if it is watched already.
        A block counts by its first shard: the shards of a block are written together, and looked for by the first.

        Returns:
            The watched space, for `unwatch`; None: there is no such tier, or no rank has yet registered the block size.
        """
        if self._own is None or space.shard_bytes[0] is None:
            return None
        watched = shard_space(space, 0)
        self._own.watch(watched, tell)
        return watched

    def unwatch(self, watched: ShardSpace) -> None:
        if self._own is not None:
            self._own.unwatch(watched)

    def forget(self, namespace: Namespace | None) -> None:
        """A namespace is cleared, or all."""
        for each in self._tiers:
            each.fetches.forget(namespace)
            each.writes.forget(namespace)


def _behind_the_answers(call: Callable[[], object]) -> None:
    """uvloop sends what was written to a socket at the end of an iteration. This may be the beginning of one."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, call)
