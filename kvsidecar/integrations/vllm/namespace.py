"""Derives what must be equal for two engines to share blocks from vLLM's configuration and the files of its weights.

vLLM's block hashes cover tokens, LoRA, multimodal inputs and the cache salt, but not the model or the layout of its KV.
Only the workers know what their attention backends chose, and loading a model changes their configuration
(``cache_dtype`` becomes "fp8" where it was "auto"). So the workers make the namespace and report it to the scheduler.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvsidecar.integrations.checkpoint import Checkpoint, checkpoint_of
from kvsidecar.integrations.namespace_facts import EngineIdentity, NamespaceFacts, sources
from kvsidecar.integrations.vllm import ignored
from kvsidecar.integrations.vllm.groups import Group

HASH_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
"""Width of vLLM's block hashes by ``prefix_caching_hash_algo``."""

CLASSES = ("model_class_overrides", "worker_cls", "worker_extension_cls", "inductor_passes")
"""Options that name classes and functions, possibly the user's own."""


def identity_of(
    vllm_config: Any,
    groups: Sequence[Group],
    *,
    layout: str,
    facts: Mapping[str, Any],
    fixed_seed: str | None,
    private: str,
    name: str | None = None,
    environment: Mapping[str, str] = os.environ,
    variables: Iterable[str] = (),
) -> EngineIdentity:
    """The identity of an engine.

    Args:
        layout: vLLM's name of the layout.
        facts: what else determines the bytes of a block: version of vLLM, device, backends, shapes.
        fixed_seed: seed of the hashes without PYTHONHASHSEED; None: random for each process.
        private: a text unique to this engine, the same for all of its ranks.
        name: the model's name, for operators and policies; by default derived from the weights.
        variables: environment variables of vLLM that are not called ``VLLM_...``.

    Raises:
        ValueError: the hash algorithm is unknown, or the weights cannot be read.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    hash_bytes = hash_bytes_of(vllm_config)
    seed = environment.get("PYTHONHASHSEED", fixed_seed)
    weights = checkpoint_of(model.model, model.hf_config)
    load_format = getattr(getattr(vllm_config, "load_config", None), "load_format", None)
    known = NamespaceFacts(private)
    known.update(facts)
    known.update({
        "weights": weights.identity,
        "draft weights": _draft_of(vllm_config, weights),
        "seed of random weights": model.seed if load_format == "dummy" else None,
        "PYTHONHASHSEED": "random" if seed is None else seed,
        "KV cache groups": [
            (each.index, each.kind.value, each.block_tokens, each.hash_tokens, each.window, each.eagle)
            for each in groups
        ],
    })  # fmt: skip
    if any(1 < each.replicas < parallel.tensor_parallel_size for each in groups):
        known.update({"ranks that share a head": [(each.index, each.replicas) for each in groups]})
    if getattr(cache, "calculate_kv_scales", False):
        # Found in the engine's first steps, from what these compute: the same KV has other bytes in another run.
        known.update({"KV scales": private})
    _add(known, vllm_config, "vllm_config", "")
    for variable in sorted({*variables, *(each for each in environment if each.startswith("VLLM_"))}):
        if variable in environment and not ignored.variable(variable):
            known.add(variable, environment[variable])
    return known.identity(
        name or weights.name,
        name or getattr(model, "served_model_name", None) or model.model,
        dtype=f"{model.dtype}/{cache.cache_dtype}".replace("torch.", ""),
        kv_layout=layout,
        block_size=groups[0].block_tokens,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        hash_algorithm=cache.prefix_caching_hash_algo,
        hash_bytes=hash_bytes,
    )


def _add(known: NamespaceFacts, config: Any, part: str, prefix: str) -> None:
    """Add every option of a part of the configuration, and of its parts, unless it is known to change nothing."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    for option in [each.name for each in fields] or list(vars(config)):
        if option in ignored.OPTIONS.get(part, ()):
            continue
        value, name = getattr(config, option, None), prefix + option
        if option == "hf_config":
            # It follows from the weights and from options that count. Only a function may do more than its code tells.
            if callable(getattr(config, "hf_overrides", None)):
                known.add(name, value)
        elif option == "max_model_len":
            # The value that the model was constructed with, from which LongRoPE chooses its factors: vLLM shortens it
            # later to what fits into memory if it was asked to find it.
            known.add(name, "auto" if getattr(config, "original_max_model_len", None) == -1 else value)
        elif isinstance(value, SimpleNamespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            _add(known, value, part_of(option), f"{name}.")
        else:
            known.add(name, value)
            if option in CLASSES and value:
                known.add(f"{name} (source)", sources(value))


def part_of(option: str) -> str:
    """The part of `ignored.OPTIONS` that lists which options of this configuration do not count."""
    return option.removeprefix("draft_")


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
