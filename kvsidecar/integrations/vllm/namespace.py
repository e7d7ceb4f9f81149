"""What must be equal for two engines to share blocks, from vLLM's configuration and the files of its weights.

vLLM's block hashes cover tokens, LoRA, multimodal inputs and the cache salt, but not the model or the layout of its KV.
Only the workers know what their attention backends chose, and loading a model changes their configuration
(``cache_dtype`` becomes "fp8" where it was "auto"). So the workers make the namespace and report it to the scheduler.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvsidecar.integrations.checkpoint import Checkpoint, checkpoint_of, plain
from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.types import Namespace

HASH_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
"""Width of vLLM's block hashes by ``prefix_caching_hash_algo``."""

FIELDS = {
    "model_config": (
        "revision", "code_revision", "quantization", "hf_overrides", "hf_config_path", "model_impl",
        "model_weights", "disable_sliding_window",
    ),
    "load_config": ("model_loader_extra_config",),
    "cache_config": (
        "kv_cache_dtype_skip_layers", "calculate_kv_scales", "mamba_cache_dtype", "mamba_ssm_cache_dtype",
        "mamba_cache_mode", "use_replayssm",
    ),
    "parallel_config": (
        "prefill_context_parallel_size", "decode_context_parallel_size", "dcp_kv_cache_interleave_size",
        "cp_kv_cache_interleave_size",
    ),
    "speculative_config": ("method", "revision", "quantization", "num_speculative_tokens"),
}  # fmt: skip
"""Fields of vLLM's configuration that determine the bytes of a block. Null in versions that lack them."""

VARIABLES = ("VLLM_PP_LAYER_PARTITION",)


def namespace_of(
    vllm_config: Any,
    groups: Sequence[Group],
    *,
    layout: str,
    facts: Sequence[str],
    fixed_seed: str | None,
    name: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Namespace:
    """
    Args:
        layout: vLLM's name of the layout.
        facts: what else determines the bytes of a block: version of vLLM, device, backends, shapes.
        fixed_seed: seed of the hashes without PYTHONHASHSEED; None: random for each process.
        name: of the model, for operators and policies; by default derived from the weights.

    Raises:
        ValueError: the hash algorithm is unknown, or the weights cannot be read.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    hash_bytes = hash_bytes_of(vllm_config)
    seed = environment.get("PYTHONHASHSEED", fixed_seed)
    load_format = plain(getattr(getattr(vllm_config, "load_config", None), "load_format", None))
    weights = checkpoint_of(model.model, model.hf_config)
    model_name = name or weights.name
    everything = {
        "checkpoint": weights.identity,
        "draft_checkpoint": _draft_of(vllm_config, weights),
        "random_weights": model.seed if load_format == "dummy" else None,
        "hash_seed": "random" if seed is None else seed,
        "groups": [
            (each.index, each.kind.value, each.block_tokens, each.hash_tokens, each.window, each.eagle)
            for each in groups
        ],
        "facts": list(facts),
        "config": {
            part: {name: plain(getattr(getattr(vllm_config, part, None), name, None)) for name in names}
            for part, names in FIELDS.items()
        },
        "variables": {name: environment.get(name) for name in VARIABLES},
    }
    return Namespace(
        model=model_name if len(model_name) <= 200 else hashlib.sha256(model_name.encode()).hexdigest(),
        dtype=f"{model.dtype}/{cache.cache_dtype}".replace("torch.", ""),
        kv_layout=layout,
        block_size=groups[0].block_tokens,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        hash_algorithm=cache.prefix_caching_hash_algo,
        hash_bytes=hash_bytes,
        extra=hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest(),
    )


def hash_bytes_of(vllm_config: Any) -> int:
    """Bytes of a block hash. Raises ValueError if the hash algorithm is unknown."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASH_BYTES:
        raise ValueError(f"prefix_caching_hash_algo {algorithm!r} is not one of {', '.join(HASH_BYTES)}")
    return HASH_BYTES[algorithm]


def _draft_of(vllm_config: Any, weights: Checkpoint) -> str | None:
    """The identity of the draft model, which also has layers of the KV cache."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return getattr(speculative, "model", None)
    if draft.model == vllm_config.model_config.model:
        return weights.identity
    return checkpoint_of(draft.model, draft.hf_config).identity
