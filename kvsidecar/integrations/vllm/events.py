"""vLLM's KV cache events, with the medium "host memory of this node", for routers that subscribe to them.

A block is announced when every rank has stored it, and taken back when a lookup no longer finds it, for the daemon does
not tell what it evicts, or when the daemon has lost all: another run has the socket, or the cache was reset.
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
"""As vLLM's ``KVCacheSpecKind`` says."""

MAX_ANNOUNCED = 1 << 19
"""Blocks that can be taken back one day, at 110 bytes each. Those before them are taken back early: a router that does
not know of a block sends some requests elsewhere, one that believes in a lost block sends all of them to a miss."""
RETRACTED_PER_STEP = 1024
"""Blocks of one group that one step takes back when all are lost."""


@dataclass(frozen=True, slots=True)
class _Noted:
    tokens: list[int]
    parent: bytes | None
    lora_id: int | None
    lora_name: str | None
    extra_keys: Any


class Events:
    """Collects events until vLLM takes them. Imports vLLM."""

    def __init__(self, groups: Iterable[Group]) -> None:
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
        from vllm.v1.core import kv_cache_utils

        self._groups = {group.index: group for group in groups}
        self._medium, self._stored, self._removed = MEDIUM_CPU, BlockStored, BlockRemoved
        self._external = kv_cache_utils.maybe_convert_block_hash
        self._extra_keys = kv_cache_utils.generate_block_hash_extra_keys
        # vLLM tags the keys that it hashes, and takes the tags off for events, since 0.32.
        self._event_keys = getattr(kv_cache_utils, "to_event_extra_keys", list)
        self._noted: dict[tuple[int, bytes], _Noted] = {}
        self._most = max(1, MAX_ANNOUNCED // len(self._groups))
        # By group; in the order of their announcement.
        self._announced: dict[int, dict[bytes, None]] = {index: {} for index in self._groups}
        self._lost: dict[int, dict[bytes, None]] = {index: {} for index in self._groups}
        """Announced, and to be taken back."""
        self._events: list[Any] = []

    def note(self, request: Any, group: Group, index: int, block_hash: bytes) -> None:
        """The request's block of this index in its table, with this hash, is going to be stored."""
        lora = request.lora_request
        start, end = index * group.block_tokens, (index + 1) * group.block_tokens
        parent = group.hashes(request.block_hashes, index - 1, index)[0] if index else None
        extra, _ = self._extra_keys(request, start, end, 0)
        self._noted[group.index, block_hash] = _Noted(
            list(request.all_token_ids[start:end]),
            parent,
            lora.adapter_id if lora else None,
            lora.name if lora else None,
            self._event_keys([extra]) if extra else None,
        )

    def stored(self, index: int, hashes: Iterable[bytes]) -> None:
        """Blocks of the group with this index."""
        group, announced, lost = self._groups[index], self._announced[index], self._lost[index]
        for each in hashes:
            announced[each] = None
            lost.pop(each, None)
            noted = self._noted.pop((index, each), None)
            self._events.append(
                self._stored(
                    block_hashes=[self._external(each)],
                    parent_block_hash=self._external(noted.parent) if noted and noted.parent else None,
                    token_ids=noted.tokens if noted else [],
                    block_size=group.block_tokens,
                    lora_id=noted.lora_id if noted else None,
                    medium=self._medium,
                    lora_name=noted.lora_name if noted else None,
                    extra_keys=noted.extra_keys if noted else None,
                    group_idx=group.index,
                    kv_cache_spec_kind=_SPEC_KINDS[group.kind],
                    kv_cache_spec_sliding_window=group.window if group.kind is Kind.SLIDING_WINDOW else None,
                    locality="LOCAL",
                )
            )
        if len(announced) > self._most:
            # Many at once: to find the first place of a dict that is not empty takes longer with each that is.
            for each in list(islice(announced, len(announced) - self._most + self._most // 64)):
                del announced[each]
                lost[each] = None

    def not_stored(self, index: int, hashes: Iterable[bytes]) -> None:
        for each in hashes:
            self._noted.pop((index, each), None)

    def removed(self, index: int, hashes: Iterable[bytes]) -> None:
        """These are not there any more, if they ever were."""
        announced = self._announced[index]
        for each in hashes:
            if each in announced:
                del announced[each]
                self._take_back(index, [each])

    def all_removed(self) -> None:
        """Nothing that was announced is there any more. It is taken back over the next steps."""
        for index, announced in self._announced.items():
            announced |= self._lost[index]
            self._lost[index], self._announced[index] = announced, {}

    @property
    def pending(self) -> bool:
        """Whether more is to be taken back."""
        return any(self._lost.values())

    def take(self) -> list[Any]:
        for index, lost in self._lost.items():
            if lost:
                self._take_back(index, [lost.popitem()[0] for _ in range(min(len(lost), RETRACTED_PER_STEP))])
        events, self._events = self._events, []
        return events

    def _take_back(self, index: int, hashes: Iterable[bytes]) -> None:
        self._events.append(
            self._removed(
                block_hashes=[self._external(each) for each in hashes],
                medium=self._medium,
                group_idx=index,
                locality="LOCAL",
            )
        )
