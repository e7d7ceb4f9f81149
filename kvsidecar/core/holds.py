"""Holds: blocks that an operator keeps in the pool, such as those of a system prompt that every request begins with.

Users call a hold a pin: `kvsidecar pin` makes one. It is a lease without a client: it has a name, an owner and an
expiry, and all holds together have a limit. Where the cache outlives the daemon, its holds do, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvsidecar.cache.block_cache import BlockCache, Part
from kvsidecar.cache.grants import Lease
from kvsidecar.cache.space_blocks import Space
from kvsidecar.core.hashes import PackedHashes
from kvsidecar.errors import InvalidRequest, LimitExceeded
from kvsidecar.pool.kept_holds import MAX_HOLDS, KeptHold, KeptHolds
from kvsidecar.support import log
from kvsidecar.support.units import format_size
from kvsidecar.types import LookupMode, Namespace

MAX_SECONDS: Final = 366 * 86400
HOLD_STEP: Final = 8192
"""Blocks that one step of a hold looks for at most: about two milliseconds."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_log = log.get("holds")


class HoldOwner(NamedTuple):
    """Owns the lease of a hold."""

    name: str


@dataclass(frozen=True, slots=True)
class Hold:
    name: str
    owner: str
    """The user or client that asked for it."""
    namespace: Namespace
    blocks: int
    nbytes: int
    expires_at: float
    lease: int


Holding = Generator[None, None, Hold]
"""The steps of a hold, which return it."""


