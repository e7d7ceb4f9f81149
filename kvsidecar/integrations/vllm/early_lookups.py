"""Lookups that are sent when a request arrives, so that its first step need not wait for the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvsidecar.client import PendingLookup
from kvsidecar.client.types import GroupHits, LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.integrations.vllm import hits
from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.integrations.vllm.scheduler_client import SchedulerClient
from kvsidecar.types import LookupMode

EARLY_SECONDS = 1.0
"""How long an answer stays valid for a request that waits for its first step. Its lease lasts longer."""
EARLY_REQUESTS = 64
"""Most early lookups at a time. The answers of more requests would be too old when their steps come."""


@dataclass(frozen=True, slots=True)
class _EarlyLookup:
    pending: PendingLookup
    packed: Mapping[int, bytes]
    end: int
    """Most tokens of the request that the GPU's prefix and a hit may cover together."""
    since: float


class EarlyLookups:
    """Looks up all blocks of a request, because it is not known yet how many of them the GPU has.

    Args:
        lease_seconds: of each lookup.
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
        self._wanted: Mapping[int, Sequence[bool]] | None = {} if hits.chooses(groups) else None
        """Nothing yet: what the tier holds decides it."""
        self._lookups: dict[str, _EarlyLookup] = {}
        """By request, the oldest first."""

    def __len__(self) -> int:
        return len(self._lookups)

    def begin(self, request: Any) -> None:
        """Send the lookup of a request. Never waits, never raises."""
        if len(self._lookups) >= EARLY_REQUESTS or request.request_id in self._lookups:
            return
        end = hits.limit(self._groups, request.num_tokens, 0)
        packed = hits.packed(hits.hashes(self._groups, request.block_hashes, 0, end))
        if not end or not any(packed.values()):
            return
        try:
            # A bitmap has an answer for each block, wherever the GPU's own prefix will end.
            pending = self._client.begin_lookup(
                packed, mode=LookupMode.BITMAP, lease_seconds=self._lease_seconds, wanted=self._wanted
            )
        except ClientError:
            return  # the request's step looks it up again, and logs the error
        if pending is not None:
            self._lookups[request.request_id] = _EarlyLookup(pending, packed, end, self._clock())

    def take(
        self, request_id: str, local: int, end: int
    ) -> tuple[Mapping[int, bytes], Callable[[float], LookupResult]] | None:
        """Remove the lookup of a request.

        Args:
            local: tokens that the GPU has.
            end: most tokens that the GPU's prefix and a hit may cover together.

        Returns:
            The hashes after the GPU's own prefix, and a function that waits for their bitmap, at most so many seconds;
            None if there is no lookup, or it is outdated.
        """
        early = self._lookups.pop(request_id, None)
        if early is None:
            return None
        if early.end != end or self._clock() - early.since >= EARLY_SECONDS:
            early.pending.cancel()
            return None
        first = {group.index: local // group.block_tokens for group in self._groups}
        packed = {index: hashes[first[index] * self._hash_bytes :] for index, hashes in early.packed.items()}

        def result(timeout: float) -> LookupResult:
            result = early.pending.result(timeout)
            groups = {
                index: GroupHits(0, each.found[first[index] :], each.coming, each.held[first[index] :])
                for index, each in result.groups.items()
            }
            return replace(result, groups=groups)

        return packed, result

    def cancel(self, request_id: str) -> None:
        if (early := self._lookups.pop(request_id, None)) is not None:
            early.pending.cancel()

    def cancel_old(self, age: float = EARLY_SECONDS) -> None:
        """Cancel the lookups of at least this age, in seconds."""
        while self._lookups:
            request_id, oldest = next(iter(self._lookups.items()))
            if self._clock() - oldest.since < age:
                return
            self.cancel(request_id)
