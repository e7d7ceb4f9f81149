"""The numbers by which the daemon names spaces to the process of a tier: only the latest are known to either."""

from __future__ import annotations

from kvsidecar.tiers.backend import ShardSpace

MAX_SPACES = 2048
"""Spaces that have a number at a time: clients make new ones without end, and each takes kilobytes on either side."""


class SpaceNumbers:
    """The daemon's side. New spaces must be sent at once, and in this order: the process forgets a space when another
    one arrives, as this does.
    """

    def __init__(self) -> None:
        self._numbers: dict[ShardSpace, int] = {}
        self._last = 0
        self._watched: dict[ShardSpace, int] = {}
        self._by_number: dict[int, ShardSpace] = {}

    def of(self, space: ShardSpace) -> tuple[int, bool]:
        """The number of a space, and whether the space must be sent to the process first."""
        number = self._numbers.get(space)
        if number is not None:
            return number, False
        if len(self._numbers) == MAX_SPACES:
            del self._numbers[next(iter(self._numbers))]
        self._last += 1
        self._numbers[space] = self._last
        return self._last, True

    def watch(self, space: ShardSpace, number: int) -> int | None:
        """Note that a space is watched by this number. Returns its former number, which must be unwatched."""
        before = self.unwatch(space)
        self._watched[space], self._by_number[number] = number, space
        return None if before == number else before

    def unwatch(self, space: ShardSpace) -> int | None:
        """Returns the number by which it was watched."""
        number = self._watched.pop(space, None)
        if number is not None:
            del self._by_number[number]
        return number

    def watched(self, number: int) -> ShardSpace | None:
        """The space that is watched by this number; None: none is, any more."""
        return self._by_number.get(number)


class KnownSpaces:
    """The side of the process."""

    def __init__(self) -> None:
        self._spaces: dict[int, ShardSpace] = {}

    def add(self, number: int, space: ShardSpace) -> None:
        if len(self._spaces) == MAX_SPACES:
            del self._spaces[next(iter(self._spaces))]
        self._spaces[number] = space

    def get(self, number: int) -> ShardSpace | None:
        return self._spaces.get(number)
