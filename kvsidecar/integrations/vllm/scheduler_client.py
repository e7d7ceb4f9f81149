"""The scheduler's client: makes lookups in the ranks' namespace, for the keys of the current version of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsidecar.client import BreakerState, Client, LeaseRenewal, LookupResult, Namespace, PendingLookup
from kvsidecar.client.types import NO_ANSWER
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.integrations.weights_version import WeightsVersion


class SchedulerClient:
    """Converts block hashes to keys for ``client``.

    Only the ranks know the namespace, which depends on their memory. They report it no later than the first attachment;
    until then no lookup is sent.
    """

    def __init__(self, client: Client, weights_version: WeightsVersion, options: ConnectorOptions) -> None:
        self._client, self._weights_version = client, weights_version
        self._fetch: dict[str, Any] = {"fetch_seconds": options.fetch_patience, "prefill_rate": options.prefill_rate}
        self.namespace: Namespace | None = None

    @property
    def epoch(self) -> int:
        return self._client.epoch

    @property
    def hangs(self) -> bool:
        """Whether the daemon has left the last lookups unanswered."""
        return self._client.breaker_state is not BreakerState.CLOSED

    def connect(self, timeout: float) -> None:
        """Connect before the first request. Waits at most ``timeout`` seconds."""
        self._client.renew(0, 1.0, timeout=timeout)

    def lookup(self, groups: Mapping[int, bytes], **arguments: Any) -> LookupResult:
        """See `Client.lookup`."""
        if self.namespace is None:
            return LookupResult(False, reason=NO_ANSWER)
        return self._client.lookup(self.namespace, self._keys(groups), **arguments, **self._fetch)

    def begin_lookup(self, groups: Mapping[int, bytes], **arguments: Any) -> PendingLookup | None:
        """See `Client.begin_lookup`. None: it cannot be sent."""
        if self.namespace is None:
            return None
        return self._client.begin_lookup(self.namespace, self._keys(groups), **arguments, **self._fetch)

    def touch_nowait(self, groups: Mapping[int, bytes], pause: float | None) -> bool:
        """See `Client.touch_nowait`."""
        return self.namespace is not None and self._client.touch_nowait(self.namespace, self._keys(groups), pause)

    def report_prompts_nowait(self, needed_tokens: int, loaded_tokens: int) -> bool:
        """See `Client.report_prompts_nowait`."""
        return self.namespace is not None and self._client.report_prompts_nowait(
            self.namespace, needed_tokens, loaded_tokens
        )

    def renew_nowait(self, lease: int, lease_seconds: float) -> LeaseRenewal:
        return self._client.renew_nowait(lease, lease_seconds)

    def release_nowait(self, lease: int) -> None:
        self._client.release_nowait(lease)

    def close(self) -> None:
        self._client.close()

    def _keys(self, groups: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return {index: self._weights_version.keys(hashes) for index, hashes in groups.items()}
