"""A tiny engine for the scheduler's side: a block pool that caches prefixes as vLLM's does, requests, and a daemon that
keeps what is stored. Small, but real: every block has content, and a copy that reads or writes the wrong one is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, TypeVar

from hypothesis import strategies as st

from kvsidecar.client import BreakerState
from kvsidecar.client.types import NO_ANSWER, GroupHits, LookupResult
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.hits import limit, lookup_range
from kvsidecar.integrations.vllm.metadata import LoadJob, RankReport, StepPlan, StoreJob
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.integrations.vllm.recomputing import Recompute
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from kvsidecar.integrations.vllm.selection import group_suffix
from kvsidecar.integrations.vllm.shared import EngineFacts
from kvsidecar.integrations.vllm.written import BlockIds
from kvsidecar.types import LookupMode, Namespace

NAMESPACE = Namespace("m", "bf16", "LBNHC", 4, 1, 1, "sha256")
EPOCH = 7


def full(index: int = 0, block_tokens: int = 4, **values: Any) -> Group:
    return group(index, GroupKind.FULL, block_tokens, **values)


def group(
    index: int, kind: GroupKind, block_tokens: int, *, hash_tokens: int = 4, alignment: int = 4, **values: Any
) -> Group:
    return Group(index, kind, (f"layer.{index}",), block_tokens, hash_tokens, alignment, **values)


def chain(tokens: Sequence[int], hash_tokens: int = 4) -> list[bytes]:
    """Hashes of the full blocks of these tokens, each of all tokens up to its end."""
    ends = range(hash_tokens, len(tokens) + 1, hash_tokens)
    return [hashlib.sha256(repr(list(tokens[:end])).encode()).digest() for end in ends]


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    is_null: bool = False
    content: bytes | None = None


class FreeQueue:
    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        start = 0 if cursor is None else self.blocks.index(cursor) + 1
        return iter(self.blocks[start:])


class Index:
    def __init__(self) -> None:
        self.blocks: dict[bytes, list[Block]] = {}

    def get_one_block(self, key: bytes) -> Block | None:
        blocks = self.blocks.get(key)
        return blocks[0] if blocks else None


class TinyPool:
    """As vLLM's ``BlockPool``: block 0 is the null block; cached blocks wait in the free queue to be evicted."""

    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null, self.null_block.ref_cnt = True, 1
        self.free_block_queue = FreeQueue()
        self.free_block_queue.blocks = self.blocks[1:]
        self.cached_block_hash_to_block = Index()

    @property
    def num_free(self) -> int:
        return len(self.free_block_queue.blocks)

    def take(self, count: int) -> list[Block]:
        """Fresh blocks, with one reference each; what was cached in them is evicted."""
        queue = self.free_block_queue.blocks
        taken, self.free_block_queue.blocks = queue[:count], queue[count:]
        for block in taken:
            self.uncache(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.blocks.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} is freed once too often"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                queue = self.free_block_queue.blocks
                queue.insert(len(queue) if block.block_hash is not None else 0, block)

    def cache(self, block: Block, key: bytes) -> None:
        if block.block_hash is None:
            block.block_hash = key
            self.cached_block_hash_to_block.blocks.setdefault(key, []).append(block)

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        group: Group | None = None,
    ) -> None:
        for i in range(num_cached_blocks, num_full_blocks):
            self.cache(blocks[i], key_of(group or full(), request, i))

    def cache_partial_block(
        self,
        request: Request,
        block: Block,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> bytes:
        """The block's content ends after so many tokens of the request."""
        key = request.block_hashes[num_tokens // request.hash_tokens - 1] + group_suffix(kv_cache_group_id)
        if block.block_hash is not None and (replace_existing_hashes or block.block_hash != key):
            self.uncache(block)
        self.cache(block, key)
        return key

    def move_block_hashes(self, src_block: Block, dst_block: Block) -> None:
        key = src_block.block_hash
        assert key is not None
        self.uncache(src_block)
        self.cache(dst_block, key)

    def evict_blocks(self, block_ids: set[int]) -> None:
        for each in block_ids:
            self.uncache(self.blocks[each])

    def uncache(self, block: Block) -> None:
        if block.block_hash is not None:
            self.cached_block_hash_to_block.blocks[block.block_hash].remove(block)
            block.block_hash = None


@dataclass(eq=False)
class Request:
    request_id: str
    all_token_ids: list[int]
    hash_tokens: int = 4
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    block_hashes: list[bytes] = field(default_factory=list)
    num_prompt_tokens: int = 0
    trace_headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)
        self.block_hashes = chain(self.all_token_ids, self.hash_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    def append(self, tokens: Iterable[int]) -> None:
        self.all_token_ids += tokens
        self.block_hashes = chain(self.all_token_ids, self.hash_tokens)


def key_of(group: Group, request: Request, index: int) -> bytes:
    """The key of a request's block in the GPU's prefix cache."""
    return group.hashes(request.block_hashes, index, index + 1)[0] + group_suffix(group.index)


class Allocated:
    """As vLLM's ``KVCacheBlocks`` of a version that says no more than numbers."""

    def __init__(self, *block_ids: Sequence[int]) -> None:
        self.block_ids = tuple(list(each) for each in block_ids)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.block_ids


class LiveTables:
    """As vLLM's ``KVCacheBlocks``: of the request's tables themselves, which go on changing."""

    def __init__(self, blocks: Sequence[list[Block]]) -> None:
        self.blocks = tuple(blocks)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in table] for table in self.blocks)


