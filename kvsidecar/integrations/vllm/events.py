"""vLLM's KV cache events for blocks in the host memory of this node, for routers that subscribe to them.

A block is announced when every rank has stored it, or loaded it without that, and retracted when a lookup no longer
finds it. While the daemon reports what it holds (`residents`), a block is also announced that another engine has
stored, as soon as its tokens are known, and retracted when the daemon has evicted it. Everything is retracted when the
daemon is lost or the cache is reset.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvsidecar.integrations.residency.announcements import Announcements
from kvsidecar.integrations.residency.event_builder import EventBuilder
from kvsidecar.integrations.residency.known_blocks import UNKNOWN, BlockInfo, KnownBlocks
from kvsidecar.integrations.residency.residents import DISK, ResidencySource, Residents, group_of, media
from kvsidecar.integrations.vllm.groups import Group, GroupKind

_SPEC_KINDS = {
    GroupKind.FULL: "full_attention",
    GroupKind.SLIDING_WINDOW: "sliding_window",
    GroupKind.CHUNKED_LOCAL: "chunked_local_attention",
    GroupKind.STATE: "mamba",
}
"""Values of vLLM's ``KVCacheSpecKind``."""

Loaded = dict[bytes, BlockInfo]
"""Contents of the events of blocks that are being loaded, by hash."""


