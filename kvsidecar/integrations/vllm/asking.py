"""The scheduler's client, which looks up in the namespace that the ranks store in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvsidecar.client import BreakerState, Client, KeptLease, LookupMode, LookupResult, Namespace, PendingLookup
from kvsidecar.client.results import NO_ANSWER


class RankNamespaceClient:
    """The part of `Client` that `SchedulerSide` uses.

    What the ranks find in their memory is part of the namespace, so they make it, and say it before or with the first
    report that one of them is attached. The namespaces of the calls here only stand for it.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.namespace: Namespace | None = None

    @property
    def epoch(self) -> int:
        return self._client.epoch

    @property
    def hangs(self) -> bool:
        """Whether the daemon has left the last questions without an answer."""
        return self._client.breaker_state is not BreakerState.CLOSED

    def connect(self, timeout: float) -> None:
        """Begin to connect, and wait for that: the first request finds a connection then."""
        self._client.renew(0, 1.0, timeout=timeout)

    def lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes | Sequence[bytes]],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_seconds: float = 0.0,
        timeout: float | None = None,
    ) -> LookupResult:
        if self.namespace is None:
            return LookupResult(False, reason=NO_ANSWER)
        return self._client.lookup(self.namespace, groups, mode=mode, lease_seconds=lease_seconds, timeout=timeout)

    def begin_lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes | Sequence[bytes]],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_seconds: float = 0.0,
    ) -> PendingLookup | None:
        if self.namespace is None:
            return None
        return self._client.begin_lookup(self.namespace, groups, mode=mode, lease_seconds=lease_seconds)

    def keep(self, lease: int, lease_seconds: float) -> KeptLease:
        return self._client.keep(lease, lease_seconds)

    def drop(self, lease: int) -> None:
        self._client.drop(lease)

    def close(self, timeout: float | None = None) -> bool:
        return self._client.close(timeout)
