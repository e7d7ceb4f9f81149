"""Which blocks to store next. Pure.

A block of the GPU is what its entry in the GPU's own prefix cache says: vLLM enters a block there when it is going to
be full of known tokens, never writes to it again from then on, and takes it out before it gives the block to somebody
else. A request's block table only says where to look first: it goes stale with every preemption, sliding window and
copy on write. Entered does not mean written: the step that writes the block may be in flight. Stores are ordered behind
it on the device, or by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvsidecar.client import pack_ids
from kvsidecar.integrations.vllm.groups import Group, Kind
from kvsidecar.integrations.vllm.known import Known, Tags, tags_of
from kvsidecar.integrations.vllm.metadata import GroupBlocks, joined

KeysOf = Callable[[Sequence[Any]], bytes]
"""Gives the pool's own keys of blocks, one after the other."""
GROUP_ID_BYTES = 4
"""vLLM's own key of a block is its hash and the index of its group, big endian."""


class Pool(Protocol):
    """What is used of vLLM's ``BlockPool``; its blocks are ``KVCacheBlock``, with ``block_id``, ``ref_cnt``,
    ``block_hash`` and ``is_null``."""

    num_gpu_blocks: int
    blocks: Sequence[Any]
    cached_block_hash_to_block: Any
    free_block_queue: Any
    null_block: Any

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


@dataclass(slots=True)
class Span:
    """Blocks of one request among those of a step."""

    request: Any
    first: int
    """Index of the first one in the request's table."""
    begin: int
    """Its place among the candidates."""


@dataclass(slots=True)
class Candidates:
    """Blocks of one group that are considered together."""

    hashes: list[bytes] = field(default_factory=list)
    blocks: list[Any] = field(default_factory=list)
    """Where the pool may have each; None if nobody knows."""
    spans: list[Span] = field(default_factory=list)
    """None in lazy mode, which takes blocks whoever they were computed for."""

    def add(self, request: Any, first: int, hashes: Sequence[bytes], table: Sequence[Any]) -> None:
        """Blocks of a request from index ``first`` on.

        Args:
            table: all of its blocks, as vLLM knew them at some time; may be too short or hold anything.
        """
        blocks = table[first : first + len(hashes)]
        self.spans.append(Span(request, first, len(self.hashes)))
        self.hashes += hashes
        self.blocks += blocks
        self.blocks += [None] * (len(hashes) - len(blocks))


@dataclass(frozen=True, slots=True)
class Chosen:
    """Those of the candidates that are to be stored."""

    packed: GroupBlocks
    blocks: list[Any]
    """The pool's blocks of these."""
    tags: Tags
    places: Sequence[int]
    """Among the candidates, ascending."""


def keys_reader(pool: Pool) -> KeysOf:
    """How to read the pool's own keys of blocks. ``block_hash`` is a property, which takes as long as all else that is
    asked of a block; what is behind it is read where it is there.

    The function it returns raises AttributeError or TypeError if one of them is no block, or has no key.
    """
    return _fields if hasattr(pool.null_block, "_block_hash") else _properties


# A comprehension each, not map(attrgetter(name)): the interpreter reads an attribute that it knows in half the time.


def _fields(blocks: Sequence[Any]) -> bytes:
    return b"".join([each._block_hash for each in blocks])


def _properties(blocks: Sequence[Any]) -> bytes:
    return b"".join([each.block_hash for each in blocks])


