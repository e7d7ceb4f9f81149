"""Lookups for requests that have just arrived: asked at once, so that no step waits for each of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvsidecar.client.results import GroupHits, LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.integrations.vllm import hits
from kvsidecar.integrations.vllm.asking import Question, SchedulerClient
from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.types import LookupMode

AHEAD_SECONDS = 1.0
"""How long an answer is good for a request that waits for its first step. Its lease outlives it."""
AHEAD_REQUESTS = 64
"""Of more requests that wait, the last are asked for in their steps: their answers would be too old by then."""


@dataclass(frozen=True, slots=True)
class _Asked:
    question: Question
    packed: Mapping[int, bytes]
    end: int
    """Tokens of the request that a hit may cover, the GPU's own among them."""
    since: float


@dataclass(frozen=True, slots=True)
class Behind:
    """What was asked, as if it had been asked for the blocks behind the GPU's own hit only."""

    question: Question
    packed: Mapping[int, bytes]
    first: Mapping[int, int]
    """By group: how many of the blocks asked for the GPU has."""

    def result(self, timeout: float) -> LookupResult:
        """As `Client.lookup`, with flags. Waits at most ``timeout`` seconds."""
        result = self.question.result(timeout)
        flags = {index: GroupHits(0, each.found[self.first[index] :]) for index, each in result.groups.items()}
        return replace(result, groups=flags)


class Ahead:
    """Asks for all blocks of a request, since nobody knows yet how many of them the GPU has.

    Args:
        lease_seconds: of each question.
    """

    def __init__(
        self,
        hash_bytes: int,
        groups: Sequence[Group],
        client: SchedulerClient,
        lease_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._hash_bytes, self._groups, self._client = hash_bytes, groups, client
        self._lease_seconds, self._clock = lease_seconds, clock
        self._asked: dict[str, _Asked] = {}
        """By request, the oldest first."""

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, request: Any) -> None:
        """Ask for a request. Never waits, never raises."""
        if len(self._asked) >= AHEAD_REQUESTS or request.request_id in self._asked:
            return
        end = hits.limit(self._groups, request.num_tokens, 0)
        packed = hits.packed(hits.hashes(self._groups, request.block_hashes, 0, end))
        if not end or not any(packed.values()):
            return
        try:
            # A bitmap tells of each block whether it is there, wherever the GPU's own hit will end.
            question = self._client.begin_lookup(packed, mode=LookupMode.BITMAP, lease_seconds=self._lease_seconds)
        except ClientError:
            return  # the step that asks again says why
        if question is not None:
            self._asked[request.request_id] = _Asked(question, packed, end, self._clock())

    def take(self, request_id: str, local: int, end: int) -> Behind | None:
        """What was asked for a request; None if that was nothing, or is of no use any more.

        Args:
            local: tokens that the GPU has.
            end: tokens that a hit may cover, those among them.
        """
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return None
        if asked.end != end or self._clock() - asked.since >= AHEAD_SECONDS:
            asked.question.give_up()
            return None
        first = {group.index: local // group.block_tokens for group in self._groups}
        packed = {index: hashes[first[index] * self._hash_bytes :] for index, hashes in asked.packed.items()}
        return Behind(asked.question, packed, first)

    def forget(self, request_id: str) -> None:
        if (asked := self._asked.pop(request_id, None)) is not None:
            asked.question.give_up()

    def forget_old(self) -> None:
        """Give up what is too old for the step that would want it."""
        while self._asked:
            request_id, oldest = next(iter(self._asked.items()))
            if self._clock() - oldest.since < AHEAD_SECONDS:
                return
            self.forget(request_id)

    def forget_all(self) -> None:
        for request_id in tuple(self._asked):
            self.forget(request_id)
