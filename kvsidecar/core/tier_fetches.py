"""Blocks that a lookup misses are fetched from a slower tier, if that is expected to beat their computation.

A fetch reserves slots as a store does, so a block of it is readable when all of its shards are sealed. A block that was
announced to a lookup may still fail: it is a miss then. Slots stay reserved until the tier's call returns or its
process dies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from typing import Final

import numpy as np

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.cache.space_blocks import Space
from kvsidecar.core.hashes import as_keys
from kvsidecar.core.zeroing import Zeroing
from kvsidecar.errors import Refusal, TierFailed
from kvsidecar.support.tasks import heard
from kvsidecar.tiers.backend import ReadEnd, ShardSpace
from kvsidecar.tiers.key_filter import first_words
from kvsidecar.tiers.messages import MAX_BLOCKS
from kvsidecar.tiers.policy import Estimate, FetchRefusal
from kvsidecar.tiers.tier import Tier
from kvsidecar.types import Namespace

CHUNK_BYTES: Final = 16 << 20
"""A hit grows by this much at a time."""
CHUNKS: Final = 8
"""Chunks that are read at a time."""
MAX_WAITING: Final = 16 * MAX_BLOCKS
"""Blocks that may wait to be fetched, of all requests."""
INTEREST_SECONDS: Final = 1.0
"""A fetch that nobody has asked for in this time is given up."""
TRIAL_SECONDS: Final = 10.0
"""When nothing has been read for this long, a little is read even if that seems slower than computing it: the tier may
be faster than when it was last measured, or than was guessed."""
ABSENT_SECONDS: Final = 1.0
"""How long a tier is not asked again for a block that it does not have, or that is not worth a fetch."""
MAX_ABSENT: Final = 4096
NO_DIGEST: Final = bytes(16)


@dataclass(frozen=True, slots=True)
class ExpectedHits:
    """What may follow the hits of a lookup soon."""

    blocks: int = 0
    """Number of blocks being fetched, in prefix order after the hits."""
    asking: bool = False
    """A tier is being asked: there may be more."""


NOTHING: Final = ExpectedHits()


@dataclass(frozen=True, slots=True)
class FetchGain:
    """What a multi-group fetch saves; a hit needs all of its groups."""

    nbytes: int
    """Bytes of all groups together."""
    tokens: int
    """Tokens that need not be computed if all of it comes."""


@dataclass(frozen=True, slots=True)
class TierHits:
    """The misses of a lookup that a tier has."""

    places: Sequence[int] = ()
    """Positions of their hashes in the lookup, ascending."""
    asking: bool = False
    """The tier is being asked: there may be more."""


NOT_HELD: Final = TierHits()


@dataclass(slots=True, eq=False)
class _Question:
    """A request to a tier: which of these blocks does it have?"""

    asked: int
    """Number of blocks asked for."""
    until: float
    """When the answer is outdated."""
    held: frozenset[bytes] | None = None
    """The answer; None until there is one."""


@dataclass(slots=True, eq=False)
class Fetch:
    """The blocks of one prefix that a lookup has missed."""

    space: Space
    hashes: list[bytes]
    """In prefix order, from the first miss on."""
    seconds: float
    """How long the engine can wait."""
    prefill_rate: float
    """Tokens a second that the engine computes; 0 if unknown."""
    asked: float
    """When a lookup last asked for it."""
    gain: FetchGain | None = None
    """None: the blocks of this fetch are of use by themselves."""
    found: int = 0
    """Number of its blocks that the tier has and that are fetched."""
    issued: int = 0
    """Number of found blocks that have been handed to the tier."""
    chunks: int = 0
    """Chunks that are being read."""
    finding: bool = True
    over: bool = False

    @property
    def waiting(self) -> int:
        return self.found - self.issued


@dataclass(slots=True, eq=False)
class _Chunk:
    """Blocks that are read in one go: all of them become readable, or none."""

    fetch: Fetch
    grant: StoreGrant
    nbytes: int
    reads: int = 1
    """Reads that have not ended; one more while they are handed over."""
    failed: bool = False


@dataclass(eq=False)
class Fetches:
    """Used from the event loop.

    Args:
        bit: the tier's bit in `SpaceBlocks.tiers`.
        clock: monotonic seconds.
        refused: called with the reason and a number of blocks.
        may_be_cleared: whether the tier may have blocks of a namespace that were cleared.
        chunk_bytes: approximate size of a chunk.
    """

    cache: BlockCache
    tier: Tier
    bit: int
    clock: Callable[[], float]
    refused: Callable[[FetchRefusal, int], object]
    _: KW_ONLY
    may_be_cleared: Callable[[Namespace], bool] = lambda _: False
    chunk_bytes: int = CHUNK_BYTES
    zeroing: Zeroing | None = None

    def __post_init__(self) -> None:
        self._by_hash: dict[Space, dict[bytes, tuple[Fetch, int]]] = {}
        """Running fetches by each of their hashes, with its place in the prefix."""
        self._queues: dict[Namespace, deque[Fetch]] = {}
        """Fetches with blocks that wait, by namespace; namespaces take turns."""
        self._absent: dict[tuple[Space, bytes], float] = {}
        """First misses for which there is nothing to fetch, and until when; the oldest first."""
        self._questions: dict[tuple[Space, bytes], _Question] = {}
        """Questions by the last hash of their lookup, which identifies the ones before it; the oldest first."""
        self._asked_blocks = 0
        """Number of blocks in all questions."""
        self._digests: dict[Space, bytes] = {}
        self._next_trial = self.clock() + TRIAL_SECONDS
        self._off_misses = 0
        """Misses while the tier was off that have not been counted."""
        self.waiting_blocks = 0
        """Blocks that have been found, and not handed to the tier yet."""
        self.reading_bytes = 0

    def may_come(self, space: Space, block_hash: bytes) -> bool:
        """Whether the tier may have a block that a lookup has missed, and is asked. Nearly every miss ends here."""
        if not self.tier.may_have(self._digests.get(space) or self._digest(space), block_hash):
            return False
        if self.tier.off:
            self._off_misses += 1
            return False
        return True

    def count(self) -> None:
        """Count the misses for which a tier that is off was not asked: counting each by itself would take as long as
        all of `may_come`."""
        if self._off_misses:
            self.refused(FetchRefusal.OFF, self._off_misses)
            self._off_misses = 0

    def coming(
        self,
        space: Space,
        hashes: Sequence[bytes],
        hits: int,
        seconds: float,
        prefill_rate: float = 0.0,
        gain: FetchGain | None = None,
    ) -> ExpectedHits:
        """What may follow the hits of a lookup, if its first miss `may_come`. Begins to fetch it, if that is worth it.

        Args:
            hashes: all hashes of the lookup, in prefix order.
            hits: how many of the first ones are readable; not all are.
            seconds: how long the caller can wait.
            prefill_rate: tokens a second that the caller computes; 0 if unknown.
            gain: what the blocks are for, together with others; None: they are of use by themselves.
        """
        first = hashes[hits]
        now = self.clock()
        if (known := self._by_hash.get(space, {}).get(first)) is not None:
            fetch, at = known
            fetch.asked = now
            return ExpectedHits(max(0, fetch.found - at), fetch.finding)
        if self._absent.get((space, first), now) > now or not self._may_be_fetched(space):
            return NOTHING
        if self.waiting_blocks > MAX_WAITING:
            self.refused(FetchRefusal.BUSY, 1)
            return NOTHING
        fetch = Fetch(space, list(hashes[hits : hits + MAX_BLOCKS]), seconds, prefill_rate, now, gain)
        # Here: no other fetch of the gain waits before it yet.
        if gain is not None and not self._worth_it(fetch, gain) and not self._may_try(gain.nbytes, seconds):
            self._end(fetch, FetchRefusal.SLOWER, len(fetch.hashes))
            return NOTHING
        by_hash = self._by_hash.setdefault(space, {})
        for at, each in enumerate(fetch.hashes):
            by_hash.setdefault(each, (fetch, at))
        try:
            # The shards of a block are written together. One that is missing nevertheless fails its read.
            self.tier.find(shard_space(space, 0), b"".join(fetch.hashes), partial(self._found, fetch))
        except TierFailed:
            self._end(fetch, FetchRefusal.OFF)
        return ExpectedHits(0, fetch.finding)

    def held(self, space: Space, hashes: Sequence[bytes], hits: Sequence[bool]) -> TierHits:
        """The misses of a lookup that the tier has, of the first `MAX_BLOCKS` that it may have. Fetches nothing.

        Args:
            hashes: all hashes of the lookup, in prefix order.
            hits: one flag per hash, true if it is readable; not all are.
        """
        now, key = self.clock(), (space, hashes[-1])
        places = self._perhaps(space, hashes, hits)
        question = self._questions.get(key)
        if question is None or (question.held is not None and question.until < now):
            question = self._ask(key, [hashes[each] for each in places], now)
        if question is None or question.held is None:
            return NOT_HELD if question is None else TierHits(asking=True)
        held = question.held
        return TierHits([each for each in places if hashes[each] in held]) if held else NOT_HELD

    def _perhaps(self, space: Space, hashes: Sequence[bytes], hits: Sequence[bool]) -> list[int]:
        """Places of the first `MAX_BLOCKS` misses that the tier may have."""
        if self.tier.off:
            return []
        keys = as_keys(hashes)
        packed = keys if isinstance(keys, bytes) else b"".join(keys)
        missing = np.flatnonzero(~np.array(hits, np.bool_))
        words = first_words(packed, len(packed) // len(hashes))[missing]
        some: list[int] = missing[self.tier.may_have_each(self._digest(space), words)][:MAX_BLOCKS].tolist()
        return some

    def _ask(self, key: tuple[Space, bytes], some: Sequence[bytes], now: float) -> _Question | None:
        """Ask the tier which of these it has. None: it is not asked."""
        space = key[0]
        if not some:
            if self.tier.off:
                self.refused(FetchRefusal.OFF, 1)
            return None
        if not self._may_be_fetched(space):
            return None
        self._drop_questions(now, len(some))
        if self._asked_blocks + len(some) > MAX_WAITING:
            self.refused(FetchRefusal.BUSY, 1)
            return None
        question = _Question(len(some), now + ABSENT_SECONDS)

        def answered(flags: Sequence[bool]) -> None:
            question.held = frozenset([each for each, flag in zip(some, flags, strict=False) if flag])

        try:
            self.tier.find(shard_space(space, 0), b"".join(some), answered)
        except TierFailed:
            self.refused(FetchRefusal.OFF, 1)
            return None
        self._questions[key] = question
        self._asked_blocks += question.asked
        return question

    def _drop_questions(self, now: float, room: int) -> None:
        """Forget questions that are outdated, and other answered ones until there is room for this many blocks."""
        for key, question in tuple(self._questions.items()):
            if question.until >= now and self._asked_blocks + room <= MAX_WAITING:
                return
            if question.held is not None:
                del self._questions[key]
                self._asked_blocks -= question.asked

    def _may_be_fetched(self, space: Space) -> bool:
        if not space.users or None in space.shard_bytes:
            return False
        if self.may_be_cleared(space.namespace):
            self.refused(FetchRefusal.OFF, 1)
            return False
        return True

    def _worth_it(self, fetch: Fetch, gain: FetchGain) -> bool:
        estimate = Estimate(
            gain.nbytes,
            self.waiting_blocks * fetch.space.block_bytes + self.reading_bytes,
            self.tier.read_rate,
            gain.tokens,
            fetch.prefill_rate,
        )
        return estimate.worth_it and estimate.seconds <= fetch.seconds

    def _may_try(self, nbytes: int, seconds: float) -> bool:
        """Whether to read this much although it does not seem worth it, to learn how fast the tier is."""
        return self.clock() >= self._next_trial and nbytes / self.tier.read_rate <= seconds

    def _digest(self, space: Space) -> bytes:
        """Digest of the space's first shard. A space without ranks gets a constant: a lookup there takes as long as any
        other."""
        digest = self._digests.get(space)
        if digest is None:
            if space.shard_bytes[0] is None:
                return NO_DIGEST
            if len(self._digests) >= MAX_ABSENT:
                self._digests.clear()
            digest = self._digests[space] = shard_space(space, 0).digest
        return digest

    def forget(self, namespace: Namespace | None) -> None:
        """Fetch nothing more of a namespace, or of all: it is cleared."""
        for space, by_hash in tuple(self._by_hash.items()):
            if namespace is None or space.namespace == namespace:
                for fetch, _ in tuple(by_hash.values()):
                    self._end(fetch)
        for key, question in tuple(self._questions.items()):
            if namespace is None or key[0].namespace == namespace:
                del self._questions[key]
                self._asked_blocks -= question.asked

    def _found(self, fetch: Fetch, flags: Sequence[bool]) -> None:
        """Handle the tier's answer."""
        fetch.finding = False
        found = next((i for i, flag in enumerate(flags) if not flag), len(flags))
        if not found or fetch.over:
            self._end(fetch)
            return
        space = fetch.space
        gain = FetchGain(found * space.block_bytes, found * space.namespace.block_size)
        if fetch.gain is None and not self._worth_it(fetch, gain):
            tried = min(found, max(1, self.chunk_bytes // space.block_bytes))
            if not self._may_try(tried * space.block_bytes, fetch.seconds):
                self._end(fetch, FetchRefusal.SLOWER, found)
                return
            if found > tried:
                self.refused(FetchRefusal.SLOWER, found - tried)
            found = tried
        fetch.found = found
        self.waiting_blocks += found
        self._queues.setdefault(space.namespace, deque()).append(fetch)
        self._read_more()

    def _read_more(self) -> None:
        """Read as much as may be read at a time: a chunk of each namespace in turn."""
        while self._queues and self.reading_bytes < CHUNKS * self.chunk_bytes:
            namespace = next(iter(self._queues))
            queue = self._queues.pop(namespace)
            fetch = queue[0]
            try:
                self._read_chunk(fetch)
            except Exception as error:  # noqa: BLE001 - reported; the other fetches go on
                heard(f"blocks are not fetched from the tier {self.tier.name}", error)
                self._end(fetch, FetchRefusal.FAILED, fetch.waiting)
            if fetch.over or not fetch.waiting:
                queue.popleft()
            if queue:
                self._queues[namespace] = queue  # behind the others

    def _read_chunk(self, fetch: Fetch) -> None:
        space = fetch.space
        if fetch.over:
            return
        if self.clock() - fetch.asked > INTEREST_SECONDS or not space.users:
            self._end(fetch, FetchRefusal.ABANDONED, fetch.waiting)
            return
        count = min(fetch.waiting, max(1, self.chunk_bytes // space.block_bytes))
        hashes = fetch.hashes[fetch.issued : fetch.issued + count]
        packed = b"".join(hashes)
        grant = self.cache.begin_store([(space, shard, packed) for shard in range(space.num_shards)], wanted=True)
        if isinstance(grant, Refusal):
            self._end(fetch, FetchRefusal.POOL_FULL, fetch.waiting)
            return
        chunk = _Chunk(fetch, grant, sum([len(part.index) * part.slot_size for part in grant.parts]))
        self._next_trial = self.clock() + TRIAL_SECONDS
        fetch.issued += count
        fetch.chunks += 1
        self.waiting_blocks -= count
        self.reading_bytes += chunk.nbytes

        def later() -> None:
            self._read_parts(chunk, hashes)
            self._read_more()

        if self.zeroing is None or self.zeroing.may_write(grant, later):
            self._read_parts(chunk, hashes)

    def _read_parts(self, chunk: _Chunk, hashes: Sequence[bytes]) -> None:
        fetch, space = chunk.fetch, chunk.fetch.space
        for part in chunk.grant.parts:
            if not len(part.index):
                continue  # stored meanwhile, or being stored
            wanted = b"".join([hashes[index] for index in part.index.tolist()])
            late = partial(self._end, fetch, FetchRefusal.LATE)
            try:
                self.tier.read(shard_space(space, part.shard), wanted, part.slots, partial(self._read, chunk), late)
                chunk.reads += 1
            except TierFailed:
                chunk.failed = True
            except Exception as error:  # noqa: BLE001 - reported; what was asked before has to end all the same
                heard(f"blocks are not read from the tier {self.tier.name}", error)
                chunk.failed = True
        self._read_ended(chunk)

    def _read(self, chunk: _Chunk, ends: Sequence[ReadEnd]) -> None:
        chunk.failed |= not ends or any(end is not ReadEnd.DONE for end in ends)
        self._read_ended(chunk)
        self._read_more()

    def _read_ended(self, chunk: _Chunk) -> None:
        """One read of a chunk is over; after the last one its blocks are readable, or given back."""
        chunk.reads -= 1
        if chunk.reads:
            return
        fetch = chunk.fetch
        fetch.chunks -= 1
        self.reading_bytes -= chunk.nbytes
        if chunk.failed:
            self.cache.abort_all(chunk.grant)
            self._end(fetch, FetchRefusal.FAILED)
            return
        self.cache.seal_all(chunk.grant)
        self.cache.tiers.mark(chunk.grant, self.bit)
        if not fetch.waiting and not fetch.chunks:
            self._end(fetch)

    def _end(self, fetch: Fetch, reason: FetchRefusal | None = None, blocks: int = 1) -> None:
        """Fetch no more of it. What is being read becomes readable when it is there."""
        if fetch.over:
            return
        fetch.over, fetch.finding = True, False
        if reason is not None:
            self.refused(reason, blocks)
        self.waiting_blocks -= fetch.waiting
        if (beyond := fetch.issued if reason is None else 0) < len(fetch.hashes):
            self._remember_absent(fetch.space, fetch.hashes[beyond])
        by_hash = self._by_hash.get(fetch.space, {})
        for each in fetch.hashes:
            if by_hash.get(each, (None, 0))[0] is fetch:
                del by_hash[each]
        if not by_hash:
            self._by_hash.pop(fetch.space, None)

    def _remember_absent(self, space: Space, first: bytes) -> None:
        absent, now = self._absent, self.clock()
        absent.pop((space, first), None)
        absent[space, first] = now + ABSENT_SECONDS
        while len(absent) > MAX_ABSENT or next(iter(absent.values())) < now:
            del absent[next(iter(absent))]


def shard_space(space: Space, shard: int) -> ShardSpace:
    nbytes = space.shard_bytes[shard]
    assert nbytes is not None
    return _shard_space(space.namespace, space.group, shard, space.num_shards, nbytes)


_shard_space = lru_cache(maxsize=1024)(ShardSpace)  # to make its digest takes longer than a lookup
