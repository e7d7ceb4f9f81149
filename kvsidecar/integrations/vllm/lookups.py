"""The scheduler's lookups: with a time budget per step and a short cache, and without errors in a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from kvsidecar.client import LeaseRenewal
from kvsidecar.client.types import BREAKER_OPEN, DAEMON_LOST, NO_ANSWER, LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.integrations.stored_filter import tags_of
from kvsidecar.integrations.time_limits import in_proportion
from kvsidecar.integrations.vllm import hits
from kvsidecar.integrations.vllm.questions import Question, Questions
from kvsidecar.integrations.vllm.scheduler_client import SchedulerClient
from kvsidecar.integrations.vllm.shared import SchedulerState
from kvsidecar.types import LookupMode

_log = logging.getLogger("kvsidecar.vllm")

Answer = TypeVar("Answer")

REFUSED = "refused"
"""The daemon refuses the lookup as invalid; logged once."""
FRESH_SECONDS = 0.1
"""How long an answer without a lease is reused."""
OFFER_SECONDS = 5.0
"""How long a hit is leased until vLLM allocates blocks for it: longer than a step takes. Released if vLLM does not."""
AGAIN_SECONDS = 0.002
"""Interval of the lookups of a request that waits for blocks from a slower tier; longer, in proportion, for more than
2,048 hashes."""
LEAST_LOOKS = 3
"""How many steps of a request look for an answer before it does without: a step that computes for longer than the
patience does not mean that the daemon is silent."""
UNCLAIMED_SECONDS = 0.5
"""When to release the lease of a request that vLLM does not schedule because others come first."""


@dataclass(slots=True)
class Offer:
    """A hit that was reported to vLLM for a request."""

    local: int
    """Tokens of the request in the GPU's prefix cache at that time."""
    tokens: int
    """Tokens after ``local`` that can be loaded."""
    hashes: Mapping[int, bytes] = field(default_factory=dict)
    """The joined hashes that were looked up, from the first block after ``local``, by group."""
    last: Mapping[int, bytes] = field(default_factory=dict)
    """The hash of the block inside which the hit ends, by group; empty if it ends with a block."""
    answered: float | None = None
    waiting_since: float | None = None
    """Since when its lookup cannot be sent; None if it can."""
    looks: int = 0
    """Steps that have looked for an answer since the last one."""
    looked: float = 0.0
    """Seconds for which these steps have waited."""
    fetched_since: float | None = None
    """Since when the request waits for blocks that the daemon fetches."""
    coming: bool = False
    """Whether the request still waits for them."""
    again: float = 0.0
    """Seconds until it is looked up again while it waits."""
    aim: int = 0
    """Tokens of the hit whose blocks the daemon was last asked to fetch, if the blocks to fetch are chosen."""
    lease: int | None = None
    """Protects the blocks from eviction until they are allocated."""

    @property
    def fresh_seconds(self) -> float:
        """How long the answer is reused: vLLM repeats the lookup in every step while a request waits for blocks."""
        if self.coming:
            return self.again
        return FRESH_SECONDS if self.lease is None else UNCLAIMED_SECONDS


