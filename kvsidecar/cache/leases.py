"""The live leases by id, owner and expiry. Their blocks are referenced."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush

from kvsidecar.cache.grants import Chain, Lease

RELEASED = 4096
"""Number of the most recently released lease ids that are remembered."""
EXPIRED = 512
"""Leases that expire at the same time are ended in batches of this size: a millisecond."""


class LeaseTable:
    """Live leases. Times are seconds on the caller's clock.

    Args:
        next_id: source of lease ids; ids in use are skipped. Default: 1, 2, 3, ...
    """

    def __init__(self, next_id: Callable[[], int] | None = None) -> None:
        self._next_id = next_id or itertools.count(1).__next__
        self._leases: dict[int, Lease] = {}
        self._by_owner: dict[Hashable, dict[int, Lease]] = {}
        self._room_of: Counter[Hashable] = Counter()
        self._released: dict[int, None] = {}
        """Ids in the order of their release; at most `RELEASED`."""
        self._expiries: list[tuple[float, int]] = []
        """Heap of (expires_at, id). Renewed and released leases leave stale entries behind."""

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, owner: Hashable, chains: list[Chain], expires_at: float) -> Lease:
        lease_id = self._next_id()
        while lease_id in self._leases:
            lease_id = self._next_id()
        lease = Lease(lease_id, owner, chains, expires_at)
        self._leases[lease_id] = lease
        self._released.pop(lease_id, None)
        self._by_owner.setdefault(owner, {})[lease_id] = lease
        self._room_of[owner] += lease.room
        self._note_expiry(lease)
        return lease

    def extend(self, lease: Lease, chains: list[Chain], expires_at: float) -> None:
        """Add chains to a live lease, and set a new expiry."""
        before = lease.room
        lease.add(chains)
        self._room_of[lease.owner] += lease.room - before
        lease.expires_at = expires_at
        self._note_expiry(lease)

    def get(self, lease_id: int, now: float) -> Lease | None:
        """The lease, or None if it was released or has expired, even before `pop_expired` removes it."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and now < lease.expires_at else None

    def held(self, owner: Hashable) -> tuple[int, int]:
        """Number of leases of an owner, and of their blocks, counted as in `Lease.room`."""
        return len(self._by_owner.get(owner, ())), self._room_of.get(owner, 0)

    def renew(self, lease_id: int, now: float, expires_at: float) -> bool:
        """Set a new expiry. False if the lease was released or has expired."""
        lease = self.get(lease_id, now)
        if lease is None:
            return False
        lease.expires_at = expires_at
        self._note_expiry(lease)
        return True

    def pop(self, lease_id: int) -> Lease | None:
        """Remove and return the lease; None if it does not exist."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            of_owner = self._by_owner[lease.owner]
            del of_owner[lease_id]
            self._room_of[lease.owner] -= lease.room
            if not of_owner:
                del self._by_owner[lease.owner], self._room_of[lease.owner]
        return lease

    def release(self, lease_id: int) -> Lease | None:
        """`pop`, and remember that the client released it."""
        lease = self.pop(lease_id)
        if lease is not None:
            self._released[lease_id] = None
            if len(self._released) > RELEASED:
                del self._released[next(iter(self._released))]
        return lease

    def was_released(self, lease_id: int) -> bool:
        """Whether the client released it recently."""
        return lease_id in self._released

    def pop_expired(self, now: float) -> list[Lease]:
        """Remove and return leases that have expired: some of them, if they are many."""
        expired: list[Lease] = []
        for _ in range(EXPIRED):
            if not self._expiries or self._expiries[0][0] > now:
                break
            _, lease_id = heappop(self._expiries)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_at <= now:
                self.pop(lease_id)
                expired.append(lease)
        return expired

    def pop_owner(self, owner: Hashable) -> list[Lease]:
        leases = self._by_owner.pop(owner, {})
        self._room_of.pop(owner, None)
        for lease_id in leases:
            del self._leases[lease_id]
        return list(leases.values())

    def _note_expiry(self, lease: Lease) -> None:
        if len(self._expiries) > 2 * len(self._leases) + 64:
            # Stale entries leave the heap only when they expire; until then they must not pile up.
            self._expiries = [(lease.expires_at, lease.id) for lease in self._leases.values()]
            heapify(self._expiries)
        else:
            heappush(self._expiries, (lease.expires_at, lease.id))
