"""A connector of vLLM that does nothing: an engine with it pays what vLLM itself spends on having a connector."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class EmptyConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Offers no hit, stores no block."""

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """As this project's connector has it, so that the KV cache has the same layout."""
        return True

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None: ...
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