@dataclass
class NewRequest:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0


@dataclass
class CachedRequests:
    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)


@dataclass
class Step:
    """As vLLM's ``SchedulerOutput``."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None
    finished_req_ids: set[str] = field(default_factory=set)
    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class TinyDaemon:
    """The client that the scheduler's side asks, and what the daemon behind it has."""

    def __init__(self) -> None:
        self.epoch = EPOCH
        self.breaker_state = BreakerState.CLOSED
        self.blocks: dict[tuple[int, bytes], bytes] = {}
        """Contents, by group and hash."""
        self.leases: dict[int, dict[int, bytes]] = {}
        """By lease and group: the blocks that it keeps."""
        self.kept: set[int] = set()
        """Leases that were renewed: the others are short."""
        self.reason = ""
        """Set: lookups are not answered, for this reason."""
        self.asking = False
        """Whether a slower tier is being asked."""
        self.coming = 0
        """Blocks of group 0 that come from there."""
        self.disk: set[tuple[int, bytes]] = set()
        """What a slower tier has, by group and hash: the caller chooses, and has it with its next question."""
        self.fetched: list[tuple[int, bytes]] = []
        self.fails = False
        """Whether what is fetched fails to come."""
        self.asked: list[Mapping[int, Any]] = []
        self.touched: list[dict[int, bytes]] = []
        self.pauses: list[float | None] = []
        """What was said with each touch."""
        self.gains: list[tuple[int, int]] = []
        """Reports of tokens that prompts needed, and of those that were loaded."""
        self.closed = False
        self.taken = 0

    def put(self, group: int, hashes: Iterable[bytes]) -> None:
        self.blocks.update({(group, each): each for each in hashes})

    def lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes | Sequence[bytes]],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_seconds: float = 0.0,
        fetch_seconds: float = 0.0,
        prefill_rate: float = 0.0,
        wanted: Mapping[int, Sequence[bool]] | None = None,
        fetch_tokens: int = 0,
        lease: int | None = None,
        lease_last: Mapping[int, int] | None = None,
        tails: Mapping[int, int] | None = None,
        timeout: float | None = None,
    ) -> LookupResult:
        if tails:
            return self._lookup_tails(
                namespace,
                groups,
                tails,
                mode=mode,
                lease_seconds=lease_seconds,
                fetch_seconds=fetch_seconds,
                wanted=wanted,
                lease=lease,
                lease_last=lease_last,
                timeout=timeout,
            )
        assert fetch_seconds > 0, "a slower tier may have what is missed"
        assert namespace == NAMESPACE
        assert timeout is not None
        if groups:
            self.asked.append(groups)
        if self.reason:
            return LookupResult(False, {index: GroupHits(0) for index in groups}, reason=self.reason)
        answers = {}
        for index, packed in groups.items():
            assert isinstance(packed, bytes)
            found = tuple((index, packed[i : i + 32]) in self.blocks for i in range(0, len(packed), 32))
            if mode is LookupMode.PREFIX:
                answers[index] = GroupHits((*found, False).index(False))
            else:
                answers[index] = GroupHits(sum(found), found)
        hits = {index: _found(packed, answers[index]) for index, packed in groups.items()} if lease_seconds else {}
        hits = {index: each[-32 * (lease_last or {}).get(index, 0) :] for index, each in hits.items()}
        lease = lease if lease in self.leases else None
        if any(hits.values()):
            if lease is None:
                self.taken += 1
                lease = self.taken
            before = self.leases.get(lease, {})
            self.leases[lease] = {index: before.get(index, b"") + hits.get(index, b"") for index in {*before, *hits}}
        if wanted is not None:
            assert bool(wanted) == (fetch_tokens > 0) or not self.disk
            for index, packed in groups.items():
                assert isinstance(packed, bytes)
                answers[index] = self._choose(index, packed, answers[index], wanted.get(index, ()))
        if self.coming and 0 in answers:
            answers[0] = replace(answers[0], coming=self.coming)
        return LookupResult(True, answers, lease, lease_seconds, asking=self.asking)

    def _lookup_tails(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes | Sequence[bytes]],
        tails: Mapping[int, int],
        *,
        lease: int | None,
        **options: Any,
    ) -> LookupResult:
        whole = {index: each for index, each in groups.items() if index not in tails}
        assert next(iter(groups)) in whole
        first = self.lookup(namespace, whole, lease=lease, **options)
        if first.reason:
            return replace(first, groups={index: GroupHits(0) for index in groups})
        run = min((*each.found, False).index(False) for each in first.groups.values())
        whole_tails = {index for index, tail in tails.items() if len(groups[index]) // 32 <= tail}
        starts = {index: 0 if index in whole_tails else max(0, run - tail) for index, tail in tails.items()}
        ends = {index: None if index in whole_tails else 32 * (run + 1) for index in tails}
        cut = {index: groups[index][32 * start : ends[index]] for index, start in starts.items()}
        last = self.lookup(namespace, cut, lease=first.lease or lease, **options)
        found = {index: replace(each, first=starts[index]) for index, each in last.groups.items()}
        return replace(
            last,
            groups={**first.groups, **found},
            lease=last.lease or first.lease,
            asking=first.asking or last.asking,
        )

    def _choose(self, index: int, packed: bytes, answer: GroupHits, wanted: Sequence[bool]) -> GroupHits:
        """The answer for a group with what is held, and what comes with the next lookup."""
        names = [(index, packed[i : i + 32]) for i in range(0, len(packed), 32)]
        held = tuple(each in self.disk and not flag for each, flag in zip(names, answer.found, strict=True))
        coming = [each for each, flag, want in zip(names, answer.found, wanted, strict=False) if want and not flag]
        if self.fails:
            return replace(answer, held=held)
        assert self.disk.issuperset(coming), "what is not there is asked for"
        self.fetched += coming
        self.blocks.update({each: each[1] for each in coming})
        return replace(answer, held=held, coming=len(coming))

    def begin_lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_seconds: float = 0.0,
        **fetch: Any,
    ) -> TinyQuestion | None:
        if self.reason:
            return None
        answer = self.lookup(namespace, groups, mode=mode, lease_seconds=lease_seconds, timeout=0.0, **fetch)
        return TinyQuestion(self, answer)

    def renew(self, lease: int, lease_seconds: float, *, timeout: float | None) -> float:
        return 0.0

    def renew_nowait(self, lease: int, lease_seconds: float) -> TinyLease:
        kept = lease in self.leases
        if kept and not self.reason:
            self.kept.add(lease)
        return TinyLease(self, lease, None if self.reason else kept)

    def release_nowait(self, lease: int) -> None:
        self.leases.pop(lease, None)

    def touch_nowait(self, namespace: Namespace, groups: Mapping[int, bytes], pause: float | None = None) -> bool:
        self.touched.append(dict(groups))
        self.pauses.append(pause)
        return not self.reason

    def report_prompts_nowait(self, namespace: Namespace, needed_tokens: int, loaded_tokens: int) -> bool:
        self.gains.append((needed_tokens, loaded_tokens))
        return not self.reason

    def expire(self) -> None:
        """Short leases end by time."""
        self.leases = {lease: hits for lease, hits in self.leases.items() if lease in self.kept}

    def close(self, timeout: float | None = None) -> bool:
        self.closed = True
        return True


