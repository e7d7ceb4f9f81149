"""What must be equal for two engines to share blocks, from vLLM's configuration. Pure.

vLLM's block hashes cover tokens, LoRA, multimodal inputs and the cache salt; nothing of the model or of how its KV lies
in memory. Only the workers know what their attention backends chose, and loading a model changes their configuration
(``cache_dtype`` is "fp8" then where it was "auto"). So they make the namespace, and the scheduler's side learns it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.types import Namespace

HASH_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
"""Width of vLLM's block hashes by ``prefix_caching_hash_algo``."""

FIELDS = {
    "model_config": (
        "revision", "code_revision", "quantization", "hf_overrides", "model_impl", "disable_sliding_window",
    ),
    "cache_config": (
        "kv_cache_dtype_skip_layers", "calculate_kv_scales", "mamba_cache_dtype", "mamba_ssm_cache_dtype",
        "mamba_cache_mode", "use_replayssm",
    ),
    "parallel_config": (
        "prefill_context_parallel_size", "decode_context_parallel_size", "dcp_kv_cache_interleave_size",
        "cp_kv_cache_interleave_size",
    ),
    "speculative_config": ("method", "model", "revision", "quantization", "num_speculative_tokens"),
}  # fmt: skip
"""Fields of vLLM's configuration that decide what the bytes of a block are. Those that a version lacks are null."""

VARIABLES = ("VLLM_PP_LAYER_PARTITION",)


def namespace_of(
    vllm_config: Any,
    groups: Sequence[Group],
    *,
    layout: str,
    facts: Sequence[str],
    fixed_seed: str | None,
    environment: Mapping[str, str] = os.environ,
) -> Namespace:
    """
    Args:
        layout: vLLM's name of the layout.
        facts: whatever else the bytes of a block follow from: version of vLLM, device, backends, shapes.
        fixed_seed: what the hashes begin with where the environment gives no seed; None: a random one per process.

    Raises:
        ValueError: the hash algorithm is not one that is known.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in HASH_BYTES:
        raise ValueError(f"prefix_caching_hash_algo {algorithm!r} is not one of {', '.join(HASH_BYTES)}")
    seed = environment.get("PYTHONHASHSEED", fixed_seed)
    load_format = _plain(getattr(getattr(vllm_config, "load_config", None), "load_format", None))
    everything = {
        "checkpoint": checkpoint_of(model.model, getattr(model.hf_config, "_commit_hash", None)),
        "random_weights": model.seed if load_format == "dummy" else None,
        "hash_seed": "random" if seed is None else seed,
        "groups": [
            (each.index, each.kind.value, each.block_tokens, each.hash_tokens, each.window, each.eagle)
            for each in groups
        ],
        "facts": list(facts),
        "config": {
            part: {name: _plain(getattr(getattr(vllm_config, part, None), name, None)) for name in names}
            for part, names in FIELDS.items()
        },
        "variables": {name: environment.get(name) for name in VARIABLES},
    }
    return Namespace(
        model=_short(model.model),
        dtype=f"{model.dtype}/{cache.cache_dtype}".replace("torch.", ""),
        kv_layout=layout,
        block_size=groups[0].block_tokens,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        hash_algorithm=algorithm,
        hash_bytes=HASH_BYTES[algorithm],
        extra=hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest(),
    )


def checkpoint_of(model: str, commit: str | None) -> str:
    """Which weights a model's name stands for: the commit of a hub's, names, sizes and times of a directory's files.

    A directory may be written anew with other weights of the same shape.
    """
    if not os.path.isdir(model):  # False, and no error, for what cannot be a path
        return commit or ""
    # What links point to: a hub's cache has links to files that never change.
    found = [(each.name, each.stat()) for each in Path(model).iterdir() if each.is_file() and each.suffix != ".md"]
    return repr(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))


def _short(model: str) -> str:
    return model if len(model) <= 200 else hashlib.sha256(model.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """The value as JSON knows it, the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(each) for each in value)
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return str(value)  # enums and dtypes; an object's address would differ