class Holds:
    """Used from the event loop.

    Args:
        clock: seconds, the clock of leases. Where holds are kept, it continues after the process has ended.
        most_bytes: of all holds together; a block in two holds counts twice.
        kept: outlives the daemon; None: the holds end with it.
    """

    def __init__(
        self,
        cache: BlockCache,
        clock: Callable[[], float],
        most_bytes: int,
        kept: KeptHolds | None = None,
    ) -> None:
        self._cache = cache
        self._clock = clock
        self.most_bytes = most_bytes
        self._kept = kept
        self._holds: dict[str, Hold] = {}

    def __iter__(self) -> Iterator[Hold]:
        return iter(tuple(self._holds.values()))

    @property
    def nbytes(self) -> int:
        return sum([hold.nbytes for hold in self._holds.values()])

    def hold(
        self, name: str, owner: str, namespace: Namespace, parts: Sequence[tuple[Space, PackedHashes]], seconds: float
    ) -> Holding:
        """Keep those of these blocks that are readable, in steps. A hold of the same name is replaced in the last one.

        Raises:
            InvalidRequest: the name or the time is invalid, or none of the blocks is readable.
            LimitExceeded: there would be too many holds, or too many bytes held; nothing has changed.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "a pin's name must have 1 to 64 letters, digits, dots, dashes and underscores, and begin with a letter "
                "or digit"
            )
        if not 0 < seconds <= MAX_SECONDS:
            raise InvalidRequest(f"a pin must last more than 0 and at most {MAX_SECONDS} seconds")
        return (yield from self._take(name, owner, namespace, parts, seconds))

    def _take(
        self,
        name: str,
        owner: str,
        namespace: Namespace,
        parts: Sequence[tuple[Space, PackedHashes]],
        seconds: float,
        kept_blocks: int = 0,
    ) -> Holding:
        """`hold`, with some of its blocks kept already."""
        lease: Lease | None = None
        try:
            pieces = [(space, piece) for space, hashes in parts for piece in hashes.pieces(HOLD_STEP)]
            for index, each in enumerate(pieces):
                if index:
                    yield
                lease = self._lease(name, each, seconds, lease)
            if lease is None:
                raise InvalidRequest("none of these blocks is readable")
            hold = self._keep(name, owner, namespace, lease, kept_blocks)
        except BaseException:  # also if nobody waits for the next step any more
            if lease is not None:
                self._cache.release(lease.id)
            raise
        return hold

    def _lease(self, name: str, part: Part, seconds: float, lease: Lease | None) -> Lease | None:
        """Add the readable ones of these blocks to the lease."""
        blocks, lease_id = (0, 0) if lease is None else (lease.num_blocks, lease.id)
        now = self._clock()
        added, (hits,) = self._cache.lookup_and_lease(
            [part], LookupMode.BITMAP, now, seconds, HoldOwner(name), lease_id
        )
        if any(hits) and (added is None or added.num_blocks == blocks):
            raise InvalidRequest("the pin would take what is guaranteed to other shares")
        return added

    def _keep(self, name: str, owner: str, namespace: Namespace, lease: Lease, kept_blocks: int) -> Hold:
        before = self._holds.get(name)
        if before is None and len(self._holds) >= MAX_HOLDS:
            raise LimitExceeded(f"there are {MAX_HOLDS} pins: remove one")
        nbytes = sum([len(chain.rows) * chain.blocks.space.block_bytes for chain in lease.chains])
        others = self.nbytes - (before.nbytes if before is not None else 0)
        hold = Hold(name, owner, namespace, lease.num_blocks, nbytes, lease.expires_at, lease.id)
        if others + nbytes > self.most_bytes:
            raise LimitExceeded(
                f"{format_size(nbytes)} more would be pinned; other pins have {format_size(others)} of the "
                f"{format_size(self.most_bytes)} that --pin-max allows"
            )
        if self._kept is not None and hold.blocks != kept_blocks:
            groups = [(chain.blocks.space.group, chain.blocks.index.hashes_of(chain.rows)) for chain in lease.chains]
            if not self._kept.put(KeptHold(name, owner, namespace, tuple(groups), hold.expires_at)):
                raise LimitExceeded(f"there is no room for the hashes of {lease.num_blocks} more blocks: pin fewer")
        if before is not None:  # not earlier: it holds its blocks until the new lease does
            self._cache.release(before.lease)
        self._holds[name] = hold
        return hold

    def restore(self) -> None:
        """Take over the holds of an earlier run, each for those of its blocks that are still there, until the time that
        it had. Call it once, before any other method."""
        if self._kept is None:
            return
        self._cache.expire(self._clock())
        lost: dict[str, str] = {}
        for each in self._kept.find():
            seconds = min(each.expires_at - self._clock(), float(MAX_SECONDS))
            spaces = [(self._cache.find_space(each.namespace, group), hashes) for group, hashes in each.groups]
            width = each.namespace.hash_bytes
            parts = [(space, PackedHashes(hashes, width)) for space, hashes in spaces if space is not None]
            try:
                if seconds > 0:
                    for _ in self._take(each.name, each.owner, each.namespace, parts, seconds, each.num_blocks):
                        """The daemon serves nobody yet."""
                    continue
            except (InvalidRequest, LimitExceeded) as error:
                lost[each.name] = str(error)
            self._kept.drop(each.name)
        if self._holds or lost:
            _log.info("pins of an earlier daemon", kept=sorted(self._holds), lost=lost)

    def give_up(self) -> str:
        """End the hold with the fewest bytes: its memory is needed. Returns its name; empty if there is none."""
        if not self._holds:
            return ""
        name = min(self._holds.values(), key=lambda hold: hold.nbytes).name
        self.end(name)
        return name

    def end(self, name: str) -> bool:
        """End a hold. False if there is none."""
        self._forget(name)
        hold = self._holds.pop(name, None)
        return hold is not None and self._cache.release(hold.lease)

    def expired(self, leases: Sequence[Lease]) -> int:
        """These leases have expired. Returns how many of them were holds."""
        names = [lease.owner.name for lease in leases if isinstance(lease.owner, HoldOwner)]
        for name in names:
            self._forget(name)
            self._holds.pop(name, None)
        return len(names)

    def clear(self, namespace: Namespace | None) -> None:
        """End the holds of a namespace that is cleared, or all."""
        for hold in tuple(self._holds.values()):
            if namespace in (None, hold.namespace):
                self.end(hold.name)

    def _forget(self, name: str) -> None:
        """Do not keep this hold beyond this run any more."""
        if self._kept is not None:
            self._kept.drop(name)
