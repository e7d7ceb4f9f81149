"""The blocks that the daemon reports to hold, and the choice of those that this engine announces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Protocol, TypeVar

from kvsidecar.client import Residency, ResidencyChange
from kvsidecar.integrations.hashes import split_hashes
from kvsidecar.integrations.residency.announcements import Announcements
from kvsidecar.integrations.residency.known_blocks import AnnouncedGroup, BlockInfo, KnownBlocks
from kvsidecar.types import OF_TIER

MAX_HELD = 1 << 19
"""Most blocks that are remembered as held by the daemon, 110 bytes each; older ones are not announced later."""
MAX_GONE = 1 << 16
"""Most blocks that are remembered as gone, the latest: reports of stores that a removal overtook arrive within
seconds."""
STEP_BYTES = 32 * 1024
"""Bytes of the daemon's reports that a step reads, and at least one report."""
STEP_BLOCKS = 512
"""Most blocks that one step looks at: a millisecond, if each is announced."""


DISK = 1 << 16
"""Added to a group's index for its blocks on the node's disk: they are reported, announced and retracted separately."""

_OF_DISK = {of_tier: kind for kind, of_tier in OF_TIER.items()}


def group_of(index: int) -> int:
    """The index without `DISK`."""
    return index & (DISK - 1)


_Group = TypeVar("_Group", bound=AnnouncedGroup)


def media(groups: Iterable[_Group]) -> dict[int, _Group]:
    """Groups by their index, in the pool and on the disk."""
    return {group.index | medium: group for medium in (0, DISK) for group in groups}


class ResidencySource(Protocol):
    """The required part of `kvsidecar.client.Client`."""

    @property
    def has_residency(self) -> bool: ...

    def take_residency(self, most_bytes: int) -> list[ResidencyChange]: ...


