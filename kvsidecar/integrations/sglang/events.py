"""SGLang's KV cache events for pages in the host memory of this node, for routers that subscribe to them.

SGLang publishes the events of its prefix tree, and asks no linker for any. So we wrap `take_events` of its tree, and
add the daemon's reports to SGLang's own events, as blocks in the medium of its own host cache. The tokens and parents
of pages come from SGLang's events of the GPU; engines exchange them in notes on the pages that they store.

A page is named by the first 8 bytes of its hash, as in SGLang's events. Those of requests with a salt, an adapter or a
drafting model are not announced: their events name other hashes, or tokens that are pairs.
"""

from __future__ import annotations

import logging
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from kvsidecar.client import Residency, ResidencyChange
from kvsidecar.integrations.hashes import first_bytes, split_hashes
from kvsidecar.integrations.residency.announcements import Announcements
from kvsidecar.integrations.residency.event_builder import EventBuilder
from kvsidecar.integrations.residency.known_blocks import BlockInfo, KnownBlocks
from kvsidecar.integrations.residency.note_format import NAME_BYTES, TOKEN_BYTES
from kvsidecar.integrations.residency.residents import ResidencySource, Residents, media
from kvsidecar.integrations.sglang.transfers import HASH_BYTES
from kvsidecar.integrations.wrapping import End, wrap

_log = logging.getLogger("kvsidecar.sglang")

MIN_PAGE_TOKENS = 8
"""Tokens of the smallest announced page: each page takes 5 to 10 us of the scheduler's thread, whatever its size
(`benchmarks.sglang.call_cost`), and a prompt has thousands of pages of one token."""

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class PageGroup:
    """The pages of full attention."""

    index: int
    block_tokens: int
    chained: bool = True


