"""The scheduler's lookups: with a time budget per step and a short cache, and without errors in a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsidecar.client import LeaseRenewal
from kvsidecar.client.types import BREAKER_OPEN, DAEMON_LOST, NO_ANSWER, LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.integrations.stored_filter import StoredFilter, tags_of
from kvsidecar.integrations.vllm import hits
from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.early_lookups import EarlyLookups
from kvsidecar.integrations.vllm.events import Events
from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.integrations.vllm.options import Options
from kvsidecar.integrations.vllm.scheduler_client import SchedulerClient
from kvsidecar.types import LookupMode

_log = logging.getLogger("kvsidecar.vllm")

REFUSED = "refused"
"""The daemon refuses the lookup as invalid; logged once."""
FRESH_SECONDS = 0.1
"""How long an answer is reused. vLLM repeats the lookup in every step while a request waits for free blocks."""
OFFER_SECONDS = 2.0
"""Lease of a hit until vLLM allocates blocks for it."""
AGAIN_SECONDS = 0.002
"""Between lookups of a request that waits for blocks from a slower tier."""
UNCLAIMED_SECONDS = 0.5
"""When to release the lease of a request that vLLM does not schedule because others go first."""


@dataclass(slots=True)
class Offer:
    """A hit that was reported to vLLM for a request."""

    local: int
    """Tokens of the request in the GPU's prefix cache at that time."""
    tokens: int
    """Tokens after ``local`` that can be loaded."""
    hashes: Mapping[int, bytes] = field(default_factory=dict)
    """By group: the joined hashes that were looked up, from the first block after ``local``."""
    answered: float | None = None
    waiting_since: float | None = None
    fetched_since: float | None = None
    """Since when the request waits for blocks that the daemon fetches."""
    coming: bool = False
    """It still does."""
    aim: int = 0
    """Tokens of the hit whose blocks the daemon was last asked to fetch, if that is to be chosen."""
    lease: int | None = None
    """Protects the blocks from eviction until they are allocated."""


