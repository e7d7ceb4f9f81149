"""The latest notes of each namespace, for the snapshots of watchers to come. Bounded in bytes: clients fill it.

When all notes together are too many, the user with the most gives up the oldest of its namespace with the most, as many
as the new ones need: no user loses notes to one who has fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np

from kvsidecar.cache.arrays import Bools, all_true, any_true
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.core.changes import Change
from kvsidecar.types import Namespace

MAX_NOTES_BYTES = 64 * 1024 * 1024
"""Notes that are kept for watchers to come, of all users."""
ENTRY_BYTES: Final = 200
"""What an entry takes beside its hashes and notes."""
STEP_NOTES: Final = 1024
STEP_BYTES: Final = 4 * 1024 * 1024
"""Limit of the notes that one step looks at, or frees: half a millisecond."""
STEP_BLOCKS: Final = 8192
"""Limit of their blocks that one step looks for: one or two milliseconds."""
LOOKS: Final = 40
"""Calls of `look` between two rounds: ten seconds. No younger note is looked at: its block may be on its way."""

IsThere = Callable[[int, bytes], Bools]
"""Tells which blocks of one group are in the cache: one flag for each of the joined hashes."""
AreGone = Callable[[Namespace, "Sequence[Change]"], Sequence[bool]]
"""Tells which notes of one namespace have lost all their blocks: one flag for each note."""


def without_blocks(cache: BlockCache, namespace: Namespace, notes: Sequence[Change]) -> list[bool]:
    """One flag for each note: true if none of its blocks is in the pool."""
    gone = [True] * len(notes)
    for group in {each.group for each in notes}:
        if (space := cache.find_space(namespace, group)) is None:
            continue
        mine = [number for number, each in enumerate(notes) if each.group == group]
        counts = [len(notes[number].hashes) // namespace.hash_bytes for number in mine]
        index = space.blocks.index
        rows = index.find(index.keys(b"".join([notes[number].hashes for number in mine])))
        there = np.logical_or.reduceat(rows >= 0, np.cumsum([0, *counts[:-1]]))
        for number, found in zip(mine, there.tolist(), strict=True):
            gone[number] = not found
    return gone


@dataclass(slots=True, eq=False)
class _Kept:
    """One user's notes in one namespace."""

    changes: dict[int, Change] = field(default_factory=dict)
    """Numbered in their order. Those that are gone leave holes."""
    first: int = 0
    """No number is lower."""
    end: int = 0
    """The number of the next one."""
    nbytes: int = 0

    def pop_oldest(self) -> Change:
        while (oldest := self.changes.pop(self.first, None)) is None:
            self.first += 1
        return oldest


def _bytes_of(change: Change) -> int:
    return change.nbytes + ENTRY_BYTES


def _piece(kept: _Kept, number: int, end: int, width: int) -> tuple[list[int], int]:
    """The numbers of the notes to look at in one step, from this number on, and the number to go on with.

    Args:
        width: of a hash.
    """
    found, nbytes, hashed, stop = list[int](), 0, 0, min(end, number + STEP_NOTES)
    while number < stop and nbytes < STEP_BYTES and hashed < STEP_BLOCKS * width:
        if (change := kept.changes.get(number)) is not None:
            found.append(number)
            nbytes += len(change.notes)
            hashed += len(change.hashes)
        number += 1
    return found, number


