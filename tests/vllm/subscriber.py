"""A router that listens to one vLLM engine."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import KVEventBatch

from tests import router


def events_of(path: str) -> dict[str, Any]:
    """An engine's ``kv_events_config``."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{path}"}


class Subscriber(router.Subscriber):
    def __init__(self, path: str) -> None:
        super().__init__(path, KVEventBatch)
