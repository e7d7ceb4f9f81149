"""Pins: blocks that an operator keeps in the pool, such as those of a system prompt that every request begins with.

A pin is a lease without a client: it has a name, an owner and an expiry, and all pins together have a limit. Where the
cache outlives the daemon, its pins do, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvsidecar.cache.block import Lease
from kvsidecar.cache.block_cache import BlockCache, Part
from kvsidecar.errors import InvalidRequest, LimitExceeded
from kvsidecar.pool.kept_pins import MAX_PINS, KeptPin, KeptPins
from kvsidecar.support import log
from kvsidecar.support.units import format_size
from kvsidecar.types import LookupMode, Namespace

MAX_SECONDS: Final = 366 * 86400
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_log = log.get("pins")


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
        clock: seconds, the clock of leases. Where pins are kept, it goes on when the process ends.
        most_bytes: of all pins together; a block in two pins counts twice.
        kept: outlives the daemon; None: the pins end with it.
    """

    def __init__(
        self,
        cache: BlockCache,
        clock: Callable[[], float],
        most_bytes: int,
        kept: KeptPins | None = None,
    ) -> None:
        self._cache = cache
        self._clock = clock
        self.most_bytes = most_bytes
        self._kept = kept
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
            raise InvalidRequest(f"a pin must last more than 0 and at most {MAX_SECONDS} seconds")
        return self._take(name, owner, namespace, parts, seconds)

    def _take(
        self, name: str, owner: str, namespace: Namespace, parts: Sequence[Part], seconds: float, kept_blocks: int = 0
    ) -> Pin:
        """`pin`, of which so many blocks are kept already."""
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
        pin = Pin(name, owner, namespace, lease.num_blocks, nbytes, now + seconds, lease.id)
        if others + nbytes > self.most_bytes:
            self._cache.release(lease.id)
            raise LimitExceeded(
                f"{format_size(nbytes)} more would be pinned; others have {format_size(others)} of the "
                f"{format_size(self.most_bytes)} that --pin-max allows"
            )
        to_keep = None if self._kept is None or pin.blocks == kept_blocks else self._to_keep(pin, lease)
        if self._kept is not None and to_keep is not None and not self._kept.put(to_keep):
            self._cache.release(lease.id)
            raise LimitExceeded(f"there is no room for the hashes of {lease.num_blocks} more blocks: pin fewer")
        if before is not None:
            self._cache.release(before.lease)
        self._pins[name] = pin
        return pin

    def _to_keep(self, pin: Pin, lease: Lease) -> KeptPin:
        groups = [(chain.blocks.space.group, chain.blocks.index.hashes_of(chain.rows)) for chain in lease.chains]
        return KeptPin(pin.name, pin.owner, pin.namespace, tuple(groups), pin.expires_at)

    def restore(self) -> None:
        """Take over the pins of an earlier run, each for those of its blocks that are still there, until the time that
        it had. Call it once, before any other method."""
        if self._kept is None:
            return
        self._cache.expire(self._clock())
        lost: dict[str, str] = {}
        for each in self._kept.find():
            seconds = min(each.expires_at - self._clock(), float(MAX_SECONDS))
            spaces = [(self._cache.find_space(each.namespace, group), hashes) for group, hashes in each.groups]
            parts = [(space, hashes) for space, hashes in spaces if space is not None]
            try:
                if seconds > 0:
                    self._take(each.name, each.owner, each.namespace, parts, seconds, each.num_blocks)
                    continue
            except (InvalidRequest, LimitExceeded) as error:
                lost[each.name] = str(error)
            self._kept.drop(each.name)
        if self._pins or lost:
            _log.info("pins of an earlier daemon", kept=sorted(self._pins), lost=lost)

    def give_up(self) -> str:
        """End the pin with the fewest bytes: its memory is needed. Returns its name; empty if there is none."""
        if not self._pins:
            return ""
        name = min(self._pins.values(), key=lambda pin: pin.nbytes).name
        self.unpin(name)
        return name

    def unpin(self, name: str) -> bool:
        """End a pin. False if there is none."""
        self._forget(name)
        pin = self._pins.pop(name, None)
        return pin is not None and self._cache.release(pin.lease)

    def expired(self, leases: Sequence[Lease]) -> int:
        """These leases have expired. Returns how many of them were pins."""
        names = [lease.owner.name for lease in leases if isinstance(lease.owner, PinHolder)]
        for name in names:
            self._forget(name)
            self._pins.pop(name, None)
        return len(names)

    def clear(self, namespace: Namespace | None) -> None:
        """End the pins of a namespace that is cleared, or all."""
        for pin in tuple(self._pins.values()):
            if namespace in (None, pin.namespace):
                self.unpin(pin.name)

    def _forget(self, name: str) -> None:
        """Do not keep this pin beyond this run any more."""
        if self._kept is not None:
            self._kept.drop(name)
