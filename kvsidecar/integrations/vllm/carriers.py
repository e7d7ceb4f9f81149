"""vLLM's base classes around `metadata`, which vLLM carries between the scheduler and the workers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvsidecar.client import Namespace
from kvsidecar.integrations.vllm.metadata import RankReport, StepOrders


@dataclass(frozen=True)
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """`StepOrders` as vLLM carries them."""

    step: StepOrders | None
    """None: `metadata.NOTHING`. vLLM pickles it for each worker process."""


NO_ORDERS = Orders(None)


@dataclass(frozen=True)
class Reports(KVConnectorWorkerMetadata, KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """`RankReport` as vLLM carries it, in a step and once at the start."""

    report: RankReport
    namespaces: frozenset[Namespace]
    """That ranks store in; said at the start and whenever a rank attaches."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Reports:
        assert isinstance(other, Reports)
        return Reports(self.report.merged(other.report), self.namespaces | other.namespaces)
