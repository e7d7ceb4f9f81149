"""A connector that promises tokens and then loads none of them: for what another one beside it makes of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from tests.vllm.models import BLOCK

LONG = 100
"""Tokens of the shortest request that it promises anything."""


@dataclass
class FailedLoads(KVConnectorMetadata):  # type: ignore[misc, unused-ignore]
    block_ids: frozenset[int]


class FailingConnector(KVConnectorBase_V1):  # type: ignore[misc, unused-ignore]
    """The first load of each long request fails, in the step that computes the rest of its prompt."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._failed: set[str] = set()
        self._first = 0
        """Index of the first block that the last request was promised."""
        self._planned: set[int] = set()
        self._reported: frozenset[int] = frozenset()

    # -- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id in self._failed or request.num_tokens < LONG:
            return 0, False
        self._first = num_computed_tokens // BLOCK
        tokens = (request.num_tokens - 1 - num_computed_tokens) // BLOCK * BLOCK
        return max(0, tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._failed.add(request.request_id)
            (ids,) = blocks.get_block_ids()
            self._planned.update(ids[self._first :][: num_external_tokens // BLOCK])

    def build_connector_meta(self, scheduler_output: Any) -> FailedLoads:
        planned, self._planned = frozenset(self._planned), set()
        return FailedLoads(planned)

    # -- worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._reported |= self._get_connector_metadata().block_ids

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_block_ids_with_load_errors(self) -> Sequence[int] | set[int]:
        reported, self._reported = set(self._reported), frozenset()
        return reported
