"""Notices that SGLang releases the memory of its KV cache (``release_memory_occupation`` with its memory saver).

SGLang does not report it to a linker. ``resume_memory_occupation`` provides other memory at the same addresses: the
memory that the daemon has mapped would no longer be the engine's, and none of it would be free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvsidecar.integrations.wrapping import End, wrap

KV_CACHE: Final = "kv_cache"
"""SGLang's tag of the memory of the KV cache; no tag stands for all."""
RELEASE: Final = "release_memory_occupation"


def watch(updater: Any, releasing: Callable[[], None]) -> End:
    """Call ``releasing`` before memory of the KV cache is released from now on.

    Args:
        updater: SGLang's class that releases memory for the scheduler.
    """

    def release(original: Callable[..., Any], self: Any, request: Any) -> Any:
        tags = request.tags
        # Without the memory saver nothing is released.
        if self.memory_saver_adapter.enabled and (not tags or KV_CACHE in tags):
            releasing()
        return original(self, request)

    return wrap(updater, RELEASE, release) if hasattr(updater, RELEASE) else lambda: None
