"""Selects the blocks to store next. Pure.

The GPU's prefix cache defines the content of a GPU block, once the block is written: see `WrittenBlocks`. vLLM enters a
block there when it is about to be full of known tokens, does not write to it again, and removes it before it gives the
block to another request. A request's block table is only a hint: preemptions, sliding windows and copy on write make it
stale.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from kvsidecar.client import pack_ids
from kvsidecar.integrations.stored_filter import StoredFilter, Tags, tags_of
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.metadata import GroupBlocks, joined
from kvsidecar.integrations.vllm.retention import DEFAULT_RETENTION, Retention

_Key = TypeVar("_Key")

GROUP_ID_BYTES = 4
"""vLLM's key of a block is its hash, followed by the index of its group (big endian)."""


class GpuBlockPool(Protocol):
    """The part of vLLM's ``BlockPool`` that is used; its blocks are ``KVCacheBlock``, with ``block_id``, ``ref_cnt``,
    ``block_hash`` and ``is_null``."""

    num_gpu_blocks: int
    blocks: Sequence[Any]
    cached_block_hash_to_block: Any
    free_block_queue: Any
    null_block: Any

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...


@dataclass(slots=True)
class Span:
    """The candidates of one request."""

    request: Any
    first: int
    """Index of the first candidate in the request's block table."""
    begin: int
    """Index of the first candidate among all candidates."""
    inside: int = 0
    """Tokens of the request up to the end of its only candidate's content, if that ends inside the block."""


@dataclass(slots=True)
class RequestProgress:
    """How much of one request was considered for storing."""

    request: Any
    done: int = 0
    """Tokens that were considered; a multiple of the alignment."""
    began: int = 0
    """Tokens that were hit when it last began, on the GPU or in the daemon."""
    declined: bool = False
    """Whether the daemon has declined some of its blocks: later ones are useless without them, and not offered."""
    inside_done: bool = False
    """Whether the blocks inside which the prompt ends were considered."""
    tables: Sequence[Sequence[Any]] = ()
    """The request's blocks by group index, since its last allocation. vLLM's own lists: they grow with the request, and
    are invalid once it has lost its blocks."""

    def table(self, group: int) -> Sequence[Any]:
        return self.tables[group] if group < len(self.tables) else ()


@dataclass(slots=True)
class Candidates:
    """Blocks of one group that may be stored in this step."""

    hashes: list[bytes] = field(default_factory=list)
    blocks: list[Any] = field(default_factory=list)
    """The pool's block that probably holds each hash, or None."""
    spans: list[Span] = field(default_factory=list)
    """Empty in lazy mode, where the requests do not matter."""

    def add(self, request: Any, first: int, hashes: Sequence[bytes], table: Sequence[Any], *, inside: int = 0) -> None:
        """Add a request's blocks, from index ``first`` on.

        Args:
            table: the request's block table; it may be too short or stale.
            inside: see `Span`.
        """
        blocks = table[first : first + len(hashes)]
        self.spans.append(Span(request, first, len(self.hashes), inside))
        self.hashes += hashes
        self.blocks += blocks
        self.blocks += [None] * (len(hashes) - len(blocks))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The candidates to store."""

    packed: GroupBlocks
    blocks: list[Any]
    """The pool's blocks, in the same order."""
    tags: Tags
    places: Sequence[int]
    """Their indices among the candidates, ascending."""

    def only(self, which: Sequence[int]) -> Chosen:
        """The chosen blocks with these indices."""
        hashes, ids, packed = self.packed.split(), self.packed.ids(), self.packed
        part = GroupBlocks(packed.group, b"".join([hashes[i] for i in which]), pack_ids([ids[i] for i in which]))
        return Chosen(
            part, [self.blocks[i] for i in which], self.tags[np.array(which)], [self.places[i] for i in which]
        )


def by_retention(chosen: Chosen, spans: Sequence[Span], retention: Mapping[str, Retention]) -> dict[Retention, Chosen]:
    """The chosen blocks by the retention of their requests, of which ``retention`` contains those that are not the
    default."""
    return _by(chosen, spans, lambda span: retention.get(span.request.request_id, DEFAULT_RETENTION), DEFAULT_RETENTION)


