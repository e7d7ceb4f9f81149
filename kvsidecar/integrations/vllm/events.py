"""vLLM's KV cache events for blocks in the host memory of this node, for routers that subscribe to them.

A block is announced when every rank has stored it. It is retracted when a lookup no longer finds it, because the daemon
does not report evictions, and when all blocks are lost: another daemon run has the socket, or the cache was reset.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvsidecar.integrations.vllm.groups import Group, Kind

_SPEC_KINDS = {
    Kind.FULL: "full_attention",
    Kind.SLIDING_WINDOW: "sliding_window",
    Kind.CHUNKED_LOCAL: "chunked_local_attention",
    Kind.STATE: "mamba",
}
"""Values of vLLM's ``KVCacheSpecKind``."""

MAX_ANNOUNCED = 1 << 19
"""Most announced blocks, at 110 bytes each. Beyond it the oldest are retracted early: a router that does not know a
block sends some requests elsewhere, but one that believes in a lost block sends all of them to a miss."""
RETRACTED_PER_STEP = 1024
"""Most blocks of one group that one step retracts when all are lost."""


@dataclass(frozen=True, slots=True)
class _BlockInfo:
    tokens: list[int]
    parent: bytes | None
    lora_id: int | None
    lora_name: str | None
    extra_keys: Any


_UNKNOWN = _BlockInfo([], None, None, None, None)


class Events:
    """Collects events until vLLM takes them. Imports vLLM."""

    def __init__(self, groups: Iterable[Group]) -> None:
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
        from vllm.v1.core import kv_cache_utils

        self._groups = {group.index: group for group in groups}
        self._medium, self._stored, self._removed = MEDIUM_CPU, BlockStored, BlockRemoved
        self._external = kv_cache_utils.maybe_convert_block_hash
        self._extra_keys = kv_cache_utils.generate_block_hash_extra_keys
        # Since 0.32 vLLM tags the keys that it hashes, and removes the tags for events.
        self._event_keys = getattr(kv_cache_utils, "to_event_extra_keys", list)
        self._infos: dict[tuple[int, bytes], _BlockInfo] = {}
        self._most = max(1, MAX_ANNOUNCED // len(self._groups))
        # By group, in the order of their announcement.
        self._announced: dict[int, dict[bytes, None]] = {index: {} for index in self._groups}
        self._to_retract: dict[int, dict[bytes, None]] = {index: {} for index in self._groups}
        self._events: list[Any] = []

    def note(self, request: Any, group: Group, index: int, block_hash: bytes) -> None:
        """Keep what an event needs to know about a block that is going to be stored.

        Args:
            index: of the block in the request's table.
        """
        lora = request.lora_request
        start, end = index * group.block_tokens, (index + 1) * group.block_tokens
        parent = group.hashes(request.block_hashes, index - 1, index)[0] if index else None
        extra, _ = self._extra_keys(request, start, end, 0)
        self._infos[group.index, block_hash] = _BlockInfo(
            list(request.all_token_ids[start:end]),
            parent,
            lora.adapter_id if lora else None,
            lora.name if lora else None,
            self._event_keys([extra]) if extra else None,
        )

    def stored(self, index: int, hashes: Iterable[bytes]) -> None:
        """Announce blocks of the group with this index."""
        group, announced, lost = self._groups[index], self._announced[index], self._to_retract[index]
        for each in hashes:
            announced[each] = None
            lost.pop(each, None)
            info = self._infos.pop((index, each), _UNKNOWN)
            self._events.append(
                self._stored(
                    block_hashes=[self._external(each)],
                    parent_block_hash=self._external(info.parent) if info.parent else None,
                    token_ids=info.tokens,
                    block_size=group.block_tokens,
                    lora_id=info.lora_id,
                    medium=self._medium,
                    lora_name=info.lora_name,
                    extra_keys=info.extra_keys,
                    group_idx=group.index,
                    kv_cache_spec_kind=_SPEC_KINDS[group.kind],
                    kv_cache_spec_sliding_window=group.window if group.kind is Kind.SLIDING_WINDOW else None,
                    locality="LOCAL",
                )
            )
        if len(announced) > self._most:
            # Many at once: each deletion at the front of a dict makes finding its first entry slower.
            for each in list(islice(announced, len(announced) - self._most + self._most // 64)):
                del announced[each]
                lost[each] = None

    def not_stored(self, index: int, hashes: Iterable[bytes]) -> None:
        for each in hashes:
            self._infos.pop((index, each), None)

    def removed(self, index: int, hashes: Iterable[bytes]) -> None:
        """Retract these, if they were announced."""
        announced = self._announced[index]
        for each in hashes:
            if each in announced:
                del announced[each]
                self._retract(index, [each])

    def all_removed(self) -> None:
        """Retract everything, over the next steps."""
        for index, announced in self._announced.items():
            announced |= self._to_retract[index]
            self._to_retract[index], self._announced[index] = announced, {}

    @property
    def pending(self) -> bool:
        """Whether there is more to retract."""
        return any(self._to_retract.values())

    def take(self) -> list[Any]:
        for index, lost in self._to_retract.items():
            if lost:
                self._retract(index, [lost.popitem()[0] for _ in range(min(len(lost), RETRACTED_PER_STEP))])
        events, self._events = self._events, []
        return events

    def _retract(self, index: int, hashes: Iterable[bytes]) -> None:
        self._events.append(
            self._removed(
                block_hashes=[self._external(each) for each in hashes],
                medium=self._medium,
                group_idx=index,
                locality="LOCAL",
            )
        )
