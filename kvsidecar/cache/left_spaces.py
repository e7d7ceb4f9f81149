"""The spaces that no rank has open: they live as long as their blocks, and cost the daemon's own memory until then."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from kvsidecar.cache.space_blocks import Space

MOST_LEFT = 768
"""Spaces that one user may leave in one share. With the longest names they take 8 MB; a kept pool has entries for
more, `kvsidecar.cache.records.SPACES`."""
LOOKED_AT = 64
"""Spaces in use that one step passes over, for each of `HOLDERS`: some 10 us."""
HOLDERS = 8

Holder = tuple[Hashable, str]
"""A user, and the name of a share."""


class LeftSpaces:
    """Counts them by share and by the user who had them open last. If they are too many, the least recently used one of
    the same user and share goes: nobody's spaces go because others leave many.

    Spaces of an earlier run, whose user is not known, are not counted: they were counted then, and are no more than it
    has kept.
    """

    def __init__(self) -> None:
        self._of: dict[Holder, dict[Space, None]] = {}
        """Spaces by user and name of the share, the least recently used one first."""
        self._over: dict[Holder, None] = {}
        """Holders that may have too many."""
        self.on_cleared: Callable[[Space, int], object] = lambda space, count: None
        """Called with a space that was cleared because its user has left too many, and how many of its namespace
        were."""

    def add(self, space: Space) -> None:
        """Add a space that no rank has open any more."""
        if space.user is None:
            return
        space.left_by = holder = space.user, space.share.name
        mine = self._of.setdefault(holder, {})
        mine[space] = None
        if len(mine) > MOST_LEFT:
            self._over[holder] = None

    def remove(self, space: Space) -> None:
        """Remove a space that a rank has open, or that is gone."""
        if (holder := space.left_by) is None:
            return
        space.left_by = None
        mine = self._of[holder]
        del mine[space]
        if not mine:
            del self._of[holder]

    def use(self, space: Space) -> None:
        """Count the end of a lease on its blocks as a use."""
        if (holder := space.left_by) is not None:
            self._of[holder][space] = self._of[holder].pop(space)

    def full(self, holder: Holder) -> bool:
        """Whether this user has left so many in a share that some have to go before there may be a new one."""
        return len(self._of.get(holder, ())) >= 2 * MOST_LEFT

    def oldest(self, holder: Holder) -> Space | None:
        """The least recently used one that has no block in use; None if there is none among the first few. Those that
        are in use count as used."""
        mine = self._of.get(holder, {})
        for _ in range(min(LOOKED_AT, len(mine))):
            space = next(iter(mine))
            if not space.blocks.busy:
                return space
            self.use(space)
        return None

    def next_to_go(self) -> Space | None:
        """The oldest one of a user who has too many in a share; these take turns."""
        for _ in range(min(HOLDERS, len(self._over))):
            holder = next(iter(self._over))
            del self._over[holder]
            if len(self._of.get(holder, ())) > MOST_LEFT:
                self._over[holder] = None
                if (space := self.oldest(holder)) is not None:
                    return space
        return None