def _by(chosen: Chosen, spans: Sequence[Span], key_of: Callable[[Span], _Key], nobodys: _Key) -> dict[_Key, Chosen]:
    """The chosen blocks by the key of their span; without spans, by ``nobodys``."""
    keys = [key_of(span) for span in spans] or [nobodys]
    if len(set(keys)) == 1:
        return {keys[0]: chosen}
    begins = [span.begin for span in spans]
    found: dict[_Key, list[int]] = {}
    for i, place in enumerate(chosen.places):
        found.setdefault(keys[bisect_right(begins, place) - 1], []).append(i)
    return {key: chosen.only(which) for key, which in found.items()}


def choose(
    pool: GpuBlockPool, stored_filter: StoredFilter, group: Group, candidates: Candidates, unwritten: Collection[int]
) -> Chosen | None:
    """The candidates that are not stored yet, and that the GPU's cache has and holds, each hash once. None if there are
    none. Every store passes through here.

    Four filters remove these, and are skipped where they cannot apply:

    1. Stored blocks, by ``stored_filter``. `walk` has applied it to its own candidates, which have no spans.
    2. Duplicates: two requests may compute the same block. The first is kept.
    3. Blocks that the GPU no longer caches. If a candidate's block does not have the expected key, the pool's index is
       searched for the key. Usually all blocks are right, which one comparison of the joined keys shows.
    4. Blocks that are not known to be written: ``unwritten``, from `WrittenBlocks`.
    """
    hashes, blocks = candidates.hashes, candidates.blocks
    packed = b"".join(hashes)
    tags = tags_of(group.index, packed, len(hashes))
    places: Sequence[int] = range(len(hashes))
    if candidates.spans and np.count_nonzero(stored := stored_filter.find(tags)):  # any() takes three times as long
        places = np.flatnonzero(~stored).tolist()
    if len(candidates.spans) > 1:
        places = sorted({hashes[i]: i for i in reversed(places)}.values())
    if len(places) < len(hashes):
        hashes, blocks = [hashes[i] for i in places], [blocks[i] for i in places]
    suffix = group_suffix(group.index)
    if hashes and _keys(pool, blocks) != suffix.join((*hashes, b"")):
        get = pool.cached_block_hash_to_block.get_one_block
        blocks = [
            block if block is not None and block.block_hash == each + suffix else get(each + suffix)
            for each, block in zip(hashes, blocks, strict=True)
        ]
        kept = [i for i, block in enumerate(blocks) if block is not None]
        hashes, blocks = [hashes[i] for i in kept], [blocks[i] for i in kept]
        places = [places[i] for i in kept]
    ids = [each.block_id for each in blocks]
    if unwritten and any(each in unwritten for each in ids):
        kept = [i for i, each in enumerate(ids) if each not in unwritten]
        hashes, blocks, ids = [hashes[i] for i in kept], [blocks[i] for i in kept], [ids[i] for i in kept]
        places = [places[i] for i in kept]
    if not hashes:
        return None
    if len(hashes) < len(candidates.hashes):
        packed, tags = b"".join(hashes), tags[np.array(places)]
    return Chosen(GroupBlocks(group.index, packed, pack_ids(ids)), blocks, tags, places)


def group_suffix(group: int) -> bytes:
    """The part after the hash in vLLM's key of a block of this group."""
    return group.to_bytes(GROUP_ID_BYTES, "big")


def _keys(pool: GpuBlockPool, blocks: Sequence[Any]) -> bytes:
    """The joined keys of these blocks; empty if one of them is None or not cached."""
    try:
        # Not map(attrgetter(name)): a constant attribute name is read in half the time. And the property takes as long
        # as everything else that is read from a block.
        if hasattr(pool.null_block, "_block_hash"):
            return b"".join([each._block_hash for each in blocks])
        return b"".join([each.block_hash for each in blocks])
    except (AttributeError, TypeError):  # None, or a block without a key
        return b""


