"""The scheduler's lookups: within a time budget per step, cached for a moment, and never an error of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsidecar.client.results import BREAKER_OPEN, DAEMON_LOST, NO_ANSWER, LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.integrations.vllm import hits
from kvsidecar.integrations.vllm.ahead import Ahead
from kvsidecar.integrations.vllm.asking import Lease, SchedulerClient
from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.events import Events
from kvsidecar.integrations.vllm.groups import Group, Kind
from kvsidecar.integrations.vllm.options import Options
from kvsidecar.integrations.vllm.stored_filter import StoredFilter, tags_of
from kvsidecar.types import LookupMode

_log = logging.getLogger("kvsidecar.vllm")

REFUSED = "refused"
"""The daemon refuses the lookup as invalid; this is logged once."""
FRESH_SECONDS = 0.1
"""How long an answer is reused. vLLM asks again in every step for a request that waits for free blocks."""
OFFER_SECONDS = 2.0
"""Lease of a hit until vLLM allocates blocks for it, or until the engine stalls."""
UNTAKEN_SECONDS = 0.5
"""The lease of a request that vLLM no longer asks for, because others go first, is dropped after this time."""


@dataclass(slots=True)
class Offer:
    """The hit that was offered to vLLM for a request."""

    local: int
    """Tokens that the request had in the GPU's prefix cache at that time."""
    tokens: int
    """Tokens after these that can be loaded."""
    asked: Mapping[int, bytes] = field(default_factory=dict)
    """By group: the joined hashes that were looked up, from the first block after ``local`` on."""
    answered: float | None = None
    waiting_since: float | None = None
    lease: int | None = None
    """Protects these blocks from eviction for a moment."""