def _found(packed: bytes | Sequence[bytes], answer: GroupHits) -> bytes:
    """The hashes that were found."""
    assert isinstance(packed, bytes)
    each = [packed[i : i + 32] for i in range(0, len(packed), 32)]
    return b"".join(compress(each, answer.found) if answer.found else each[: answer.hits])


class TinyQuestion:
    """What the daemon answered when it was asked; it may hang by the time that somebody wants to know."""

    def __init__(self, daemon: TinyDaemon, answer: LookupResult) -> None:
        self._daemon, self._answer = daemon, answer

    def wait(self, timeout: float) -> bool:
        return self._daemon.reason != NO_ANSWER

    def result(self, timeout: float) -> LookupResult:
        if not self._daemon.reason:
            return self._answer
        self.cancel()
        return LookupResult(False, {index: GroupHits(0) for index in self._answer.groups}, reason=self._daemon.reason)

    def cancel(self) -> None:
        if self._answer.lease is not None:
            self._daemon.release_nowait(self._answer.lease)


class TinyLease:
    sent = True

    def __init__(self, daemon: TinyDaemon, lease: int, kept: bool | None) -> None:
        self._daemon, self._lease, self.renewed = daemon, lease, kept

    def release(self) -> None:
        self._daemon.release_nowait(self._lease)


