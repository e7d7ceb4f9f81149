"""vLLM offloads its KV cache to the daemon of its node.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVSidecarConnector",
    "kv_connector_module_path": "kvsidecar.integrations.vllm", "kv_role": "kv_both"}'
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsidecar.integrations.vllm.connector import KVSidecarConnector

__all__ = ["KVSidecarConnector", "register"]

CONNECTOR = "KVSidecarConnector"


def register() -> None:
    """Register the connector with vLLM by name. The entry point ``vllm.general_plugins`` calls this in every process of
    the engine. A `MultiConnector` finds the class only by its name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # vLLM loads its plugins more than once
        KVConnectorFactory.register_connector(CONNECTOR, f"{__name__}.connector", CONNECTOR)


def __getattr__(name: str) -> Any:
    # vLLM takes the class from this module; the modules beside it must be importable without vLLM.
    if name == CONNECTOR:
        from kvsidecar.integrations.vllm.connector import KVSidecarConnector

        return KVSidecarConnector
    hint = "" if name.startswith("_") else f"; the connector is named {CONNECTOR}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