class Lookups:
    """Looks up which blocks of requests the daemon has. All calls of one step together wait at most ``lookup_budget``.

    A request that arrives is asked for at once, and its answer taken in the step that wants it: the step then waits
    for what is still under way, or not at all. Where nothing was asked ahead, or the answer is too old, it asks itself.

    A short lease protects each offer from eviction until vLLM has allocated blocks for it. There is one lease per
    request, for as long as vLLM asks for that request.
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
        self._mode = LookupMode.PREFIX if all(g.kind is Kind.FULL for g in groups) else LookupMode.BITMAP
        self._offers: dict[str, Offer] = {}
        self._leased: dict[str, float] = {}
        """Requests whose offers have leases, and since when; the oldest first."""
        self._ahead = Ahead(hash_bytes, groups, client, OFFER_SECONDS, clock)
        self._spent = 0.0
        self.used = False
        """Whether `new_step` has work to do."""
        self._refused = False

    def new_step(self) -> None:
        """Start a step: refill the budget, and drop leases that vLLM no longer asks for."""
        self._spent = 0.0
        while self._leased:
            request_id, since = next(iter(self._leased.items()))
            if self._clock() - since < UNTAKEN_SECONDS:
                break
            self._give_up(request_id)
        self._ahead.forget_old()
        self.used = bool(self._leased or self._ahead)

    def forget(self, request_id: str) -> None:
        self._ahead.forget(request_id)
        self._give_up(request_id)
        self._offers.pop(request_id, None)

    def forget_all(self) -> None:
        self._ahead.forget_all()
        for request_id in tuple(self._leased):
            self._give_up(request_id)
        self._offers.clear()

    def take(self, request_id: str) -> Offer | None:
        """Remove and return the last offer for this request, because vLLM has allocated its blocks. The caller owns
        the lease: see `keep`."""
        self._leased.pop(request_id, None)
        return self._offers.pop(request_id, None)

    def _give_up(self, request_id: str) -> None:
        """Drop the lease of an offer, if it has one."""
        if self._leased.pop(request_id, None) is None:
            return
        offer = self._offers[request_id]
        lease, offer.lease = offer.lease, None
        if lease is not None:
            self._client.drop(lease)

    def ask_ahead(self, request: Any) -> None:
        """Ask for a request that has arrived, and do not wait for the answer: `hit` takes it."""
        self._ahead.ask(request)
        self.used = self.used or bool(self._ahead)

    def hit(self, request: Any, local: int, epoch: int) -> int | None:
        """Number of tokens after the first ``local`` ones that can be loaded; None: not known yet.

        Args:
            epoch: of the daemon run that every rank is attached to.
        """
        now = self._clock()
        offer = self._offers.get(request.request_id)
        if offer is None or offer.local != local:
            self._give_up(request.request_id)
            offer = self._offers[request.request_id] = Offer(local, 0)
        elif offer.answered is not None and now - offer.answered < FRESH_SECONDS:
            return offer.tokens
        most = hits.limit(self._groups, request.num_tokens, local)
        hashes = hits.hashes(self._groups, request.block_hashes, local, most)
        if most <= 0 or not any(hashes.values()):
            offer.tokens, offer.answered = 0, now
            return 0
        if self._spent >= self._options.lookup_budget:
            return None  # this step has waited long enough; the next one asks
        ahead = self._ahead.take(request.request_id, local, local + most)
        mode = self._mode if ahead is None else LookupMode.BITMAP
        packed = hits.packed(hashes) if ahead is None else ahead.packed
        result = self._ask(packed, mode, OFFER_SECONDS) if ahead is None else self._within_budget(ahead.result)
        if result.reason == NO_ANSWER:
            if offer.waiting_since is None:
                offer.waiting_since = now
            if self._clock() - offer.waiting_since < self._options.lookup_patience:
                return None
        self._give_up(request.request_id)  # behind the lookup: blocks that were kept are kept by its lease
        offer.tokens, offer.answered, offer.waiting_since = 0, self._clock(), None
        if not result.reason and result.ready and self._client.epoch == epoch:
            offer.tokens = self._longest(result, mode, hashes, local, most)
            offer.asked = packed if offer.tokens else {}
        if result.lease is not None:
            offer.lease, self._leased[request.request_id] = result.lease, offer.answered
            if not offer.tokens:
                self._give_up(request.request_id)
        return offer.tokens

    def _longest(
        self, result: LookupResult, mode: LookupMode, hashes: Mapping[int, Sequence[bytes]], local: int, most: int
    ) -> int:
        found: dict[int, Sequence[bool]] = {}
        for group in self._groups:
            answer = result.groups[group.index]
            asked = hashes[group.index]
            if mode is LookupMode.PREFIX:
                found[group.index] = (True,) * answer.hits
                missing: Sequence[bytes] = asked[answer.hits :]
            else:
                found[group.index] = answer.found
                missing = [each for each, flag in zip(asked, answer.found, strict=True) if not flag]
            if missing:
                # The daemon evicted them, or never had them: they are stored again. (An answer that was asked for ahead
                # may be older than a store; the daemon then skips the blocks of the second one.)
                self._stored_filter.discard(tags_of(group.index, b"".join(missing), len(missing)))
                if self._events is not None:
                    self._events.removed(group.index, missing)
        tokens = hits.longest_hit(self._groups, found, local, most)
        self._counters.offered_tokens += tokens
        return tokens

    def keep(self, offer: Offer) -> Lease | None:
        """Extend the lease of a taken offer to the time that a load may take. Does not wait. None: it has no lease."""
        lease = None if offer.lease is None else self._client.keep(offer.lease, self._options.lease_seconds)
        self._counters.unleased_loads += lease is None or not lease.asked
        return lease

    def connect(self) -> None:
        """Connect: a client that only looks up connects with its first call."""
        self._ask({}, LookupMode.PREFIX, 0.0)

    def _ask(self, packed: Mapping[int, bytes], mode: LookupMode, lease_seconds: float) -> LookupResult:
        """One lookup, in the step that wants it."""

        def lookup(timeout: float) -> LookupResult:
            return self._client.lookup(packed, mode=mode, lease_seconds=lease_seconds, timeout=timeout)

        return self._within_budget(lookup)

    def _within_budget(self, ask: Callable[[float], LookupResult]) -> LookupResult:
        """An answer that a step wants. Never raises, never waits longer than the rest of this step's budget."""
        self.used = True
        began = self._clock()
        timeout = max(0.001, self._options.lookup_budget - self._spent)
        try:
            result = ask(timeout)
        except ClientError as error:
            if not self._refused:
                _log.error("the daemon refuses lookups, so nothing is loaded: %s", error)
            self._refused = True
            self._counters.refused_lookups += 1
            result = LookupResult(False, reason=REFUSED)
        self._spent += self._clock() - began
        self._counters.lookups += 1
        if result.reason in (NO_ANSWER, BREAKER_OPEN, DAEMON_LOST):
            self._counters.unanswered_lookups += 1
        return result