def choose(pool: Pool, keys_of: KeysOf, known: Known, group: Group, candidates: Candidates) -> Chosen | None:
    """Those that are not known to be stored and that the GPU has, each content once. None if there are none.

    Args:
        keys_of: as `keys_reader` gives it.
    """
    hashes, blocks = candidates.hashes, candidates.blocks
    packed = b"".join(hashes)
    tags = tags_of(group.index, packed, len(hashes))
    places: Sequence[int] = range(len(hashes))
    # Where it is said whose they are. `walk`, which does not say it, has left out what is stored.
    if candidates.spans and np.count_nonzero(stored := known.find(tags)):  # any() takes three times as long
        places = np.flatnonzero(~stored).tolist()
    if len(candidates.spans) > 1:  # two requests may compute the same
        places = sorted({hashes[i]: i for i in reversed(places)}.values())
    if len(places) < len(hashes):
        hashes, blocks = [hashes[i] for i in places], [blocks[i] for i in places]
    suffix = group.index.to_bytes(GROUP_ID_BYTES, "big")
    if hashes and _keys(keys_of, blocks) != suffix.join((*hashes, b"")):
        get = pool.cached_block_hash_to_block.get_one_block
        blocks = [
            block if block is not None and block.block_hash == each + suffix else get(each + suffix)
            for each, block in zip(hashes, blocks, strict=True)
        ]
        kept = [i for i, block in enumerate(blocks) if block is not None]
        hashes, blocks = [hashes[i] for i in kept], [blocks[i] for i in kept]
        places = [places[i] for i in kept]
    if not hashes:
        return None
    if len(hashes) < len(candidates.hashes):
        packed, tags = b"".join(hashes), tags[np.array(places)]
    ids = [each.block_id for each in blocks]
    return Chosen(GroupBlocks(group.index, packed, pack_ids(ids)), blocks, tags, places)


def _keys(keys_of: KeysOf, blocks: Sequence[Any]) -> bytes:
    """The pool's own keys of these blocks, one after the other; nothing if it does not cache one of them."""
    try:
        return keys_of(blocks)
    except (AttributeError, TypeError):  # no block, or one without a key
        return b""


class Selection:
    """What is to be stored."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Chosen]] = {}
        self.count = 0
        self.traceparent: str | None = None
        """Of the first request of these blocks whose trace is sampled."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        """The pool's blocks."""
        return (block for parts in self._parts.values() for part in parts for block in part.blocks)

    def add(self, chosen: Chosen) -> None:
        self._parts.setdefault(chosen.packed.group, []).append(chosen)
        self.count += len(chosen.blocks)

    def in_order_of_eviction(self) -> list[Any]:
        """The pool's blocks: vLLM evicts the end of a prefix before its beginning."""
        found: list[Any] = []
        for parts in self._parts.values():
            for part in reversed(parts):
                found += part.blocks[::-1]
        return found

    def packed(self) -> tuple[GroupBlocks, ...]:
        return tuple(joined([part.packed for part in parts]) for parts in self._parts.values())


def block_range(group: Group, done: int, aligned: int, end: int) -> range:
    """Indices of a request's blocks of this group that are to be considered, of tokens ``done`` to ``aligned``."""
    last = aligned // group.block_tokens
    if group.eagle and aligned + group.block_tokens <= end:
        last += 1  # a hit must be followed by one more block: see `Group.eagle`
    return range(done // group.block_tokens, last)


def walk(pool: Pool, known: Known, groups: Mapping[int, Group], watermark: int) -> list[tuple[int, bytes, Any]]:
    """Lazy mode: those of the ``watermark`` blocks that the GPU evicts next which are not known to be stored.

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
        # A block that is cached under the hash of a part of it is not what others take this hash for.
        tokens = getattr(block, "block_hash_num_tokens", None)
        if group is not None and (tokens is None or tokens % group.block_tokens == 0):
            found[bytes(key)] = block
    stored: set[bytes] = set()
    for index in groups:
        suffix = index.to_bytes(GROUP_ID_BYTES, "big")
        keys = [key for key in found if key.endswith(suffix)]
        flags = known.find(tags_of(index, b"".join([key[:-GROUP_ID_BYTES] for key in keys]), len(keys)))
        stored.update(key for key, flag in zip(keys, flags.tolist(), strict=True) if flag)
    return [
        (int.from_bytes(key[-GROUP_ID_BYTES:], "big"), key[:-GROUP_ID_BYTES], block)
        for key, block in found.items()
        if key not in stored
    ]


def default_watermark(groups: Sequence[Group], step_tokens: int) -> int:
    """Blocks: twice as many as a step of ``step_tokens`` tokens can need. The same rule as vLLM's own lazy mode."""
    blocks = 0
    for group in groups:
        if group.kind is Kind.STATE:
            blocks += 2
        elif group.kind is Kind.SLIDING_WINDOW:
            blocks += -(-group.window // group.block_tokens) + 1
        else:
            blocks += -(-step_tokens // group.block_tokens)
    return 2 * blocks