class SynchronousSide(SchedulerSide):
    """In an engine that processes the output of each step before it schedules the next one."""

    _before: Any = None

    def build_plan(self, scheduler_output: Any) -> StepPlan:
        self.end_step()
        self._before = scheduler_output
        return super().build_plan(scheduler_output)

    def end_step(self) -> None:
        """The output of the last step is processed."""
        before, self._before = self._before, None
        if before is not None:
            self.begin_output(before, ())
            self.end_output()


AnySide = TypeVar("AnySide", bound=SchedulerSide)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def side(
    groups: Sequence[Group] | None = None,
    pool: TinyPool | None = None,
    *,
    world_size: int = 1,
    daemon: TinyDaemon | None = None,
    clock: Clock | None = None,
    events: Any = None,
    longest_blocks: int = 0,
    waits: bool = True,
    recompute: Recompute | None = None,
    namespace: Namespace = NAMESPACE,
    block_ids: BlockIds = lambda _: (),
    of: type[AnySide] = SynchronousSide,  # type: ignore[assignment]
    **extra: Any,
) -> AnySide:
    """With the given pool bound, not attached yet."""
    extra.setdefault("store_interval", 1e-9)  # in every step
    engine = EngineFacts(
        namespace.hash_bytes,
        tuple(groups or (full(),)),
        world_size,
        16,
        longest_blocks,
        waits,
        recompute,
        None,
        block_ids,
    )
    made = of(
        ConnectorOptions.parse(extra),
        engine,
        daemon or TinyDaemon(),
        clock=clock or Clock(),
        events=events,
    )
    made.take_namespace(namespace)
    if pool is not None:
        made.bind_block_pool(pool)
    return made