class PageEvents:
    """The events of one engine's tree, with those of the daemon's pages.

    Args:
        wire: SGLang's module with the classes of events.
        group: daemon's index of the group of full attention.
        watch: returns the daemon's reports.
        keys: the daemon's keys of joined page hashes, for the weights of now. They differ from the hashes by the same
            bits everywhere.
    """

    def __init__(
        self, wire: Any, group: int, page_size: int, watch: ResidencySource, keys: Callable[[bytes], bytes]
    ) -> None:
        self._wire, self._group, self._page_size, self._keys = wire, group, page_size, keys
        self._mask = self._mask_now()
        groups = [PageGroup(group, page_size)]
        self._known = KnownBlocks(groups, NAME_BYTES)
        self._announcements = Announcements(media(groups), self._stored, self._removed)
        self._residents = Residents(groups, _OfNames(watch), self._known, self._announcements, self._masked)
        self._early: list[Any] = []
        """SGLang's own events that it has not received yet: some are taken before it asks for them."""
        # One event for a chain, as SGLang does.
        self._made = EventBuilder[Any](wire.BlockStored, wire.BlockRemoved, most_blocks=1 << 30)
        self._failed = False
        self._tree: Callable[[], Any] = lambda: None
        self._take: Callable[[Any], list[Any]] = lambda _: []

    # -- of SGLang ------------------------------------------------------------------------------------------------

    def wrap(self, tree_class: type[Any], is_mine: Callable[[Any], bool]) -> End:
        """Add these events to the result of ``take_events`` of this engine's tree."""

        def take_events(original: Callable[[Any], list[Any]], tree: Any) -> list[Any]:
            if not is_mine(tree):
                return list(original(tree))
            self._tree, self._take = weakref.ref(tree), original
            return self.take(list(original(tree)))

        return wrap(tree_class, "take_events", take_events)

    def take(self, own: Sequence[Any]) -> list[Any]:
        """SGLang's own events and those of the daemon's pages, of which each call makes some. Never raises: an error
        would end SGLang's scheduler."""
        self._early += own
        self._try(self._step, own)
        events, self._early = [*self._early, *self._made.take()], []
        return events

    def notes(self, group: int, keys: bytes) -> bytes:
        """What other engines need to know about pages that are going to be stored. Never raises.

        Args:
            keys: the daemon's keys of the pages, joined.
        """
        return self._try(self._noted, keys) or b"" if group == self._group else b""

    def _try(self, call: Callable[[_Argument], _Result], argument: _Argument) -> _Result | None:
        if self._failed:
            return None
        try:
            return call(argument)
        except Exception as error:  # noqa: BLE001 - see `take`; it is logged
            self._failed = True
            self._made.restart()
            _log.exception("kvsidecar: the daemon's pages are no longer announced to routers: %s", error)
            return None

    def _step(self, own: Sequence[Any]) -> None:
        self._learn(own)
        if (mask := self._mask_now()) != self._mask:
            # The weights have changed. What the daemon has of the new ones is announced again.
            self._mask = mask
            self._announcements.retract_everything()
            self._residents.reconsider()
        if self._residents.pending:
            self._residents.step()
        self._announcements.step()

    def _noted(self, keys: bytes) -> bytes:
        if (tree := self._tree()) is not None:
            # SGLang stores a page right after it has made the event with its tokens.
            own = list(self._take(tree))
            self._early += own
            self._learn(own)
        count = len(keys) // HASH_BYTES
        return self._known.notes(self._group, split_hashes(self._masked(names_of(keys)), count))

    # -- what is known --------------------------------------------------------------------------------------------

    def _learn(self, own: Iterable[Any]) -> None:
        wire = self._wire
        for event in own:
            if isinstance(event, wire.AllBlocksCleared):
                # Routers forget this engine's pages in every medium: those of the daemon are there all the same.
                self._announcements.forget()
                self._residents.reconsider()
                self._made.restart()
            elif isinstance(event, wire.BlockStored) and event.medium == wire.StorageMedium.GPU:
                self._learn_tokens(event)

    def _learn_tokens(self, event: Any) -> None:
        size, tokens = self._page_size, event.token_ids
        is_plain = event.cache_salt is None and event.lora_name is None and event.block_size == size
        if not is_plain or len(tokens) != size * len(event.block_hashes) or not isinstance(tokens[0], int):
            return
        packed, width = array("i", tokens).tobytes(), TOKEN_BYTES * size
        parent = None if event.parent_block_hash is None else _name(event.parent_block_hash)
        for i, each in enumerate(event.block_hashes):
            name = _name(each)
            self._known.add(self._group, name, BlockInfo(packed[i * width : (i + 1) * width], parent))
            self._residents.announce(self._group, name)
            parent = name

    # -- what is announced ----------------------------------------------------------------------------------------

    def _stored(self, _index: int, name: bytes, info: BlockInfo) -> None:
        parent = None if info.parent is None else _number(info.parent)
        size, medium = self._page_size, self._wire.StorageMedium.CPU
        self._made.store(_number(name), parent, info.tokens, block_size=size, lora_id=None, medium=medium)

    def _removed(self, _index: int, names: list[bytes]) -> None:
        self._made.remove([_number(each) for each in names], medium=self._wire.StorageMedium.CPU)

    # -- names ----------------------------------------------------------------------------------------------------

    def _mask_now(self) -> bytes:
        return self._keys(bytes(HASH_BYTES))[:NAME_BYTES]

    def _masked(self, names: bytes) -> bytes:
        """Convert between names of hashes and names of keys, in both directions."""
        if not any(self._mask):
            return names
        rows = np.frombuffer(names, np.uint8).reshape(-1, NAME_BYTES)
        return (rows ^ np.frombuffer(self._mask, np.uint8)).tobytes()


class _OfNames(ResidencySource):
    """The daemon's reports on pages in the pool, by their names. SGLang's lookups do not fetch from slower tiers."""

    def __init__(self, watch: ResidencySource) -> None:
        self._watch = watch

    @property
    def has_residency(self) -> bool:
        return self._watch.has_residency

    def take_residency(self, most_bytes: int) -> list[ResidencyChange]:
        return [
            replace(change, hashes=names_of(change.hashes))
            for change in self._watch.take_residency(most_bytes * HASH_BYTES // NAME_BYTES)
            if not change.kind.is_change or change.kind in _IN_POOL
        ]


_IN_POOL = (Residency.NOTES, Residency.STORED, Residency.REMOVED, Residency.CLEARED)


def names_of(hashes: bytes) -> bytes:
    """The first bytes of joined hashes, joined."""
    return first_bytes(hashes, HASH_BYTES, NAME_BYTES)


def _name(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "big", signed=True)


def _number(name: bytes) -> int:
    return int.from_bytes(name, "big", signed=True)
