"""Turns the daemon's reports on one namespace into events of its topic. Decides; sends nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvsidecar.client import Residency, ResidencyChange
from kvsidecar.integrations.hashes import first_bytes
from kvsidecar.integrations.residency.announcements import Announcements
from kvsidecar.integrations.residency.known_blocks import BlockInfo, KnownBlocks
from kvsidecar.integrations.residency.note_format import NoteFormat
from kvsidecar.integrations.residency.residents import DISK, ResidencySource, Residents, media
from kvsidecar.publisher.engine_dialects import dialect_of
from kvsidecar.publisher.events import Topic
from kvsidecar.types import OF_TIER

STEP_BYTES = 256 * 1024
"""About how many bytes of the daemon's reports one step takes."""
MAX_GROUPS = 64
"""Most KV cache groups that are followed in one namespace. Models have far fewer."""
_HELD = (Residency.STORED, Residency.TIER_STORED)
_OF_DISK = tuple(OF_TIER.values())


def keep_below(followers: Sequence[Follower], most_bytes: int) -> None:
    """Make the largest namespace forget its oldest blocks, until all together take at most ``most_bytes``."""
    while (over := sum(each.known_bytes for each in followers) - most_bytes) > 0:
        max(followers, key=lambda each: each.known_bytes).shrink(over + most_bytes // 64)


class Follower:
    """Publishes the blocks of one namespace, in groups whose engines note tokens and whose hits need the whole prefix.

    Args:
        hash_bytes: the size of the namespace's hashes.
    """

    def __init__(self, hash_bytes: int, watch: ResidencySource, topic: Topic) -> None:
        self._hash_bytes, self._watch, self.topic = hash_bytes, watch, topic
        self._parts: dict[int, _Part] = {}
        self._missed: set[int] = set()
        """Groups with stored blocks that were reported before the group was followed."""
        self._live = False
        self.needs_snapshot = False
        """Reports were missed: the publisher has to watch the namespace again, see `watch_again`."""

    @property
    def pending(self) -> bool:
        return self._watch.has_residency or any(part.pending for part in self._parts.values())

    def step(self) -> None:
        """Turn some reports into events of the topic. Takes none from the daemon until the groups have handled all
        earlier ones, so that a backlog makes no step longer."""
        if not any(part.has_residency for part in self._parts.values()):
            for change in self._watch.take_residency(STEP_BYTES):
                self._take(change)
        for part in self._parts.values():
            part.step()

    def watch_again(self, watch: ResidencySource) -> None:
        """Continue with a new watch, whose first reports are a snapshot."""
        self._watch, self.needs_snapshot = watch, False
        self._missed.clear()

    def end(self) -> None:
        """Retract everything, over the next steps."""
        self._take(ResidencyChange(Residency.LOST))

    def release(self) -> None:
        """Let the topic forget this namespace, which has ended and retracted everything."""
        for part in self._parts.values():
            part.release()

    @property
    def known_bytes(self) -> int:
        """Bytes taken by the blocks whose tokens are remembered."""
        return sum(part.known.nbytes for part in self._parts.values())

    def shrink(self, nbytes: int) -> None:
        """Forget the oldest blocks of the largest group, and retract their announcements."""
        if self._parts:
            max(self._parts.values(), key=lambda part: part.known.nbytes).known.shrink(nbytes)

    def _take(self, change: ResidencyChange) -> None:
        if not change.kind.is_change:
            self._live = change.kind is not Residency.LOST and (self._live or change.kind is Residency.RESET)
            if change.kind is Residency.RESET:
                self._missed.clear()
            for each in self._parts.values():
                each.tell(change)
            return
        if change.kind is Residency.NOTES and change.group not in self._parts:
            self._find(change)
        if (part := self._parts.get(change.group)) is not None:
            part.tell(change)
        elif change.kind in _HELD:
            self._missed.add(change.group)

    def _find(self, change: ResidencyChange) -> None:
        """Follow a group from its first notes on."""
        count = len(change.hashes) // self._hash_bytes
        form = NoteFormat.of(change.notes, count, self._hash_bytes)
        if form is None or not form.chained or change.group >= DISK or len(self._parts) >= MAX_GROUPS:
            return
        self._parts[change.group] = part = _Part(change.group, form, self._hash_bytes, self.topic)
        if self._live:
            part.tell(ResidencyChange(Residency.RESET))
        self.needs_snapshot |= change.group in self._missed


@dataclass(frozen=True, slots=True)
class _Group:
    index: int
    block_tokens: int
    chained: bool = True


class _Part(ResidencySource):
    """One KV cache group."""

    def __init__(self, index: int, form: NoteFormat, hash_bytes: int, topic: Topic) -> None:
        self._form, self._hash_bytes, self._topic = form, hash_bytes, topic
        self._dialect = dialect_of(form.hash_bytes)
        self._holder = topic.hold(self._dialect, index)
        groups = [_Group(index, form.block_tokens)]
        self._unread: deque[ResidencyChange] = deque()
        self._announcements = Announcements(media(groups), self._stored, self._removed)
        self.known = KnownBlocks(groups, form.hash_bytes, self._forgotten)
        self._residents = Residents(groups, self, self.known, self._announcements, lambda hashes: hashes)

    # -- reports of the daemon

    def tell(self, change: ResidencyChange) -> None:
        if change.kind in _OF_DISK and self._dialect.disk is None:
            return
        if self._form.hash_bytes != self._hash_bytes:
            change = replace(change, hashes=first_bytes(change.hashes, self._hash_bytes, self._form.hash_bytes))
        self._unread.append(change)

    @property
    def has_residency(self) -> bool:
        return bool(self._unread)

    def take_residency(self, most_bytes: int) -> list[ResidencyChange]:
        taken = []
        while self._unread and most_bytes > 0:
            taken.append(self._unread.popleft())
            most_bytes -= len(taken[-1].hashes) + len(taken[-1].notes)
        return taken

    # -- announcements

    def release(self) -> None:
        self._topic.release(self._holder)
        self.known.clear()  # at once: it is part of a circle of references, which the collector finds much later

    @property
    def pending(self) -> bool:
        return self._residents.pending or self._announcements.pending

    def step(self) -> None:
        if self._residents.pending:
            self._residents.step()
        self._announcements.step()

    def _stored(self, index: int, block_hash: bytes, info: BlockInfo) -> None:
        self._topic.stored(self._holder, self._medium(index), block_hash, info)

    def _removed(self, index: int, hashes: Iterable[bytes]) -> None:
        self._topic.removed(self._holder, self._medium(index), hashes)

    def _forgotten(self, index: int, block_hash: bytes, info: BlockInfo) -> None:
        """Retract a forgotten block: only remembered ones stay announced, so that one limit bounds both."""
        for each in (index, index | DISK):
            self._announcements.retract_early(each, block_hash)
            self._residents.wait_no_more(each, block_hash, info)

    def _medium(self, index: int) -> str:
        return (self._dialect.disk or "") if index & DISK else self._dialect.pool