ATTACHED = RankReport(attached={0: EPOCH})


def attached(*args: Any, world_size: int = 1, **kwargs: Any) -> SynchronousSide:
    """`side`, all of whose ranks are attached."""
    made = side(*args, world_size=world_size, **kwargs)
    made.take_report(RankReport(attached=dict.fromkeys(range(world_size), EPOCH)))
    return made


def run(made: SynchronousSide, pool: TinyPool, request: Request, tokens: int) -> list[Block]:
    """Schedule a new request's first ``tokens`` tokens, and let the step be over."""
    blocks = pool.take(-(-tokens // 4))
    pool.cache_full_blocks(request, blocks, 0, tokens // 4)
    made.update_state_after_alloc(request, Allocated([each.block_id for each in blocks]), 0)
    made.build_plan(Step({request.request_id: tokens}))
    made.end_step()
    request.num_computed_tokens = tokens
    return blocks


def pooled(blocks: int, **options: Any) -> tuple[SynchronousSide, TinyPool]:
    """`attached`, with a block pool."""
    pool = TinyPool(blocks)
    return attached(pool=pool, **options), pool


def beside(daemon: TinyDaemon | None = None, **options: Any) -> tuple[SynchronousSide, TinyDaemon]:
    """`attached`, and the daemon that it asks."""
    daemon = daemon or TinyDaemon()
    return attached(daemon=daemon, **options), daemon


def computed(
    made: SynchronousSide, pool: TinyPool, tokens: int, name: str = "r", first: int = 0
) -> tuple[Request, list[Block]]:
    """`run` of a request whose tokens are the numbers from ``first`` on."""
    request = Request(name, list(range(first, first + tokens)))
    return request, run(made, pool, request, tokens)


def planned_load(made: SchedulerSide, request: Request, blocks: Allocated | LiveTables, tokens: int) -> LoadJob:
    """The job of the next step for a request that has been given these blocks for a hit."""
    made.update_state_after_alloc(request, blocks, tokens)
    (job,) = made.build_plan(Step()).loads
    return job


def with_stored(tokens: int) -> tuple[SynchronousSide, TinyDaemon, Request]:
    """A scheduler, its daemon, and a request of so many tokens whose blocks that has."""
    daemon, request = TinyDaemon(), Request("r", list(range(tokens)))
    daemon.put(0, request.block_hashes)
    return attached(daemon=daemon), daemon, request


def stored_hashes(jobs: tuple[StoreJob, ...], group_index: int = 0) -> list[bytes]:
    packed = b"".join(each.hashes for job in jobs for each in job.blocks if each.group == group_index)
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Group], dict[int, list[bool]], int, int]:
    """Hits of groups, and what of them can be used."""
    alignment = draw(st.sampled_from([4, 8]))
    groups = []
    for index in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(GroupKind))
        block_tokens = draw(st.sampled_from([each for each in (2, 4, 8) if alignment % each == 0]))
        window = draw(st.integers(1, 20)) if kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL) else 0
        eagle = kind in (GroupKind.FULL, GroupKind.SLIDING_WINDOW) and draw(st.booleans())
        groups.append(group(index, kind, block_tokens, hash_tokens=2, alignment=alignment, window=window, eagle=eagle))
    local = draw(st.integers(0, 3)) * alignment
    num_tokens = local + draw(st.integers(1, 40))
    most = limit(groups, num_tokens, local)
    found = {}
    for each in groups:
        blocks = lookup_range(each, local, most)
        # A block has a hash when all of its tokens are known.
        blocks = range(blocks.start, max(blocks.start, min(blocks.stop, num_tokens // each.block_tokens)))
        found[each.index] = draw(st.lists(st.integers(0, 4).map(bool), min_size=len(blocks), max_size=len(blocks)))
    return groups, found, local, most
