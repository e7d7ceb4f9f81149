"""A second connector for MultiConnector: only one of its children may bring the memory of the KV cache."""

from __future__ import annotations

from kvsidecar.integrations.vllm import KVSidecarConnector


class SecondConnector(KVSidecarConnector):  # type: ignore[misc, valid-type, unused-ignore]
    def get_mem_pool_context(self) -> None:
        return None
