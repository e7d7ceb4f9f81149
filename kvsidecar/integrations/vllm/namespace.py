"""What must be equal for two engines to share blocks, from vLLM's configuration and the files of its weights.

vLLM's block hashes cover tokens, LoRA, multimodal inputs and the cache salt; nothing of the model or of how its KV lies
in memory. Only the workers know what their attention backends chose, and loading a model changes their configuration
(``cache_dtype`` is "fp8" then where it was "auto"). So they make the namespace, and the scheduler's side learns it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.integrations.weights import digest_of, hub_snapshot
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
"""Fields of vLLM's configuration that decide what the bytes of a block are. Those that a version lacks are null."""

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
        facts: whatever else the bytes of a block follow from: version of vLLM, device, backends, shapes.
        fixed_seed: what the hashes begin with where the environment gives no seed; None: a random one per process.
        name: of the model, for operators and policies; by default it follows from the weights.

    Raises:
        ValueError: the hash algorithm is not one that is known, or the weights cannot be read.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    hash_bytes = hash_bytes_of(vllm_config)
    seed = environment.get("PYTHONHASHSEED", fixed_seed)
    load_format = _plain(getattr(getattr(vllm_config, "load_config", None), "load_format", None))
    weights = checkpoint_of(model.model, model.hf_config)
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
            part: {name: _plain(getattr(getattr(vllm_config, part, None), name, None)) for name in names}
            for part, names in FIELDS.items()
        },
        "variables": {name: environment.get(name) for name in VARIABLES},
    }
    return Namespace(
        model=_short(name or weights.name),
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
    """Bytes of a block hash. Raises ValueError: the hash algorithm is not one that is known."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASH_BYTES:
        raise ValueError(f"prefix_caching_hash_algo {algorithm!r} is not one of {', '.join(HASH_BYTES)}")
    return HASH_BYTES[algorithm]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Which weights a model's name or path stands for."""

    name: str
    """For people, and the same for the same weights."""
    identity: str


def checkpoint_of(model: str, hf_config: Any) -> Checkpoint:
    """A hub's model is its name and commit, which is what its files contain; also as a directory of the hub's cache.
    Other directories and files are what is in them, wherever they lie. Weights from elsewhere are the model's name.

    Raises:
        ValueError: the files cannot be read.
    """
    try:
        if (snapshot := hub_snapshot(model)) is not None:
            return Checkpoint(snapshot[0], repr(snapshot))
        if os.path.exists(model):  # False, and no error, for what cannot be a path
            if (digest := digest_of(model)) is not None:
                kind = (getattr(hf_config, "architectures", None) or ["model"])[0]
                return Checkpoint(f"{kind}-{digest[:12]}", digest)
            return Checkpoint(model, _listing_of(model))
    except OSError as error:
        raise ValueError(f"the weights of {model} cannot be identified: {error}") from error
    return Checkpoint(model, repr((model, getattr(hf_config, "_commit_hash", None))))


def _listing_of(model: str) -> str:
    """The listing of a directory without weights, which may be rewritten."""
    found = [(each.name, each.stat()) for each in Path(model).iterdir() if each.is_file()]
    return repr((model, sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)))


def _draft_of(vllm_config: Any, weights: Checkpoint) -> str | None:
    """The weights of the draft model, which has layers of the KV cache, too."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return getattr(speculative, "model", None)
    if draft.model == vllm_config.model_config.model:
        return weights.identity
    return checkpoint_of(draft.model, draft.hf_config).identity


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