class Selection:
    """The blocks of one store, from all groups."""

    def __init__(self, retention: Retention = DEFAULT_RETENTION) -> None:
        self.retention = retention
        self._parts: dict[int, list[tuple[Chosen, Sequence[Span]]]] = {}
        """The chosen blocks by group, with the spans of the candidates from which they were chosen."""
        self.count = 0
        self.traceparent: str | None = None
        """The traceparent of the first request with a sampled trace."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        """The pool's blocks."""
        return (block for parts in self._parts.values() for part, _ in parts for block in part.blocks)

    def add(self, chosen: Chosen, spans: Sequence[Span]) -> None:
        self._parts.setdefault(chosen.packed.group, []).append((chosen, spans))
        self.count += len(chosen.blocks)

    def extend(self, other: Selection) -> None:
        """Add all blocks of another one."""
        self.traceparent = self.traceparent or other.traceparent
        for parts in other._parts.values():
            for part, spans in parts:
                self.add(part, spans)

    def by_request(self) -> dict[str, Selection]:
        """The blocks split by request id; "" for those whose request is unknown."""
        found: dict[str, Selection] = {}
        for parts in self._parts.values():
            for part, spans in parts:
                for request_id, mine in _by(part, spans, lambda span: str(span.request.request_id), "").items():
                    selection = found.setdefault(request_id, Selection(self.retention))
                    selection.traceparent = self.traceparent
                    selection.add(mine, spans)
        return found

    def in_order_of_eviction(self) -> list[Any]:
        """The pool's blocks, the end of each prefix first: vLLM evicts it before the beginning."""
        found: list[Any] = []
        for parts in self._parts.values():
            for part, _ in reversed(parts):
                found += part.blocks[::-1]
        return found

    def packed(self) -> tuple[GroupBlocks, ...]:
        return tuple(joined([part.packed for part, _ in parts]) for parts in self._parts.values())


def block_range(group: Group, done: int, aligned: int, end: int) -> range:
    """Indices of a request's blocks in this group for tokens ``done`` to ``aligned``."""
    last = aligned // group.block_tokens
    if group.eagle and aligned + group.block_tokens <= end:
        last += 1  # a hit must be followed by one more block: see `Group.eagle`
    return range(done // group.block_tokens, last)


def walk(
    pool: GpuBlockPool, stored_filter: StoredFilter, groups: Mapping[int, Group], watermark: int
) -> list[tuple[int, bytes, Any]]:
    """Find, in lazy mode, the blocks that are not stored yet among the ``watermark`` ones that the GPU evicts next.

    Returns:
        The group's index, the hash, and the block.
    """
    found: dict[bytes, Any] = {}
    for walked, block in enumerate(pool.free_block_queue.iter_blocks_after(None)):
        if walked >= watermark:
            break
        key = block.block_hash
        if key is None or block.is_null:
            continue
        group = groups.get(int.from_bytes(key[-GROUP_ID_BYTES:], "big"))
        # vLLM may cache a partial block under the hash of its tokens so far, which no lookup asks for without a grain.
        tokens = getattr(block, "block_hash_num_tokens", None)
        if group is not None and (tokens is None or tokens % (group.grain or group.block_tokens) == 0):
            found[bytes(key)] = block
    stored: set[bytes] = set()
    for index in groups:
        suffix = group_suffix(index)
        keys = [key for key in found if key.endswith(suffix)]
        flags = stored_filter.find(tags_of(index, b"".join([key[:-GROUP_ID_BYTES] for key in keys]), len(keys)))
        stored.update(key for key, flag in zip(keys, flags.tolist(), strict=True) if flag)
    return [
        (int.from_bytes(key[-GROUP_ID_BYTES:], "big"), key[:-GROUP_ID_BYTES], block)
        for key, block in found.items()
        if key not in stored
    ]


def default_watermark(groups: Sequence[Group], step_tokens: int) -> int:
    """Twice the blocks that a step of ``step_tokens`` tokens can need, as in vLLM's own lazy mode."""
    blocks = 0
    for group in groups:
        if group.kind is GroupKind.STATE:
            blocks += 2
        elif group.kind is GroupKind.SLIDING_WINDOW:
            blocks += -(-group.window // group.block_tokens) + 1
        else:
            blocks += -(-step_tokens // group.block_tokens)
    return 2 * blocks
