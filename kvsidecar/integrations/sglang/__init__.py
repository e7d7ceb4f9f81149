"""SGLang offloads its KV cache to the daemon of its node.

python -m sglang.launch_server --model-path MODEL --enable-unified-cache-external-linker \\
    --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config \\
    '{"linker": "KVSidecarLinker", "linker_module_path": "kvsidecar.integrations.sglang"}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsidecar.integrations.sglang.linker import KVSidecarLinker

__all__ = ["KVSidecarLinker"]


def __getattr__(name: str) -> Any:
    # SGLang takes the class from this module; the modules beside it must be importable without SGLang.
    if name == "KVSidecarLinker":
        from kvsidecar.integrations.sglang.linker import KVSidecarLinker

        return KVSidecarLinker
    hint = "" if name.startswith("_") else "; the linker is named KVSidecarLinker"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
