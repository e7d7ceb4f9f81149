"""Informs watchers which blocks of their namespace can be looked up, and what changes. Decides; sends nothing by
itself.

The cache reports to a `_Feed` per watched namespace, whose `ChangeLog` is sent from time to time, the same to all
watchers of the namespace. A watcher that has no room for it is left out and gets a snapshot when it has; all do when
the log was given up. Snapshots are read from the cache piece by piece, between the changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Final, Protocol

import numpy as np

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.change_log import MAX_LOG_BYTES, ChangeLog
from kvsidecar.cache.space_blocks import Space
from kvsidecar.core.block_notes import STEP_NOTES, Notes, without_blocks
from kvsidecar.core.changes import Change, Update
from kvsidecar.core.metrics import Metrics, ResetReason
from kvsidecar.errors import InvalidRequest
from kvsidecar.support.tasks import heard
from kvsidecar.tiers.backend import ShardSpace
from kvsidecar.types import OF_TIER, Namespace, Residency

INTERVAL = 0.05
"""Seconds for which changes are collected: as many small stores become one message."""
MAX_UPDATE_BYTES = 64 * 1024
"""Hashes and notes in one update, about."""
TAKEN_BYTES = 4 * MAX_UPDATE_BYTES
"""Changes that are joined at a time: joining all that may wait would take milliseconds."""
SNAPSHOT_ROWS = 1024
"""Rows of a table that one piece of a snapshot covers."""
MAX_LOGS_BYTES = 32 * 1024 * 1024
"""Changes of all namespaces that wait to be sent."""
PIECES = 4
"""Updates of a snapshot per `INTERVAL` and watcher: 160,000 blocks a second, or notes on 40,000."""
LISTING_TURNS = int(30 / INTERVAL) * PIECES * 32
"""A snapshot waits for a tier for half a minute at most: each run of `flush` asks this often at most."""
MAX_COMPARED = 8192
"""Blocks that are looked at to join changes, per `INTERVAL` and namespace: it takes about a millisecond."""
MAX_NOTE_BYTES = 16 * 1024
"""Longest note on one block."""


class UpdateReceiver(Protocol):
    """The way to one watcher."""

    def has_room(self) -> bool:
        """False while it does not read what it is sent."""

    def send(self, update: Update) -> None:
        """Never waits, never raises."""


class _Feed:
    """What has changed in one namespace since the last `take`."""

    def __init__(self, on_change: Callable[[], object], count: Callable[[int], object]) -> None:
        self.watches: list[Watch] = []
        self.on_disk: dict[int, _OnDisk] = {}
        """What the node's own tier has, by group."""
        self._on_change, self._count = on_change, count
        self.log = ChangeLog[Change]()

    def add(self, kind: Residency, group: int, hashes: bytes, notes: bytes = b"") -> None:
        """An `Outlet` of the cache."""
        self._on_change()
        change, before = Change(kind, group, hashes, notes), self.log.nbytes
        self.log.add(change, change.nbytes)
        self._count(self.log.nbytes - before)

    def give_up(self) -> None:
        """All watchers get a snapshot."""
        self._count(-self.log.nbytes)
        self.log.give_up()

    def take(self, width: int) -> list[tuple[Change, ...]]:
        """The first changes so far, of about `TAKEN_BYTES`, in pieces for one update each.

        Args:
            width: of a hash.
        """
        pieces: list[list[Change]] = []
        room, before = 0, self.log.nbytes
        taken = self.log.take(TAKEN_BYTES)
        self._count(self.log.nbytes - before)
        for whole in joined(taken, width):
            for change in split(whole, width):
                if room < change.nbytes or not pieces:
                    pieces.append([])
                    room = MAX_UPDATE_BYTES
                pieces[-1].append(change)
                room -= change.nbytes
        return [tuple(piece) for piece in pieces]


class Slower(Protocol):
    """The part of `kvsidecar.core.tiering.Tiering` that is needed."""

    def watch(self, space: Space, tell: Callable[[Residency, bytes], object]) -> ShardSpace | None: ...

    def unwatch(self, watched: ShardSpace) -> None: ...


class _OnDisk:
    """What the node's own tier has of one group, reported to the namespace's feed."""

    def __init__(self, feed: _Feed, group: int) -> None:
        self._feed, self._group = feed, group
        self.watched: ShardSpace | None = None
        self.listed = False
        """All that was there has been reported since the last watcher began."""

    def tell(self, kind: Residency, hashes: bytes) -> None:
        self.listed |= kind in (Residency.COMPLETE, Residency.CLEARED)
        if kind is not Residency.COMPLETE:
            self._feed.add(OF_TIER[kind], self._group, hashes)


