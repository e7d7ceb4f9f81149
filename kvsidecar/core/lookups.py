"""Lookups and leases: the cache's answers, gated by readiness and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvsidecar.cache.block import Space
from kvsidecar.cache.block_cache import BlockCache, Part
from kvsidecar.core.fetches import NOTHING
from kvsidecar.core.hashes import as_keys
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.tiering import Tiering
from kvsidecar.errors import Refusal
from kvsidecar.support.cpu_sleep import NO_GUARD, SleepGuard
from kvsidecar.types import LookupMode, Namespace

MAX_LEASES = 16384
"""Leases that one user may have; clients without a token count as one user."""
MAX_LEASED_BLOCKS = 1 << 22
"""Blocks in the leases of one user, 8 bytes each; a block that is in two counts twice."""


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """The readable ones of one group's hashes."""

    group: int
    hits: int
    found: Sequence[bool] = ()
    """One flag per hash in `LookupMode.BITMAP`; empty in `LookupMode.PREFIX`."""
    coming: int = 0
    """Blocks from the first miss on that are being fetched from a slower tier."""


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    ready: bool
    """Whether it comes from the cache; otherwise the daemon declines lookups, and there are no hits."""
    groups: tuple[GroupAnswer, ...]
    lease: int | None = None
    lease_seconds: float = 0.0
    asking: bool = False
    """A slower tier is being asked: more may be coming."""


class LookupService:
    """Answers at once, whatever the state of the pool. Used from the event loop.

    Args:
        clock: monotonic seconds, the clock of leases.
        lease_max: the longest lease granted, in seconds.
        guard: kept awake by each lookup: loads follow.
        owners_of: the tokens of all clients of one user, by one of them.
        tiering: what a lookup misses is fetched from there; None: there is no slower tier.
    """

    def __init__(
        self,
        cache: BlockCache,
        readiness: DaemonReadiness,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        lease_max: float,
        guard: SleepGuard = NO_GUARD,
        owners_of: Callable[[bytes], Sequence[bytes]] = lambda owner: [owner],
        tiering: Tiering | None = None,
    ) -> None:
        self._tiering = tiering
        self._guard = guard
        self._owners_of = owners_of
        self._cache = cache
        self._readiness = readiness
        self._metrics = metrics
        self._clock = clock
        self._lease_max = lease_max
        # By hash width, a space to look up in for a namespace without blocks: an answer that came sooner than for one
        # with blocks would tell a tenant which models the node serves (benchmarks/lookup_timing.py).
        self._nobodys: dict[int, Space] = {}
        self._hits = metrics.lookup_blocks.labels("hit")
        self._misses = metrics.lookup_blocks.labels("miss")

    def lookup(
        self,
        namespace: Namespace,
        groups: Sequence[tuple[int, Sequence[bytes]]],
        mode: LookupMode,
        *,
        lease_seconds: float = 0.0,
        owner: bytes | None = None,
        fetch_seconds: float = 0.0,
        prefill_rate: float = 0.0,
    ) -> LookupAnswer:
        """Which of these blocks are readable.

        Args:
            groups: (group, block hashes) pairs.
            lease_seconds: length of the lease on the hits; 0 for no lease. A user with too many leases gets none.
            owner: token of the client; the lease ends when the client disconnects.
            fetch_seconds: how long the caller can wait for misses that are fetched; 0: nothing is fetched.
            prefill_rate: tokens a second that the caller computes; 0 if it does not say.
        """
        self._guard.keep_awake()
        if (refusal := self._readiness.read_refusal) is not None:
            self._metrics.refuse(refusal)
            nothing = tuple(_hits(group, [False] * len(hashes), mode) for group, hashes in groups)
            return LookupAnswer(False, nothing)
        self.expire()
        parts = [(self._space(namespace, group), as_keys(hashes)) for group, hashes in groups]
        lease = None
        lease_seconds = min(lease_seconds, self._lease_max)
        if lease_seconds > 0 and self._has_too_many(owner, sum([len(hashes) for _, hashes in groups])):
            self._metrics.refuse(Refusal.LIMIT)
            lease_seconds = 0.0
        if lease_seconds > 0:
            lease, found = self._cache.lookup_and_lease(parts, mode, self._clock(), lease_seconds, owner)
        else:
            found = [self._cache.lookup(space, hashes, mode) for space, hashes in parts]
        result = tuple(_hits(group, hits, mode) for (group, _), hits in zip(groups, found, strict=True))
        hits = sum([each.hits for each in result])
        self._hits.inc(hits)
        self._misses.inc(sum([len(hashes) for _, hashes in groups]) - hits)
        asking = False
        if self._tiering is not None and fetch_seconds > 0:
            result, asking = self._fetch(self._tiering, parts, groups, found, result, fetch_seconds, prefill_rate)
        return LookupAnswer(True, result, lease.id if lease else None, lease_seconds if lease else 0.0, asking)

    def _fetch(
        self,
        tiering: Tiering,
        parts: Sequence[Part],
        groups: Sequence[tuple[int, Sequence[bytes]]],
        found: Sequence[list[bool]],
        answers: Sequence[GroupAnswer],
        seconds: float,
        prefill_rate: float,
    ) -> tuple[tuple[GroupAnswer, ...], bool]:
        """The answers with what is coming, and whether a tier is being asked."""
        result, asking = list(answers), False
        for i, hits in enumerate(found):
            if False in hits:
                coming = tiering.fetches.coming(parts[i][0], groups[i][1], hits.index(False), seconds, prefill_rate)
                if coming is not NOTHING:
                    asking |= coming.asking
                    result[i] = replace(result[i], coming=coming.blocks)
        return tuple(result), asking

    def _has_too_many(self, owner: bytes | None, blocks: int) -> bool:
        held = [self._cache.held(each) for each in ([None] if owner is None else self._owners_of(owner))]
        leases, leased = sum([each[0] for each in held]), sum([each[1] for each in held])
        return leases >= MAX_LEASES or leased + blocks > MAX_LEASED_BLOCKS

    def _space(self, namespace: Namespace, group: int) -> Space:
        space = self._cache.find_space(namespace, group)
        if space is None:
            width = namespace.hash_bytes
            space = self._nobodys.get(width) or self._nobodys.setdefault(width, self._cache.empty_space(width))
        return space

    def release(self, lease: int) -> bool:
        """End a lease. False if it has ended already."""
        return self._cache.release(lease)

    def renew(self, lease: int, lease_seconds: float) -> float:
        """Extend a lease to ``lease_seconds`` from now. Returns the seconds granted, 0 if it has ended already."""
        self.expire()
        granted = min(lease_seconds, self._lease_max)
        return granted if self._cache.renew(lease, self._clock(), granted) else 0.0

    def expire(self) -> None:
        """End the leases whose time is over."""
        if expired := self._cache.expire(self._clock()):
            self._metrics.refuse(Refusal.LEASE_EXPIRED, len(expired))

    def clear(self, namespace: Namespace | None) -> int:
        """Forget the blocks of one namespace, or of all. Returns how many can no longer be looked up."""
        if self._tiering is not None:
            self._tiering.forget(namespace)
        return self._cache.clear(namespace)


def _hits(group: int, found: list[bool], mode: LookupMode) -> GroupAnswer:
    return GroupAnswer(group, found.count(True), found if mode is LookupMode.BITMAP else ())
