"""Pins: blocks that an operator keeps in the pool, such as those of a system prompt that every request begins with.

A pin is a lease without a client: it has a name, an owner and an expiry, and all pins together have a limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvsidecar.cache.block import Lease
from kvsidecar.cache.block_cache import BlockCache, Part
from kvsidecar.errors import InvalidRequest, LimitExceeded
from kvsidecar.support.units import format_size
from kvsidecar.types import LookupMode, Namespace

MAX_PINS: Final = 1024
MAX_SECONDS: Final = 366 * 86400
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PinHolder(NamedTuple):
    """Holds the lease of a pin."""

    name: str


@dataclass(frozen=True, slots=True)
class Pin:
    name: str
    owner: str
    """Who asked for it."""
    namespace: Namespace
    blocks: int
    nbytes: int
    expires_at: float
    lease: int


class Pins:
    """Used from the event loop.

    Args:
        clock: monotonic seconds, the clock of leases.
        most_bytes: of all pins together; a block in two pins counts twice.
    """

    def __init__(self, cache: BlockCache, clock: Callable[[], float], most_bytes: int) -> None:
        self._cache = cache
        self._clock = clock
        self.most_bytes = most_bytes
        self._pins: dict[str, Pin] = {}

    def __iter__(self) -> Iterator[Pin]:
        return iter(tuple(self._pins.values()))

    @property
    def nbytes(self) -> int:
        return sum([pin.nbytes for pin in self._pins.values()])

    def pin(self, name: str, owner: str, namespace: Namespace, parts: Sequence[Part], seconds: float) -> Pin:
        """Keep those of these blocks that are readable. A pin of the same name is replaced.

        Raises:
            InvalidRequest: the name or the time is invalid, or none of the blocks is readable.
            LimitExceeded: there would be too many pins, or too many bytes pinned; nothing has changed.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "a pin's name must have 1 to 64 letters, digits, dots, dashes and underscores, and begin with a letter "
                "or digit"
            )
        if not 0 < seconds <= MAX_SECONDS:
            raise InvalidRequest(f"a pin lasts more than 0 and at most {MAX_SECONDS} seconds")
        before = self._pins.get(name)
        if before is None and len(self._pins) >= MAX_PINS:
            raise LimitExceeded(f"there are {MAX_PINS} pins: remove one")
        now = self._clock()
        # The old lease first: it holds its blocks until the new one does.
        lease, _ = self._cache.lookup_and_lease(parts, LookupMode.BITMAP, now, seconds, PinHolder(name))
        if lease is None:
            raise InvalidRequest(
                "none of these blocks is readable, or what other shares are guaranteed would be pinned"
            )
        nbytes = sum([len(chain.rows) * chain.blocks.space.block_bytes for chain in lease.chains])
        others = self.nbytes - (before.nbytes if before is not None else 0)
        if others + nbytes > self.most_bytes:
            self._cache.release(lease.id)
            raise LimitExceeded(
                f"{format_size(nbytes)} more would be pinned; others have {format_size(others)} of the "
                f"{format_size(self.most_bytes)} that --pin-max allows"
            )
        if before is not None:
            self._cache.release(before.lease)
        pin = Pin(name, owner, namespace, lease.num_blocks, nbytes, now + seconds, lease.id)
        self._pins[name] = pin
        return pin

    def unpin(self, name: str) -> bool:
        """End a pin. False if there is none."""
        pin = self._pins.pop(name, None)
        return pin is not None and self._cache.release(pin.lease)

    def expired(self, leases: Sequence[Lease]) -> int:
        """These leases have expired. Returns how many of them were pins."""
        names = [lease.owner.name for lease in leases if isinstance(lease.owner, PinHolder)]
        for name in names:
            self._pins.pop(name, None)
        return len(names)

    def clear(self, namespace: Namespace | None) -> None:
        """End the pins of a namespace that is cleared, or all."""
        for pin in tuple(self._pins.values()):
            if namespace in (None, pin.namespace):
                self.unpin(pin.name)
