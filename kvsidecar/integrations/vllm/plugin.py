"""Makes the connector known to vLLM."""

from __future__ import annotations

import contextlib

CONNECTOR = "KVSidecarConnector"


def register() -> None:
    """Make the connector known to vLLM by its name: the entry point ``vllm.general_plugins`` calls this in every
    process of the engine. Inside a `MultiConnector` the name is the only way to the class."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # vLLM loads its plugins more than once: it is known already
        KVConnectorFactory.register_connector(CONNECTOR, f"{__package__}.connector", CONNECTOR)
