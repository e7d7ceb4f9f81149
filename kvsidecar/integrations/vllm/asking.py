"""The scheduler's client: it asks in the ranks' namespace, for the keys of the engine's generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvsidecar.client import BreakerState, LookupMode, LookupResult, Namespace
from kvsidecar.client.results import NO_ANSWER
from kvsidecar.integrations.generations import Generations


class Question(Protocol):
    """The part of `kvsidecar.client.PendingLookup` that is used."""

    def result(self, timeout: float) -> LookupResult: ...
    def give_up(self) -> None: ...


class Lease(Protocol):
    """The part of `kvsidecar.client.KeptLease` that is used."""

    @property
    def asked(self) -> bool: ...
    @property
    def kept(self) -> bool | None: ...

    def release(self) -> None: ...


class Asked(Protocol):
    """The part of `kvsidecar.client.Client` that is used."""

    @property
    def epoch(self) -> int: ...
    @property
    def breaker_state(self) -> BreakerState: ...

    def lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes],
        *,
        mode: LookupMode,
        lease_seconds: float,
        timeout: float | None,
    ) -> LookupResult: ...
    def begin_lookup(
        self, namespace: Namespace, groups: Mapping[int, bytes], *, mode: LookupMode, lease_seconds: float
    ) -> Question | None: ...
    def renew(self, lease: int, lease_seconds: float, *, timeout: float | None) -> float: ...
    def keep(self, lease: int, lease_seconds: float) -> Lease: ...
    def drop(self, lease: int) -> None: ...
    def close(self, timeout: float | None = None) -> bool: ...


class SchedulerClient:
    """Asks ``client`` for block hashes.

    The namespace contains what the ranks find in their memory, so they make it and report it before, or together with,
    the first report that one of them is attached. Until then no lookup is sent.
    """

    def __init__(self, client: Asked, generations: Generations) -> None:
        self._client, self._generations = client, generations
        self.namespace: Namespace | None = None

    @property
    def epoch(self) -> int:
        return self._client.epoch

    @property
    def hangs(self) -> bool:
        """Whether the daemon has left the last lookups unanswered."""
        return self._client.breaker_state is not BreakerState.CLOSED

    def connect(self, timeout: float) -> None:
        """Connect, so that the first request finds a connection. Waits at most ``timeout`` seconds."""
        self._client.renew(0, 1.0, timeout=timeout)

    def lookup(
        self, groups: Mapping[int, bytes], *, mode: LookupMode, lease_seconds: float, timeout: float
    ) -> LookupResult:
        if self.namespace is None:
            return LookupResult(False, reason=NO_ANSWER)
        keys = self._keys(groups)
        return self._client.lookup(self.namespace, keys, mode=mode, lease_seconds=lease_seconds, timeout=timeout)

    def begin_lookup(self, groups: Mapping[int, bytes], *, mode: LookupMode, lease_seconds: float) -> Question | None:
        """Send a lookup. None: it cannot be sent at once."""
        if self.namespace is None:
            return None
        return self._client.begin_lookup(self.namespace, self._keys(groups), mode=mode, lease_seconds=lease_seconds)

    def keep(self, lease: int, lease_seconds: float) -> Lease:
        return self._client.keep(lease, lease_seconds)

    def drop(self, lease: int) -> None:
        self._client.drop(lease)

    def close(self) -> None:
        self._client.close()

    def _keys(self, groups: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return {index: self._generations.keys(hashes) for index, hashes in groups.items()}
