"""vLLM offloads its KV cache to the daemon of its node.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVSidecarConnector",
    "kv_connector_module_path": "kvsidecar.integrations.vllm", "kv_role": "kv_both"}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsidecar.integrations.vllm.plugin import CONNECTOR, register

if TYPE_CHECKING:
    from kvsidecar.integrations.vllm.connector import KVSidecarConnector

__all__ = ["KVSidecarConnector", "register"]


def __getattr__(name: str) -> Any:
    # vLLM takes the class from this module; the modules beside it must be importable without vLLM.
    if name == CONNECTOR:
        from kvsidecar.integrations.vllm.connector import KVSidecarConnector

        return KVSidecarConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
