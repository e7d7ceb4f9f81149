"""The latest notes of each namespace, for snapshots. Clients fill it, so it is bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from typing import Generic, TypeVar

from kvsidecar.types import Namespace

NOTE_BYTES = 200
"""What an entry takes besides its hashes and notes."""

_Note = TypeVar("_Note")


class Notes(Generic[_Note]):
    """When all together are too many, the user who has most gives up the oldest of its namespace that has most: nobody
    loses notes to a user who has fewer.

    Args:
        max_bytes: of all users and namespaces.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[Namespace, dict[int, OrderedDict[int, tuple[_Note, int]]]] = {}
        """By namespace and user: notes and their bytes, numbered, the oldest first. Not a dict: to find the first key
        of one takes the longer, the more keys before it have been deleted."""
        self._bytes: dict[int, dict[Namespace, int]] = {}
        """By user and namespace."""
        self._of_user: dict[int, int] = {}
        self.total_bytes = 0
        self._number = 0

    def add(self, namespace: Namespace, user: int, note: _Note, nbytes: int) -> list[tuple[Namespace, _Note]]:
        """Returns what was given up for it.

        Args:
            user: uid of who noted it.
            nbytes: of its hashes and notes.
        """
        self._number += 1
        nbytes += NOTE_BYTES
        self._kept.setdefault(namespace, {}).setdefault(user, OrderedDict())[self._number] = note, nbytes
        self._count(user, namespace, nbytes)
        given_up = []
        while self.total_bytes > self._max_bytes:
            most = max(self._of_user, key=self._of_user.__getitem__)
            largest = max(self._bytes[most], key=self._bytes[most].__getitem__)
            _, (oldest, size) = self._kept[largest][most].popitem(last=False)
            given_up.append((largest, oldest))
            self._count(most, largest, -size)
        return given_up

    def _count(self, user: int, namespace: Namespace, nbytes: int) -> None:
        of_user = self._bytes.setdefault(user, {})
        of_user[namespace] = of_user.get(namespace, 0) + nbytes
        self._of_user[user] = self._of_user.get(user, 0) + nbytes
        self.total_bytes += nbytes
        if not of_user[namespace]:  # nor is anything left of it
            del of_user[namespace], self._kept[namespace][user]
            if not self._kept[namespace]:
                del self._kept[namespace]
            if not of_user:
                del self._bytes[user], self._of_user[user]

    def forget(self, namespace: Namespace) -> None:
        for user in list(self._kept.get(namespace, ())):
            self._count(user, namespace, -self._bytes[user][namespace])

    def keep_only(self, namespaces: Container[Namespace]) -> None:
        for each in [each for each in self._kept if each not in namespaces]:
            self.forget(each)

    def clear(self) -> None:
        self.keep_only(())

    def of(self, namespace: Namespace) -> Iterator[_Note]:
        """Those that there are now, as far as they are still there when they are asked for."""
        for user in list(self._kept.get(namespace, ())):
            for number in list(self._of(namespace, user)):
                if (found := self._of(namespace, user).get(number)) is not None:
                    yield found[0]

    def _of(self, namespace: Namespace, user: int) -> OrderedDict[int, tuple[_Note, int]]:
        return self._kept.get(namespace, {}).get(user) or OrderedDict()