class Lookups:
    """Looks up which blocks of requests the daemon has. A step waits at most ``lookup_budget`` for its lookups.

    A lookup is sent when its request arrives, and the request's step takes the answer. The step sends a lookup itself
    if there was no early one, or its answer is outdated.

    A short lease, one per request, protects each offer from eviction until vLLM has allocated blocks for it.
    """

    def __init__(
        self,
        options: Options,
        hash_bytes: int,
        groups: Sequence[Group],
        client: SchedulerClient,
        stored_filter: StoredFilter,
        counters: Counters,
        events: Events | None,
        clock: Callable[[], float],
    ) -> None:
        self._options, self._groups, self._client = options, groups, client
        self._stored_filter, self._counters, self._events, self._clock = stored_filter, counters, events, clock
        self._chooses = hits.chooses(groups)
        self._mode = LookupMode.BITMAP if self._chooses else LookupMode.PREFIX
        self._offers: dict[str, Offer] = {}
        self._leased: dict[str, float] = {}
        """Requests with a leased offer, and when the lease was taken; the oldest first."""
        self._early = EarlyLookups(hash_bytes, groups, client, OFFER_SECONDS, clock)
        self._waited = 0.0
        self.used = False
        """Whether `new_step` has work to do."""
        self._refused = False

    def new_step(self) -> None:
        """Start a step: reset the budget, and release the leases of requests that vLLM did not schedule."""
        self._waited = 0.0
        while self._leased:
            request_id, since = next(iter(self._leased.items()))
            if self._clock() - since < UNCLAIMED_SECONDS:
                break
            self._release_lease(request_id)
        self._early.cancel_old()
        self.used = bool(self._leased or self._early)

    def forget(self, request_id: str) -> None:
        self._early.cancel(request_id)
        self._release_lease(request_id)
        self._offers.pop(request_id, None)

    def forget_all(self) -> None:
        self._early.cancel_old(0.0)
        for request_id in tuple(self._leased):
            self._release_lease(request_id)
        self._offers.clear()

    def take(self, request_id: str) -> Offer | None:
        """Remove and return the last offer for this request, because vLLM has allocated its blocks. The caller owns
        the lease: see `renew_lease`."""
        self._leased.pop(request_id, None)
        return self._offers.pop(request_id, None)

    def _release_lease(self, request_id: str) -> None:
        """Release the lease of an offer, if it has one."""
        if self._leased.pop(request_id, None) is None:
            return
        offer = self._offers[request_id]
        lease, offer.lease = offer.lease, None
        if lease is not None:
            self._client.release_nowait(lease)

    def begin_early(self, request: Any) -> None:
        """Send the lookup of a request that has arrived. `hit` takes the answer."""
        self._early.begin(request)
        self.used = self.used or bool(self._early)

    def hit(self, request: Any, local: int, epoch: int) -> int | None:
        """Number of tokens after the first ``local`` that can be loaded; None: not known yet.

        Args:
            epoch: of the daemon run to which every rank is attached.
        """
        now = self._clock()
        offer = self._offers.get(request.request_id)
        if offer is None or offer.local != local:
            self._release_lease(request.request_id)
            offer = self._offers[request.request_id] = Offer(local, 0)
        elif offer.answered is not None and now - offer.answered < (AGAIN_SECONDS if offer.coming else FRESH_SECONDS):
            return None if offer.coming else offer.tokens
        most = hits.limit(self._groups, request.num_tokens, local)
        hashes = hits.hashes(self._groups, request.block_hashes, local, most)
        if most <= 0 or not any(hashes.values()):
            offer.tokens, offer.answered = 0, now
            return 0
        if self._waited >= self._options.lookup_budget:
            return None  # this step has used its budget; the next one looks up
        if (early := self._early.take(request.request_id, local, local + most)) is not None:
            (packed, wait), mode = early, LookupMode.BITMAP
            result = self._within_budget(wait)
        else:
            mode, packed = self._mode, hits.packed(hashes)
            result = self._lookup(packed, mode, OFFER_SECONDS, **self._choice(offer, local, most))
        if result.reason == NO_ANSWER:
            if offer.waiting_since is None:
                offer.waiting_since = now
            if self._clock() - offer.waiting_since < self._options.lookup_patience:
                return None
        self._release_lease(request.request_id)  # after the lookup, whose lease protects the same blocks
        offer.tokens, offer.answered, offer.waiting_since = 0, self._clock(), None
        if not result.reason and result.ready and self._client.epoch == epoch:
            offer.tokens = self._longest(result, mode, hashes, local, most)
            offer.hashes = packed if offer.tokens else {}
        if result.lease is not None:
            offer.lease, self._leased[request.request_id] = result.lease, offer.answered
            if not offer.tokens:
                self._release_lease(request.request_id)
        offer.coming = self._waits_for_more(offer, result, local, most)
        return None if offer.coming else offer.tokens

    def _choice(self, offer: Offer, local: int, most: int) -> dict[str, Any]:
        """What the lookup of a request asks to be fetched."""
        if not self._chooses:
            return {}
        wanted = hits.needed(self._groups, offer.aim, local, most) if offer.aim else {}
        return {"wanted": wanted, "fetch_tokens": max(0, offer.aim - offer.tokens)}

    def _waits_for_more(self, offer: Offer, result: LookupResult, local: int, most: int) -> bool:
        """Whether the request waits for blocks that a slower tier brings, or may bring."""
        more = result.coming
        if not more and self._chooses and not result.reason:
            there = {index: _either(each.found, each.held) for index, each in result.groups.items()}
            aim = hits.longest_hit(self._groups, there, local, most)
            more, offer.aim = aim > offer.tokens and aim != offer.aim, aim  # the same again: it has failed to come
        if not more:
            return False
        assert offer.answered is not None
        if offer.fetched_since is None:
            offer.fetched_since = offer.answered
            self._counters.fetch_waits += 1
        return offer.answered - offer.fetched_since < self._options.fetch_patience

    def _longest(
        self, result: LookupResult, mode: LookupMode, hashes: Mapping[int, Sequence[bytes]], local: int, most: int
    ) -> int:
        found: dict[int, Sequence[bool]] = {}
        for group in self._groups:
            answer = result.groups[group.index]
            looked_up = hashes[group.index]
            if mode is LookupMode.PREFIX:
                found[group.index] = (True,) * answer.hits
                missing: Sequence[bytes] = looked_up[answer.hits :]
            else:
                found[group.index] = answer.found
                missing = [each for each, flag in zip(looked_up, answer.found, strict=True) if not flag]
            if missing:
                # The daemon evicted them, or never had them: they are stored again. (An early answer may be older than
                # a store. The daemon skips the blocks of the second store then.)
                self._stored_filter.discard(tags_of(group.index, b"".join(missing), len(missing)))
                if self._events is not None:
                    self._events.removed(group.index, missing)
        tokens = hits.longest_hit(self._groups, found, local, most)
        self._counters.offered_tokens += tokens
        return tokens

    def renew_lease(self, offer: Offer) -> LeaseRenewal | None:
        """Extend the lease of a taken offer until its load has ended. Does not wait. None: it has no lease."""
        if offer.lease is None:
            self._counters.unleased_loads += 1
            return None
        renewal = self._client.renew_nowait(offer.lease, self._options.lease_seconds)
        self._counters.unleased_loads += not renewal.sent
        return renewal

    def connect(self) -> None:
        """Connect: a client that never attaches connects with its first call."""
        self._lookup({}, LookupMode.PREFIX, 0.0)

    def _lookup(
        self, packed: Mapping[int, bytes], mode: LookupMode, lease_seconds: float, **choice: Any
    ) -> LookupResult:
        def lookup(timeout: float) -> LookupResult:
            return self._client.lookup(packed, mode=mode, lease_seconds=lease_seconds, timeout=timeout, **choice)

        return self._within_budget(lookup)

    def _within_budget(self, lookup: Callable[[float], LookupResult]) -> LookupResult:
        """Call ``lookup`` with the rest of this step's budget as its timeout. Never raises."""
        self.used = True
        began = self._clock()
        timeout = max(0.001, self._options.lookup_budget - self._waited)
        try:
            result = lookup(timeout)
        except ClientError as error:
            if not self._refused:
                _log.error("the daemon refuses lookups, so nothing is loaded: %s", error)
            self._refused = True
            self._counters.refused_lookups += 1
            result = LookupResult(False, reason=REFUSED)
        self._waited += self._clock() - began
        self._counters.lookups += 1
        if result.reason in (NO_ANSWER, BREAKER_OPEN, DAEMON_LOST):
            self._counters.unanswered_lookups += 1
        return result


def _either(found: Sequence[bool], held: Sequence[bool]) -> Sequence[bool]:
    """For each block, whether it can be loaded now, or after a fetch."""
    return [one or other for one, other in zip(found, held, strict=True)] if held else found