class Residents:
    """Follows the daemon's reports, a few in every step.

    A block is announced when the daemon holds it, its tokens are known, and its parent is announced, or this engine has
    had the parent and the daemon does not hold it. Routers ignore blocks without tokens, and blocks whose parent they
    do not know.

    Args:
        keys: converts between hashes and the daemon's keys, joined, in both directions.
    """

    def __init__(
        self,
        groups: Iterable[AnnouncedGroup],
        watch: ResidencySource,
        known: KnownBlocks,
        announcements: Announcements,
        keys: Callable[[bytes], bytes],
    ) -> None:
        groups = list(groups)
        self._groups = media(groups)
        self._watch, self._known, self._announcements, self._keys = watch, known, announcements, keys
        self.live = False
        """Whether the daemon reports everything, which it does once a snapshot has begun."""
        self._held: dict[int, dict[bytes, None]] = {index: {} for index in self._groups}
        """The daemon's keys of the blocks that it holds, announced or not, by group."""
        self._most, self._most_gone = max(1, MAX_HELD // len(groups)), max(1, MAX_GONE // len(groups))
        self._orphans: dict[tuple[int, bytes], dict[bytes, None]] = {}
        """Blocks that wait for their parent's announcement, by group and parent."""
        self._num_orphans = 0
        self._released: deque[tuple[int, dict[bytes, None]]] = deque()
        """Blocks whose parent was announced, by group. Clients choose how many share a parent: a step takes some."""
        self._gone: dict[int, dict[bytes, None]] = {index: {} for index in self._groups}
        """Keys of blocks that the daemon has reported and no longer holds, by group, the oldest first."""
        self._changes: deque[ResidencyChange] = deque()
        self._rest: deque[tuple[int, bytes]] = deque()
        """Blocks of the last change that were not looked at yet."""

    @property
    def pending(self) -> bool:
        return bool(self._released or self._rest or self._changes) or self._watch.has_residency

    def is_held(self, index: int, block_hash: bytes) -> bool:
        """Whether the daemon has reported that it holds this block."""
        return self._keys(block_hash) in self._held[index]

    def was_removed(self, index: int, block_hash: bytes) -> bool:
        """Whether the daemon has recently reported that it no longer holds this block, or was lost with it."""
        return self._keys(block_hash) in self._gone[index]

    def forget_gone(self) -> None:
        """Forget the blocks that are gone: another daemon reports the next stores, and may report nothing."""
        self._gone = {index: {} for index in self._groups}

    def reconsider(self) -> None:
        """Look at all blocks of the daemon again: they are no longer announced, or have other names."""
        self._rest.clear()
        self._released.clear()
        self._orphans, self._num_orphans = {}, 0
        for index, held in self._held.items():
            self._rest.extend((index, each) for each in self._split(self._keys(b"".join(held))))

    def step(self) -> None:
        """Handle some of the daemon's reports."""
        left = STEP_BLOCKS
        while left > 0:
            if self._released:
                left -= 1
                self._announce_released()
            elif self._rest:
                left -= 1
                self.announce(*self._rest.popleft())
            elif self._changes:
                left -= self._take(self._changes.popleft())
            elif self._watch.has_residency and left == STEP_BLOCKS:
                self._changes += self._watch.take_residency(STEP_BYTES)
            else:
                return

    def announce(self, index: int, block_hash: bytes) -> None:
        """Announce a block if nothing is missing. The blocks that wait for it follow in the next steps."""
        if not self.is_held(index, block_hash):
            return
        info = None if self._announcements.confirm(index, block_hash) else self._to_announce(index, block_hash)
        if info is not None:
            self._announcements.announce(index, block_hash, info)
        if self._announcements.is_announced(index, block_hash):
            for medium in (index, index ^ DISK):
                if orphans := self._orphans.pop((medium, block_hash), None):
                    self._num_orphans -= len(orphans)
                    self._released.append((medium, orphans))

    def _announce_released(self) -> None:
        """Announce one block whose parent was announced."""
        index, orphans = self._released[0]
        each, _ = orphans.popitem()
        if not orphans:
            self._released.popleft()
        self.announce(index, each)

    def _to_announce(self, index: int, block_hash: bytes) -> BlockInfo | None:
        """The contents of a block's announcement; None: it waits, or was announced."""
        info = self._known.get(group_of(index), block_hash)
        if info is None or self._announcements.is_announced(index, block_hash):
            return None
        if info.parent is None or not self._groups[index].chained:
            return info
        media = (index, index ^ DISK)
        if any(self._announcements.is_announced(each, info.parent) for each in media):
            return info
        # The router knows the parent of an own block from the GPU, or no longer does. If the parent will be announced
        # as well, it must come first.
        comes = any(self.is_held(each, info.parent) for each in media) and self._known.get(group_of(index), info.parent)
        if info.own and not comes:
            return info
        if self._num_orphans >= MAX_HELD:
            self._orphans, self._num_orphans = {}, 0
        orphans = self._orphans.setdefault((index, info.parent), {})
        self._num_orphans += block_hash not in orphans
        orphans[block_hash] = None
        return None

    def wait_no_more(self, index: int, block_hash: bytes, info: BlockInfo) -> None:
        """Stop waiting for the parent of a block that is gone or forgotten."""
        if info.parent is not None and (orphans := self._orphans.get((index, info.parent))) is not None:
            self._num_orphans -= orphans.pop(block_hash, self) is None
            if not orphans:
                del self._orphans[index, info.parent]

    def _stored(self, index: int, hashes: bytes) -> None:
        held, gone = self._held[index], self._gone[index]
        for each in self._split(hashes):
            held[each] = None
            gone.pop(each, None)
        if len(held) > self._most:
            for each in list(held)[: len(held) - self._most + self._most // 64]:
                del held[each]
        self._rest.extend((index, each) for each in self._split(self._keys(hashes)))

    def _take(self, change: ResidencyChange) -> int:
        """Handle one report. Returns how many blocks were looked at."""
        if change.kind.is_change and change.group not in self._groups:
            return 0
        kind, index = change.kind, change.group
        if kind in _OF_DISK:
            kind, index = _OF_DISK[kind], index | DISK
        match kind:
            case Residency.NOTES:
                for each in self._known.take_notes(index, self._keys(change.hashes), change.notes):
                    self._rest.extend(((index, each), (index | DISK, each)))
            case Residency.STORED:
                self._stored(index, change.hashes)
            case Residency.REMOVED:
                keys, hashes = self._split(change.hashes), self._split(self._keys(change.hashes))
                for each in keys:
                    self._held[index].pop(each, None)
                self._remember_gone(index, keys)
                for each in hashes if self._orphans else ():
                    if (info := self._known.get(group_of(index), each)) is not None:
                        self.wait_no_more(index, each, info)
                self._announcements.retract(index, hashes)
            case Residency.CLEARED:
                self._remember_gone(index, self._held[index])
                self._held[index] = {}
                self._orphans = {place: waiting for place, waiting in self._orphans.items() if place[0] != index}
                self._num_orphans = sum(map(len, self._orphans.values()))
                self._announcements.retract_all(index)
            case Residency.RESET:
                self._forget()
                self.live = True
                self._announcements.doubt()
            case Residency.COMPLETE:
                self._announcements.doubt_no_more()
            case Residency.LOST:
                self._forget()
                for index in self._groups:
                    self._announcements.retract_all(index)
        return len(change.hashes) // self._known.hash_bytes

    def _forget(self) -> None:
        self.live = False
        for index, held in self._held.items():
            self._remember_gone(index, held)
        self._held = {index: {} for index in self._groups}
        self._orphans, self._num_orphans = {}, 0
        self._released.clear()
        self._rest.clear()

    def _remember_gone(self, index: int, keys: Collection[bytes]) -> None:
        """Remember the latest of these keys: remembering all of a large pool would take as long as many steps."""
        gone = self._gone[index]
        gone |= dict.fromkeys(islice(keys, max(0, len(keys) - self._most_gone), None))
        if len(gone) > self._most_gone:
            self._gone[index] = dict.fromkeys(list(gone)[-self._most_gone // 2 :])

    def _split(self, hashes: bytes) -> list[bytes]:
        return split_hashes(hashes, len(hashes) // self._known.hash_bytes)
