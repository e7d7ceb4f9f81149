"""A router that listens to one vLLM engine, and runs of engines for it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import KVEventBatch

from tests import router
from tests.vllm.engine import Prompt


def events_of(path: str) -> dict[str, Any]:
    """An engine's ``kv_events_config``."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{path}"}


class Subscriber(router.Subscriber):
    def __init__(self, path: str) -> None:
        super().__init__(path, KVEventBatch)


OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The engine's core sleeps in a process of its own while it has nothing to do."""

FEW = {"num_gpu_blocks_override": 34}
"""Blocks of 32 tokens on the GPU: two prompts of 600 tokens evict each other."""


def whole_blocks(of: Prompt) -> set[tuple[int, ...]]:
    return {of.ids[i : i + 32] for i in range(0, len(of.ids) // 32 * 32, 32)}
