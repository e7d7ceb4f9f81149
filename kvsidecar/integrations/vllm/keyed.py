"""A client that translates the scheduler's block hashes into the keys of the engine's generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from kvsidecar.client import LookupMode, LookupResult, Namespace
from kvsidecar.integrations.generations import Generations
from kvsidecar.integrations.vllm.ahead import Question
from kvsidecar.integrations.vllm.lookups import Asked, Lease
from kvsidecar.integrations.vllm.metadata import LoadJob, StoreJob

AnyJob = TypeVar("AnyJob", StoreJob, LoadJob)


class KeyedClient:
    """Calls ``client`` with keys instead of hashes."""

    def __init__(self, client: Asked, generations: Generations) -> None:
        self._client, self._generations = client, generations

    @property
    def epoch(self) -> int:
        return self._client.epoch

    @property
    def hangs(self) -> bool:
        return self._client.hangs

    def lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_seconds: float = 0.0,
        timeout: float | None = None,
    ) -> LookupResult:
        keys = self._keys(groups)
        return self._client.lookup(namespace, keys, mode=mode, lease_seconds=lease_seconds, timeout=timeout)

    def begin_lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_seconds: float = 0.0,
    ) -> Question | None:
        return self._client.begin_lookup(namespace, self._keys(groups), mode=mode, lease_seconds=lease_seconds)

    def keep(self, lease: int, lease_seconds: float) -> Lease:
        return self._client.keep(lease, lease_seconds)

    def drop(self, lease: int) -> None:
        self._client.drop(lease)

    def _keys(self, groups: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return {index: self._generations.keys(hashes) for index, hashes in groups.items()}

    def close(self, timeout: float | None = None) -> bool:
        return self._client.close(timeout)


def keyed(jobs: Sequence[AnyJob], generations: Generations) -> tuple[AnyJob, ...]:
    """The jobs as the ranks are told of them."""
    if generations.first:
        return tuple(jobs)
    return tuple(
        replace(job, blocks=tuple(replace(each, hashes=generations.keys(each.hashes)) for each in job.blocks))
        for job in jobs
    )
