"""The scheduler's lookups: within a time budget, with a short memory, and never with an error."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsidecar.client import LeaseRenewal, LookupMode
from kvsidecar.client.types import LookupResult
from kvsidecar.integrations.sglang.groups import KV, PoolGroup
from kvsidecar.integrations.sglang.shared import RankState
from kvsidecar.integrations.sglang.transfers import HASH_BYTES, name_of
from kvsidecar.integrations.stored_filter import tags_of
from kvsidecar.integrations.time_limits import in_proportion

_log = logging.getLogger("kvsidecar.sglang")

OFFER_SECONDS = 2.0
"""How long a hit is leased. SGLang queues the load in the scheduling step of the lookup, or looks up again."""
MARGIN_SECONDS = 0.5
"""A lease with less than this left counts as ended: its renewal may arrive too late."""
FRESH_HIT_SECONDS = 1.0
"""How long a hit is reused: SGLang repeats the lookups of all waiting requests in each step. The lease lasts longer."""
FRESH_MISS_SECONDS = 0.25
"""How long a miss is reused: another engine may store the pages meanwhile."""
MOST_LENGTHS = 64
"""Most lengths in an offer that several ranks have to agree on: in each scheduling step, SGLang sets an element of a
tensor for each length, which takes 3 us."""


@dataclass(slots=True)
class PageOffer:
    """The answer to the last lookup of a request."""

    keys: Sequence[str]
    """The keys that were looked up. They are chained: if two are equal at one place, so are all before."""
    lengths: Sequence[int]
    """Every prefix length, in pages, that can be loaded, ascending; a `range` if each up to the longest one can."""
    answered: float
    epoch: int
    """The epoch of the daemon run that has answered."""
    lease: int | None = None
    expires: float = 0.0

    def answers(self, keys: Sequence[str], now: float) -> bool:
        """Whether this offer is fresh, and also answers a lookup of these keys."""
        fresh = FRESH_HIT_SECONDS if self.lengths else FRESH_MISS_SECONDS
        count = len(keys)
        return now - self.answered < fresh and count <= len(self.keys) and self.keys[count - 1] == keys[-1]


class RankLookups:
    """The lookups of one rank.

    Args:
        budget: longest time in seconds that a lookup may wait; `in_proportion`, since with pages of one token a prompt
            has tens of thousands.
        alone: whether there are no other ranks.
    """

    def __init__(self, shared: RankState, budget: float, *, alone: bool) -> None:
        self._alone = alone
        self._client, self._namespace, self._keys = shared.jobs.client, shared.namespace, shared.keys
        self._groups, self._budget, self._gains = shared.groups, budget, shared.gains
        self._known, self._counters, self._clock = shared.known, shared.counters, shared.clock
        self._trailing = any(group.pool != KV for group in shared.groups.all)
        self._offers: dict[str, PageOffer] = {}
        """The offers by request, the oldest first."""

    def restorable(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Prefix lengths, in pages, that can be loaded; SGLang takes the longest that all ranks have found. Waits no
        longer than its budget.

        Raises:
            ClientError: the daemon refuses the lookup.
            ValueError: a key is not a hash.
        """
        now = self._clock()
        self._forget_old(now)
        by_pool = {name_of(each): each for each in transfers}
        full = by_pool.get(KV)
        if full is None or not full.keys or not self._client.attached:
            return []
        offer = self._offers.get(rid)
        if offer is not None and offer.epoch == self._client.attached_epoch and offer.answers(full.keys, now):
            return self._needed_lengths(offer.lengths, len(full.keys))
        pages = len(full.keys)
        keys = self._keys(full.keys)
        epoch = self._client.attached_epoch
        windows = {name: len(each.keys) for name, each in by_pool.items() if name != KV}
        # The others were needed at the end of an earlier turn, and must not be kept for this one.
        last = {group.index: windows[group.pool] for group in self._groups.all if group.pool in windows}
        result = self._client.lookup(
            self._namespace,
            {group.index: keys for group in self._groups.all},
            mode=LookupMode.BITMAP if self._trailing else LookupMode.PREFIX,
            lease_seconds=OFFER_SECONDS,
            lease_last=last,
            timeout=in_proportion(self._budget, pages * len(self._groups.all)),
        )
        if rid not in self._offers:  # else SGLang asks again while the request waits
            self._gains.count(pages)
        self._counters.lookups += 1
        self._counters.unanswered_lookups += bool(result.reason)
        # After the lookup, whose lease protects the same blocks.
        self.forget(rid)
        lengths: Sequence[int] = ()
        if not result.reason and result.ready:
            lengths = self._lengths(result, pages, windows, keys)
        self._counters.offered_pages += lengths[-1] if lengths else 0
        offer = PageOffer(full.keys, lengths, now, epoch, result.lease, now + result.lease_seconds)
        self._offers[rid] = offer
        if not lengths:
            self._release(offer)
        return self._needed_lengths(lengths, pages)

    def _needed_lengths(self, lengths: Sequence[int], pages: int) -> list[int]:
        """The lengths up to this many pages that SGLang needs to know."""
        lengths = lengths[: bisect_right(lengths, pages)]
        if self._alone:
            return list(lengths[-1:])
        return thinned(len(lengths)) if isinstance(lengths, range) else list(lengths)

    def _lengths(self, result: LookupResult, pages: int, windows: dict[str, int], keys: bytes) -> Sequence[int]:
        prefix = 0
        if (group := self._groups.of(KV)) is not None:
            answer = result.groups[group.index]
            if self._trailing:
                prefix = next((i for i, found in enumerate(answer.found) if not found), pages)
            else:
                prefix = answer.hits
            self._forget_pages(group, keys[prefix * HASH_BYTES :])
        if not windows:
            return range(1, prefix + 1)
        needed: dict[int, list[npt.NDArray[np.bool_]]] = {}
        for pool, window in windows.items():
            if (group := self._groups.of(pool)) is not None:
                found = np.asarray(result.groups[group.index].found, bool)
                needed.setdefault(window, []).append(found)
                self._forget_pages(group, np.frombuffer(keys, np.uint8).reshape(-1, HASH_BYTES)[~found].tobytes())
        return restorable(pages, prefix, needed)

    def _forget_pages(self, group: PoolGroup, keys: bytes) -> None:
        """Forget pages that were evicted or never stored, so that they are stored when SGLang offers them again."""
        if keys:
            self._known.discard(tags_of(group.index, keys, len(keys) // HASH_BYTES))

    def take(self, rid: str, lease_seconds: float) -> LeaseRenewal | None:
        """The lease of a request's hit, extended until its load has ended. None: it has ended, or the daemon that
        granted it has; the load must not be queued."""
        offer = self._offers.pop(rid, None)
        if offer is None or offer.lease is None:
            return None
        is_granted = self._client.attached and offer.epoch == self._client.attached_epoch
        if not is_granted or self._clock() >= offer.expires - MARGIN_SECONDS:
            self._release(offer)
            return None
        renewal = self._client.renew_nowait(offer.lease, lease_seconds)
        return renewal if renewal.sent else None

    def forget(self, rid: str) -> None:
        if (offer := self._offers.pop(rid, None)) is not None:
            self._release(offer)

    def forget_all(self) -> None:
        for rid in tuple(self._offers):
            self.forget(rid)

    def _forget_old(self, now: float) -> None:
        """Drop the answers to requests that are gone, which SGLang does not report. Their leases have ended."""
        while self._offers:
            rid, oldest = next(iter(self._offers.items()))
            if now - oldest.answered < OFFER_SECONDS:
                break
            del self._offers[rid]

    def _release(self, offer: PageOffer) -> None:
        lease, offer.lease = offer.lease, None
        if lease is not None:
            self._client.release_nowait(lease)


def thinned(longest: int) -> list[int]:
    """The longest length, and at most `MOST_LENGTHS` shorter ones at multiples of a power of two: so ranks have a
    length in common even if one has found a little more than another."""
    step = 1 << (longest // MOST_LENGTHS).bit_length()
    return [*range(step, longest, step), longest] if longest else []


def restorable(
    num_pages: int, prefix: int, windows: Mapping[int, Sequence[Sequence[bool] | npt.NDArray[np.bool_]]]
) -> list[int]:
    """Every prefix length, in pages, at which each pool has what a request needs to continue; ascending.

    Args:
        num_pages: number of pages that were looked up.
        prefix: number of pages that the pool of full attention has from the first on.
        windows: for each number of pages that a pool needs at the end of a prefix (1 for a state), the pages that it
            has, for each of its groups. A shorter prefix needs all of its pages.
    """
    lengths = np.arange(1, min(prefix, num_pages) + 1)
    good = np.ones(len(lengths), bool)
    for window, groups in windows.items():
        for found in groups:
            has = np.asarray(found[: len(lengths)], bool)
            # Length of the run of pages that ends at each page.
            last_miss = np.maximum.accumulate(np.where(has, 0, lengths))
            good &= lengths - last_miss >= np.minimum(lengths, window)
    return [int(each) for each in lengths[good]]