class Events:
    """Collects events until vLLM takes them. Imports vLLM.

    Args:
        watch: returns the daemon's reports; None: it sends none.
        announces: whether blocks are announced; otherwise they are only noted, for `kvsidecar.publisher`.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        hash_bytes: int = 32,
        watch: ResidencySource | None = None,
        *,
        announces: bool = True,
    ) -> None:
        from vllm.distributed import kv_events
        from vllm.v1.core import kv_cache_utils

        groups = list(groups)
        self._groups = media(groups)
        self._events = EventBuilder[Any](kv_events.BlockStored, kv_events.BlockRemoved)
        self._media = {0: kv_events.MEDIUM_CPU, DISK: getattr(kv_events, "MEDIUM_STORAGE", "STORAGE")}
        self._external = kv_cache_utils.maybe_convert_block_hash
        # Not as they are hashed (`adapter_hooks`): routers know an adapter by its name.
        self._extra_keys = inspect.unwrap(kv_cache_utils.generate_block_hash_extra_keys)
        # Since 0.32 vLLM tags the keys that it hashes, and removes the tags for events.
        self._event_keys = getattr(kv_cache_utils, "to_event_extra_keys", list)
        self._known = KnownBlocks(groups, hash_bytes)
        self.keys: Callable[[bytes], bytes] = lambda hashes: hashes
        """Converts between joined hashes and the daemon's keys, in both directions."""
        self._announcements = Announcements(self._groups, self._announce, self._retract)
        self._announces = announces
        self._residents: Residents | None = None
        if watch is not None:
            self._residents = Residents(
                groups, watch, self._known, self._announcements, lambda hashes: self.keys(hashes)
            )

    def note(self, request: Any, group: Group, index: int, block_hash: bytes, *, inside: int = 0) -> None:
        """Keep the contents of an event for a block that is going to be stored.

        Args:
            index: the block's index in the request's table.
            inside: see `Span`: as in vLLM's own events, it is then a block of the tokens of its last hash.
        """
        start, end = index * group.block_tokens, (index + 1) * group.block_tokens
        if inside:
            start, end = inside - group.hash_tokens, inside
        self._known.add(group.index, block_hash, self._describe(request, group, start, end))
        if self._follows is not None:
            for medium in self._media:
                self._follows.announce(group.index | medium, block_hash)

    @property
    def _follows(self) -> Residents | None:
        """The object that decides on announcements, if the daemon reports what it holds."""
        return self._residents if self._residents is not None and self._residents.live else None

    def notes(self, index: int, hashes: Iterable[bytes]) -> bytes:
        """Notes for others on blocks that are going to be stored; empty if the daemon reports to nobody what it
        holds."""
        return b"" if self._residents is None and self._announces else self._known.notes(index, hashes)

    def unannounced(self, request: Any, group: Group, blocks: Mapping[bytes, int]) -> Loaded:
        """The argument of `loaded` for blocks that are going to be loaded: those that were not announced.

        Args:
            blocks: hashes, and the blocks' indices in the request's table.
        """
        return {
            each: self._describe(request, group, at * group.block_tokens, (at + 1) * group.block_tokens)
            for each, at in blocks.items()
            if self._announces and not self._announcements.is_announced(group.index, each)
        }

    def _describe(self, request: Any, group: Group, start: int, end: int) -> BlockInfo:
        """The contents of an event for the block with these tokens of a request."""
        lora = request.lora_request
        parent = request.block_hashes[start // group.hash_tokens - 1] if start else None
        extra, _ = self._extra_keys(request, start, end, 0)
        return BlockInfo(
            array("i", request.all_token_ids[start:end]).tobytes(),
            parent,
            lora.adapter_id if lora else None,
            lora.name if lora else None,
            self._event_keys([extra]) if extra else None,
        )

    def stored(self, index: int, hashes: Iterable[bytes]) -> None:
        """Announce blocks of the group with this index, without waiting until the daemon reports them."""
        if (residents := self._residents) is not None:
            hashes = [each for each in hashes if not residents.was_removed(index, each)]
        taken = self._known.pop if self._residents is None else self._known.get
        for each in hashes:
            info = taken(index, each) or UNKNOWN
            if self._announces:
                self._announcements.announce(index, each, info)

    def loaded(self, index: int, blocks: Loaded) -> None:
        """Announce blocks that were loaded."""
        for each, info in blocks.items():
            if self._residents is not None:
                self._known.add(index, each, info)
            if self._follows is not None:
                self._follows.announce(index, each)
            else:
                self._announcements.announce(index, each, info)

    def not_stored(self, index: int, hashes: Iterable[bytes]) -> None:
        for each in hashes if self._residents is None else ():
            self._known.pop(index, each)

    def removed(self, index: int, hashes: Iterable[bytes]) -> None:
        """Retract announced blocks that a lookup has not found. The lookup may be older than the daemon's reports."""
        follows = self._follows
        for each in hashes:
            if follows is None or not follows.is_held(index, each):
                self._announcements.retract(index, [each])

    def all_removed(self) -> None:
        """Retract everything, over the next steps: the ranks are attached to another daemon run, which may have none of
        the blocks. If the daemon reports what it holds, that is known already."""
        if self._follows is None:
            self.reset()
            if self._residents is not None:
                self._residents.forget_gone()

    def reset(self) -> None:
        """Retract everything, over the next steps: the weights may have changed."""
        self._announcements.retract_everything()

    @property
    def pending(self) -> bool:
        """Whether more events follow."""
        return self._announcements.pending or (self._residents is not None and self._residents.pending)

    def take(self) -> list[Any]:
        if self._residents is not None and self._residents.pending:
            self._residents.step()
        self._announcements.step()
        return self._events.take()

    def _announce(self, index: int, block_hash: bytes, info: BlockInfo) -> None:
        group = self._groups[index]
        self._events.store(
            self._external(block_hash),
            self._external(info.parent) if info.parent else None,
            info.tokens,
            block_size=len(info.tokens) or group.block_tokens,
            lora_id=info.lora_id,
            medium=self._media[index & DISK],
            lora_name=info.lora_name,
            extra_keys=info.extra_keys,
            group_idx=group.index,
            kv_cache_spec_kind=_SPEC_KINDS[group.kind],
            kv_cache_spec_sliding_window=group.window if group.kind is GroupKind.SLIDING_WINDOW else None,
            locality="LOCAL",
        )

    def _retract(self, index: int, hashes: list[bytes]) -> None:
        numbers = [self._external(each) for each in hashes]
        self._events.remove(numbers, medium=self._media[index & DISK], group_idx=group_of(index), locality="LOCAL")