class Watch:
    """One watcher. `Watches.end` ends it."""

    def __init__(self, namespace: Namespace, receiver: UpdateReceiver) -> None:
        self.namespace = namespace
        self.receiver = receiver
        self.reset: ResetReason | None = ResetReason.NEW
        """Why it waits for a snapshot to begin; None if it does not."""
        self.snapshot: Iterator[Change | None] | None = None
        """The rest of the snapshot."""
        self.ended = False
        self.sequence = 0
        """Number of the last update."""

    def lose(self, reason: ResetReason) -> None:
        """It has missed something: it needs a new snapshot."""
        self.reset, self.snapshot = self.reset or reason, None


class Watches:
    """All watchers of the daemon.

    Args:
        later: calls a function after this many seconds; with 0, in one of the loop's next iterations that has time.
        is_ready: whether all that the cache has can be looked up; until then no snapshot begins.
        slower: reports what the node's own tier has; None: there is none.
    """

    def __init__(
        self,
        cache: BlockCache,
        metrics: Metrics,
        later: Callable[[float, Callable[[], None]], object],
        is_ready: Callable[[], bool],
        slower: Slower | None = None,
    ) -> None:
        self._cache, self._metrics, self._later, self._is_ready = cache, metrics, later, is_ready
        self._slower = slower
        self._feeds: dict[Namespace, _Feed] = {}
        self.notes = Notes()
        self._log_bytes = 0
        """Bytes of the logs of all feeds."""
        self._armed = False
        self._sending: Iterator[None] | None = None
        """The rest of what `flush` has begun to send."""
        self._counts = {kind: metrics.residency_blocks.labels(kind.value) for kind in Residency if kind.is_change}

    def __len__(self) -> int:
        return sum(len(feed.watches) for feed in self._feeds.values())

    def begin(self, namespace: Namespace, receiver: UpdateReceiver) -> Watch:
        watch = Watch(namespace, receiver)
        feed = self._feeds.get(namespace)
        if feed is None:
            feed = self._feeds[namespace] = _Feed(self._arm, self._count)
            self._cache.watch(namespace, feed.add)
        feed.watches.append(watch)
        self._arm()
        return watch

    def end(self, watch: Watch) -> None:
        """May be called more than once."""
        watch.ended = True
        feed = self._feeds.get(watch.namespace)
        if feed is not None and watch in feed.watches:
            feed.watches.remove(watch)
            if not feed.watches:
                del self._feeds[watch.namespace]
                feed.give_up()
                self._cache.watch(watch.namespace, None)
                for each in feed.on_disk.values():
                    if each.watched is not None and self._slower is not None:
                        self._slower.unwatch(each.watched)

    def _count(self, nbytes: int) -> None:
        """The feeds have grown by this many bytes: if they are too many, the largest feed begins anew."""
        self._log_bytes += nbytes
        while self._log_bytes > MAX_LOGS_BYTES:
            max(self._feeds.values(), key=lambda feed: feed.log.nbytes).give_up()

    def note(self, namespace: Namespace, group: int, hashes: bytes, notes: bytes, *, user: int) -> None:
        """Keep what a client notes about blocks that it stores, for the watchers.

        Args:
            user: uid of the client.

        Raises:
            InvalidRequest: there are not as many bytes for each hash, or too many.
        """
        count = len(hashes) // namespace.hash_bytes
        if not count or len(notes) % count or len(notes) // count > MAX_NOTE_BYTES:
            raise InvalidRequest(
                f"{len(notes)} bytes of notes on {count} blocks: send equally many for each, at most {MAX_NOTE_BYTES}"
            )
        feed, left = self._feeds.get(namespace), STEP_NOTES
        for change in split(Change(Residency.NOTES, group, hashes, notes), namespace.hash_bytes):
            given_up = self.notes.add(namespace, user, change, left)
            left = max(0, left - len(given_up))
            for other, lost in given_up:
                self._metrics.residency_dropped_notes.inc(len(lost.hashes) // other.hash_bytes)
            if feed is not None:
                feed.add(change.kind, group, change.hashes, change.notes)

    def flush(self) -> None:
        """Send what has changed, and the next pieces of snapshots: one message in each iteration of the loop, because
        making one takes a few tenths of a millisecond."""
        self._armed = False
        self._sending = self._send_all()
        self._later(0, self._send_next)

    def _send_next(self) -> None:
        sending, over = self._sending, True
        assert sending is not None
        try:
            over = next(sending, True) is not None
        finally:
            if over:
                self._sending = None
        if not over:
            self._later(0, self._send_next)
        elif self._armed:
            self._later(INTERVAL, self.flush)

    def _send_all(self) -> Iterator[None]:
        for namespace, feed in tuple(self._feeds.items()):
            try:
                yield from self._send_feed(namespace, feed)
            except Exception as error:  # noqa: BLE001 - reported; the others are sent theirs, and these begin anew
                heard(f"the watchers of {namespace.model} were not told what has changed", error)
                for watch in feed.watches:
                    watch.lose(ResetReason.FAILED)
                self._arm()

    def _send_feed(self, namespace: Namespace, feed: _Feed) -> Iterator[None]:
        if feed.log.flooded:
            for watch in feed.watches:
                watch.lose(ResetReason.FLOOD)
        for _ in range(MAX_LOG_BYTES // TAKEN_BYTES + 1):
            if pieces := feed.take(namespace.hash_bytes):
                yield  # to join them takes as long as to send one
            for piece in pieces:
                for watch in tuple(feed.watches):
                    if self._tell(watch, piece):
                        yield
            if not feed.log:
                break
        for watch in tuple(feed.watches):
            yield from self._go_on(feed, watch)
            if watch.reset or watch.snapshot is not None or feed.log:
                self._arm()

    def look(self) -> None:
        """Called again and again: watch what the node's own tier has of groups that are new, and forget the notes of
        namespaces that are gone."""
        # What a slower tier has is not asked for note by note: with one, they are kept until their namespace is gone.
        are_gone = None if self._slower is not None else partial(without_blocks, self._cache)
        self.notes.look(self._cache.namespaces, are_gone)
        if self._slower is not None:
            for namespace, feed in self._feeds.items():
                for space in self._cache.spaces_of(namespace):
                    self._look_at(feed, space)

    def _look_at(self, feed: _Feed, space: Space, *, again: bool = False) -> None:
        assert self._slower is not None
        on_disk = feed.on_disk.setdefault(space.group, _OnDisk(feed, space.group))
        if on_disk.watched is None or again:
            on_disk.listed = False
            on_disk.watched = self._slower.watch(space, on_disk.tell)

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            if self._sending is None:
                self._later(INTERVAL, self.flush)

    def _tell(self, watch: Watch, changes: tuple[Change, ...]) -> bool:
        """Returns whether it was sent."""
        if watch.ended:
            return False
        if watch.reset is None and not watch.receiver.has_room():
            watch.lose(ResetReason.UNREAD)
        if watch.reset is None:
            self._send(watch, changes)
        return watch.reset is None

    def _go_on(self, feed: _Feed, watch: Watch) -> Iterator[None]:
        """Begin or continue its snapshot, a message at a time."""
        if watch.ended:
            return
        if watch.reset is not None and self._is_ready() and watch.receiver.has_room():
            self._metrics.residency_resets.labels(watch.reset.value).inc()
            watch.reset, watch.snapshot = None, self._snapshot(watch.namespace)
            self._send(watch, (), reset=True)
        left = PIECES * MAX_UPDATE_BYTES
        while not watch.ended and watch.snapshot is not None and left > 0 and watch.receiver.has_room():
            changes: list[Change] = []
            room, wait = MAX_UPDATE_BYTES, False
            while watch.snapshot is not None and room > 0:
                try:
                    change = next(watch.snapshot)
                except StopIteration:
                    # What has come since the last message may be what the snapshot waited for: it goes first.
                    wait = bool(feed.log)
                    if not wait:
                        watch.snapshot = None
                    break
                if change is None:
                    room -= MAX_UPDATE_BYTES // 32  # to find nothing takes its time as well
                else:
                    room -= change.nbytes
                    changes.append(change)
            left -= MAX_UPDATE_BYTES - room
            if changes or watch.snapshot is None:
                self._send(watch, tuple(changes), complete=watch.snapshot is None)
            if wait:
                return
            yield

    def _send(self, watch: Watch, changes: tuple[Change, ...], *, reset: bool = False, complete: bool = False) -> None:
        watch.sequence += 1
        watch.receiver.send(Update(watch.sequence, changes, reset, complete))
        self._metrics.residency_messages.inc()
        for kind in {each.kind for each in changes}:  # not for each change: a snapshot's message has hundreds of notes
            nbytes = sum([len(each.hashes) for each in changes if each.kind is kind])
            self._counts[kind].inc(nbytes // watch.namespace.hash_bytes)

    def _snapshot(self, namespace: Namespace) -> Iterator[Change | None]:
        """All notes, then all readable blocks, piece by piece as the cache has them then; None for a piece without any.
        What becomes readable meanwhile is reported as a change."""
        yield from self.notes.of(namespace)
        for group in [space.group for space in self._cache.spaces_of(namespace)]:
            for hashes in self._cache.readable_hashes(namespace, group, SNAPSHOT_ROWS):
                yield Change(Residency.STORED, group, hashes) if hashes else None
        yield from self._snapshot_behind(namespace)

    def _snapshot_behind(self, namespace: Namespace) -> Iterator[None]:
        """The node's own tier reports its blocks as changes: this is over when all of them have been reported."""
        feed = self._feeds.get(namespace)
        if self._slower is None or feed is None:
            return
        for space in self._cache.spaces_of(namespace):
            self._look_at(feed, space, again=True)
        waits = LISTING_TURNS
        while waits > 0 and any(each.watched is not None and not each.listed for each in feed.on_disk.values()):
            waits -= 1
            yield None


_JOINED: Final = (Residency.NOTES, Residency.REMOVED, Residency.STORED)
"""Kinds of which `joined` makes one change for each group, in this order."""


def joined(log: Sequence[Change], width: int) -> list[Change]:
    """The log in as few changes as possible: each costs a watcher more than the hashes in it.

    Notes go first: a watcher that announces a block needs them. The order of stored and removed matters only for a
    block that is both: then it is kept, and likewise around all other kinds.

    Args:
        width: bytes of a hash.
    """
    result: list[Change] = []
    for apart, run in groupby(log, lambda change: change.kind not in _JOINED and (change.kind, change.group)):
        same = list(run)
        result += [_one(same)] if apart else _joined_run(same, width)
    return result


def _joined_run(run: Sequence[Change], width: int) -> list[Change]:
    alike: dict[tuple[int, int, int], list[Change]] = {}
    for change in run:
        note_bytes = len(change.notes) * width // len(change.hashes)
        alike.setdefault((_JOINED.index(change.kind), change.group, note_bytes), []).append(change)
    in_order = [alike[key] for key in sorted(alike)]
    changed = [same for same in in_order if same[0].kind is not Residency.NOTES]
    if _may_be_both(changed, width):
        ordered = [change for change in run if change.kind is not Residency.NOTES]
        changed = [list(same) for _, same in groupby(ordered, lambda change: (change.kind, change.group))]
    return [_one(same) for same in [*(same for same in in_order if same[0].kind is Residency.NOTES), *changed]]


def _one(same: Sequence[Change]) -> Change:
    """Changes of one kind and group as one."""
    kind, group = same[0].kind, same[0].group
    return Change(kind, group, b"".join([each.hashes for each in same]), b"".join([each.notes for each in same]))


def _may_be_both(changed: Sequence[Sequence[Change]], width: int) -> bool:
    """False if nothing is both removed and stored. Looks at 8 bytes of each hash, and at `MAX_COMPARED` at most."""
    removed = b"".join([each.hashes for same in changed for each in same if each.kind is Residency.REMOVED])
    stored = b"".join([each.hashes for same in changed for each in same if each.kind is Residency.STORED])
    if not removed or not stored:
        return False
    if width < 8 or len(removed) + len(stored) > MAX_COMPARED * width:
        return True
    gone, come = (
        np.frombuffer(hashes, np.uint8).reshape(-1, width)[:, :8].copy().view(np.uint64).ravel()
        for hashes in (removed, stored)
    )
    return not set(gone.tolist()).isdisjoint(come.tolist())


def split(change: Change, width: int) -> list[Change]:
    """Cut into pieces that fit one update, as far as single hashes do.

    Args:
        width: of a hash.
    """
    if len(change.hashes) + len(change.notes) <= MAX_UPDATE_BYTES:
        return [change]
    count = len(change.hashes) // width
    each = width + (len(change.notes) // count if count else 0)
    most = max(1, MAX_UPDATE_BYTES // each)
    if count <= most:
        return [change]
    note = each - width
    return [
        Change(
            change.kind,
            change.group,
            change.hashes[i * width : (i + most) * width],
            change.notes[i * note : (i + most) * note],
        )
        for i in range(0, count, most)
    ]