class Lookups:
    """Looks up which blocks of requests the daemon has. A step waits at most ``lookup_budget`` for its lookups.

    A lookup is sent when its request arrives, or by the first step that asks, even if that has no time left to wait for
    the answer. The first step that finds the answer uses it. If there is none, vLLM asks again in the next step, and
    holds the request back until then, at most until the daemon has been silent for ``lookup_patience``, or for longer,
    in proportion, with a long prompt.

    A short lease, one per request, protects each offer from eviction until vLLM has allocated blocks for it.
    """

    def __init__(self, shared: SchedulerState, client: SchedulerClient) -> None:
        self._options, self._groups, self._client = shared.options, shared.engine.groups, client
        self._stored_filter, self._counters = shared.stored_filter, shared.counters
        self._events, self._clock = shared.events, shared.clock
        self._chooses = hits.chooses(self._groups)
        self._offers: dict[str, Offer] = {}
        self._leased: dict[str, float] = {}
        """Requests with a leased offer, and when the lease was taken; the oldest first."""
        self._hash_bytes = shared.engine.hash_bytes
        self._questions = Questions(self._groups, client, OFFER_SECONDS, shared.clock)
        self._waited = self._sending = 0.0
        self.used = False
        """Whether `new_step` has work to do."""
        self._refused = False

    def new_step(self) -> None:
        """Start a step: reset the budget, and release the leases of requests that vLLM did not schedule."""
        began = self._clock()
        self._questions.advance(began + self._options.lookup_budget)
        self._waited, self._sending = 0.0, self._clock() - began
        while self._leased:
            request_id, since = next(iter(self._leased.items()))
            if self._clock() - since < UNCLAIMED_SECONDS:
                break
            self._release_lease(request_id)
        self._questions.cancel_old()
        self.used = bool(self._leased or self._questions)

    def forget(self, request_id: str) -> None:
        self._questions.cancel(request_id)
        self._release_lease(request_id)
        self._offers.pop(request_id, None)

    def forget_all(self) -> None:
        self._questions.cancel_old(0.0)
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
        self._questions.begin_early(request)
        self.used = self.used or bool(self._questions)

    def hit(self, request: Any, local: int, epoch: int) -> int | None:
        """Number of tokens after the first ``local`` that can be loaded; None: not known yet.

        Args:
            epoch: the epoch of the daemon run to which every rank is attached.
        """
        now = self._clock()
        offer = self._offers.get(request.request_id)
        if offer is None or offer.local != local:
            self._release_lease(request.request_id)
            offer = self._offers[request.request_id] = Offer(local, 0)
        elif offer.answered is not None and now - offer.answered < offer.fresh_seconds:
            return None if offer.coming else offer.tokens
        most = hits.limit(self._groups, request.num_tokens, local)
        question = self._questions.find(request, local, most)
        if question is None:
            inside = hits.limit_inside(self._groups, request.num_tokens) - local
            if max(most, inside) > 0 and self._sending >= self._options.lookup_budget:
                return None  # the next step sends it
            question = self._questions.new(request, local, most, local + offer.aim if offer.aim else 0)
            if not question:
                offer.tokens, offer.answered = 0, now
                return 0
            self._questions.keep(request.request_id, question)
        before = self._waited
        self._ask(question, offer, local, most)
        if question.reason == NO_ANSWER:
            offer.looks, offer.looked = offer.looks + 1, offer.looked + self._waited - before
            if question.pending is None and offer.waiting_since is None:
                offer.waiting_since = now
            if self._may_wait(offer, question):
                if question.pending is None:
                    self._questions.remove(request.request_id)  # it was not sent
                return None
            self._questions.cancel(request.request_id)
        else:
            self._questions.remove(request.request_id)
        self._count(question)
        self._release_lease(request.request_id)  # after the lookup, whose lease protects the same blocks
        offer.tokens, offer.answered, offer.waiting_since, offer.last = 0, self._clock(), None, {}
        offer.looks, offer.looked = 0, 0.0
        same_run = self._client.epoch == epoch  # else the answer is of a daemon that may have none of it now
        if not question.reason and question.ready and same_run:
            offer.tokens, offer.last = self._longest(question, local, most)
            offer.hashes = question.packed(local, self._hash_bytes) if offer.tokens else {}
        if question.reason != NO_ANSWER and question.lease is not None:
            offer.lease, self._leased[request.request_id] = question.lease, offer.answered
            if not offer.tokens:
                self._release_lease(request.request_id)
        offer.coming = same_run and self._waits_for_more(offer, question, local, most)
        return None if offer.coming else offer.tokens

    def _ask(self, question: Question, offer: Offer, local: int, most: int) -> None:
        """Continue a question as far as answers have arrived, or arrive within the step's budget. If it is not answered
        by then, its ``reason`` is `NO_ANSWER`, and it may be asked for again."""
        question.reason = ""
        while True:
            if question.pending is not None:
                pending = question.pending
                if not self._within_budget(pending.wait):
                    question.reason = NO_ANSWER
                    return
                self._take(question, pending.result)
            packed = question.next_round(local)
            if not packed:
                return
            aim = local + offer.aim if offer.aim else 0
            arguments = self._questions.arguments(question, aim, max(0, offer.aim - offer.tokens))
            if not self._send(question, packed, arguments):
                # It is not connected, or lost: a call waits for the first connection, and returns the reason.
                self._take(question, partial(self._client.lookup, packed, **arguments))

    def _send(self, question: Question, packed: Mapping[int, bytes], arguments: Mapping[str, Any]) -> bool:
        """Send a round. False: it cannot be sent."""
        self.used = True
        began = self._clock()
        try:
            return self._questions.send(question, packed, arguments)
        except ClientError as error:
            self._refuse(question, error)
            return True
        finally:
            self._sending += self._clock() - began

    def _take(self, question: Question, lookup: Callable[..., LookupResult]) -> None:
        try:
            question.take(self._within_budget(lambda timeout: lookup(timeout=timeout)))
        except ClientError as error:
            self._refuse(question, error)

    def _refuse(self, question: Question, error: ClientError) -> None:
        question.refused(REFUSED)
        if not self._refused:
            _log.error("kvsidecar: the daemon refuses lookups, so nothing is loaded: %s", error)
        self._refused = True
        self._counters.refused_lookups += 1

    def _may_wait(self, offer: Offer, question: Question) -> bool:
        """Whether the request may be held back until a later step. Not if the daemon is silent altogether."""
        since = question.sent if question.pending is not None else offer.waiting_since
        assert since is not None
        patience = in_proportion(self._options.lookup_patience, question.hashes_asked)
        silent = offer.looks >= LEAST_LOOKS and self._clock() - since >= patience
        return not (silent or offer.looked >= patience or self._client.hangs)

    def _count(self, question: Question) -> None:
        self._counters.lookups += 1
        if question.reason in (NO_ANSWER, BREAKER_OPEN, DAEMON_LOST):
            self._counters.unanswered_lookups += 1

    def _waits_for_more(self, offer: Offer, question: Question, local: int, most: int) -> bool:
        """Whether the request waits for blocks that are being fetched from a slower tier, or may be."""
        more = question.coming
        if not more and self._chooses and not question.reason:
            aim = hits.longest_hit(self._groups, question.there(local), local, most)
            aim = max(aim, question.end_inside(later=True)[0] - local)
            more, offer.aim = aim > offer.tokens and aim != offer.aim, aim  # the same again: it has failed to come
        if not more:
            return False
        assert offer.answered is not None
        offer.again = in_proportion(AGAIN_SECONDS, question.hashes_asked)
        if offer.fetched_since is None:
            offer.fetched_since = offer.answered
            self._counters.fetch_waits += 1
        return offer.answered - offer.fetched_since < self._options.fetch_patience

    def _longest(self, question: Question, local: int, most: int) -> tuple[int, Mapping[int, bytes]]:
        """Tokens of the longest hit, and `Offer.last`."""
        for index, missing in question.missing.items():
            # The daemon evicted them, or never had them: they are stored again. (An early answer may be older than a
            # store. The daemon skips the blocks of the second store then.)
            self._stored_filter.discard(tags_of(index, b"".join(missing), len(missing)))
            if self._events is not None:
                self._events.removed(index, missing)
        tokens = hits.longest_hit(self._groups, question.found(local), local, most)
        end, last = question.end_inside()
        if end <= local + tokens:
            last = {}
        tokens = max(tokens, end - local)
        self._counters.offered_tokens += tokens
        return tokens, last

    def renew_lease(self, offer: Offer) -> LeaseRenewal | None:
        """Extend the lease of a taken offer until its load has ended. Does not wait. None: it has no lease."""
        if offer.lease is None:
            self._counters.unleased_loads += 1
            return None
        renewal = self._client.renew_nowait(offer.lease, self._options.lease_seconds)
        self._counters.unleased_loads += not renewal.sent
        return renewal

    def connect(self) -> None:
        """Connect, with an empty lookup: a client that never attaches connects with its first call."""
        question = Question((), None, 0, 0, prefix=True)
        self._take(question, partial(self._client.lookup, {}, mode=LookupMode.PREFIX, lease_seconds=0.0))
        self._count(question)

    def _within_budget(self, wait: Callable[[float], Answer]) -> Answer:
        """Call ``wait`` with the rest of this step's budget as its timeout."""
        self.used = True
        began = self._clock()
        try:
            return wait(max(0.0, self._options.lookup_budget - self._waited))
        finally:
            self._waited += self._clock() - began