class Notes:
    def __init__(self) -> None:
        self._kept: dict[Namespace, dict[int, _Kept]] = {}
        """Notes by namespace and user."""
        self._by_user: dict[int, dict[Namespace, _Kept]] = {}
        """The notes of `_kept` by user and namespace."""
        self._bytes: dict[int, int] = {}
        """Bytes of each user's notes."""
        self._freed: list[dict[int, Change]] = []
        """Forgotten notes, which are freed step by step: all at once would take tens of milliseconds."""
        self._freed_bytes = 0
        self._round: Iterator[None] | None = None
        """The round that `look` continues; None between two rounds."""
        self._unlooked: Iterator[Namespace] = iter(())
        """Namespaces still to be checked for existence."""
        self._looks = 0
        self._old: list[tuple[Namespace, int, _Kept, int]] = []
        """Namespace, user, notes and their end when the last round began."""
        self.total_bytes = 0

    def add(
        self, namespace: Namespace, user: int, change: Change, most: int = STEP_NOTES
    ) -> list[tuple[Namespace, Change]]:
        """Keep notes. Returns the notes given up for them: these themselves, if more than ``most`` others had to go.

        Args:
            user: uid of the client.
        """
        kept = self._kept.setdefault(namespace, {}).get(user)
        if kept is None:
            kept = self._kept[namespace][user] = self._by_user.setdefault(user, {})[namespace] = _Kept()
        kept.changes[kept.end] = change
        kept.end += 1
        self._count(user, kept, _bytes_of(change))
        given_up: list[tuple[Namespace, Change]] = []
        # Found once for each user: one may have hundreds of namespaces, and give up hundreds of notes.
        largest: dict[int, Namespace] = {}
        while self.total_bytes > MAX_NOTES_BYTES:
            if len(given_up) >= most:
                given_up.append((namespace, self._give_up(namespace, user, kept, kept.end - 1)))
                break
            has_most = max(self._bytes, key=self._bytes.__getitem__)
            of_user = self._by_user[has_most]
            if largest.get(has_most) not in of_user:
                largest[has_most] = max(of_user, key=lambda each: of_user[each].nbytes)
            space = largest[has_most]
            given_up.append((space, self._give_up(space, has_most, of_user[space])))
        return given_up

    def _give_up(self, namespace: Namespace, user: int, kept: _Kept, number: int | None = None) -> Change:
        """Remove one of its notes, by default the oldest."""
        change = kept.pop_oldest() if number is None else kept.changes.pop(number)
        self._count(user, kept, -_bytes_of(change))
        if not kept.changes:
            self._remove(namespace, user)
        return change

    def _count(self, user: int, kept: _Kept, nbytes: int) -> None:
        kept.nbytes += nbytes
        self._bytes[user] = self._bytes.get(user, 0) + nbytes
        self.total_bytes += nbytes

    def _remove(self, namespace: Namespace, user: int) -> _Kept:
        kept = self._kept[namespace].pop(user)
        if not self._kept[namespace]:
            del self._kept[namespace]
        del self._by_user[user][namespace]
        if not self._by_user[user]:
            del self._by_user[user]
        self._count(user, kept, -kept.nbytes)
        if not self._bytes[user]:
            del self._bytes[user]
        return kept

    @property
    def namespaces(self) -> list[Namespace]:
        """Namespaces with notes."""
        return list(self._kept)

    def forget(self, namespace: Namespace) -> None:
        """Forget all notes of a namespace."""
        for user in tuple(self._kept.get(namespace, ())):
            self._freed_bytes += self._kept[namespace][user].nbytes
            self._freed.append(self._remove(namespace, user).changes)

    def forget_gone(self, namespace: Namespace, are_there: IsThere) -> Iterator[None]:
        """Forget, in steps, a namespace's notes on blocks that are not there."""
        for user, kept in tuple(self._kept.get(namespace, {}).items()):
            number, end = kept.first, kept.end
            while number < end and self._is_kept(namespace, user, kept):
                found, number = _piece(kept, number, end, namespace.hash_bytes)
                for group in {kept.changes[each].group for each in found}:
                    mine = [each for each in found if kept.changes[each].group == group]
                    hashes = [kept.changes[each].hashes for each in mine]
                    there, at = are_there(group, b"".join(hashes)), 0
                    for each, packed in zip(mine, hashes, strict=True):
                        count = len(packed) // namespace.hash_bytes
                        self._cut(namespace, user, kept, each, there[at : at + count])
                        at += count
                yield

    def _cut(self, namespace: Namespace, user: int, kept: _Kept, number: int, there: Bools) -> None:
        """Reduce a note to the blocks that are there."""
        if not any_true(there):
            self._give_up(namespace, user, kept, number)
        elif not all_true(there):
            change = kept.changes[number]
            hashes, notes = (
                np.frombuffer(packed, np.uint8).reshape(len(there), -1)[there].tobytes()
                for packed in (change.hashes, change.notes)
            )
            kept.changes[number] = Change(change.kind, change.group, hashes, notes)
            self._count(user, kept, kept.changes[number].nbytes - change.nbytes)

    def _is_kept(self, namespace: Namespace, user: int, kept: _Kept) -> bool:
        """True unless it was forgotten meanwhile."""
        return self._kept.get(namespace, {}).get(user) is kept

    def of(self, namespace: Namespace) -> Iterator[Change]:
        """The present notes of a namespace; those that are forgotten before it is their turn are left out."""
        for user, kept in tuple(self._kept.get(namespace, {}).items()):
            for number in range(kept.first, kept.end):
                if not self._is_kept(namespace, user, kept):
                    break
                if (change := kept.changes.get(number)) is not None:
                    yield change

    def look(self, namespaces: Container[Namespace], are_gone: AreGone | None) -> None:
        """Forget, a step in each call, what nobody needs any more: notes of other namespaces than these, and of blocks
        that are gone. Call it every quarter of a second.

        Args:
            are_gone: None: it is not known.
        """
        some = list(islice(self._unlooked, STEP_NOTES))
        if not some:
            self._unlooked = iter(self.namespaces)
            some = list(islice(self._unlooked, STEP_NOTES))
        for each in some:
            if each not in namespaces:
                self.forget(each)
        self._free()
        self._looks += 1
        if self._round is None and are_gone is not None and self._looks >= LOOKS:
            self._looks, self._round = 0, self._look(are_gone)
        if self._round is not None and next(self._round, True):
            self._round = None

    @property
    def held_bytes(self) -> int:
        """Bytes of all notes, including those that are forgotten and not freed yet."""
        return self.total_bytes + self._freed_bytes

    def _free(self) -> None:
        nbytes = 0
        for _ in range(STEP_NOTES):
            if not self._freed or nbytes >= STEP_BYTES:
                break
            _, change = self._freed[-1].popitem()
            nbytes += _bytes_of(change)
            if not self._freed[-1]:
                self._freed.pop()
        self._freed_bytes -= nbytes

    def _look(self, are_gone: AreGone) -> Iterator[None]:
        """One round, a step at a time."""
        old = self._old
        self._old = [
            (namespace, user, kept, kept.end) for namespace, users in self._kept.items() for user, kept in users.items()
        ]
        for namespace, user, kept, end in old:
            number = kept.first
            while number < end and self._is_kept(namespace, user, kept):
                found, number = _piece(kept, number, end, namespace.hash_bytes)
                gone = are_gone(namespace, [kept.changes[each] for each in found])
                for each, is_gone in zip(found, gone, strict=True):
                    if is_gone:
                        self._give_up(namespace, user, kept, each)
                yield
