"""Derives what must be equal for two engines to share blocks from SGLang's arguments and the files of its weights.

SGLang's page hashes cover tokens, ``extra_key`` (with the LoRA adapter) and ``cache_salt``, but neither the model nor
its KV layout.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvsidecar.integrations.checkpoint import checkpoint_of
from kvsidecar.integrations.namespace_facts import EngineIdentity, NamespaceFacts, sources
from kvsidecar.integrations.sglang import ignored
from kvsidecar.integrations.sglang.groups import Groups
from kvsidecar.integrations.sglang.transfers import HASH_BYTES


def identity_of(
    server_args: Any,
    groups: Groups,
    *,
    hf_config: Any,
    page_size: int,
    tp_size: int,
    is_eagle: bool,
    facts: Mapping[str, Any],
    private: str,
    name: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> EngineIdentity:
    """The identity of an engine.

    Args:
        is_eagle: whether pages are hashed by pairs of tokens.
        facts: what else determines the bytes of a block: version of SGLang, device, pools, shapes.
        private: a text unique to this engine, the same for all of its ranks.
        name: the model's name, for operators and policies; by default derived from the weights.

    Raises:
        ValueError: the weights cannot be read.
    """
    weights = checkpoint_of(server_args.model_path, hf_config)
    draft = argument(server_args, "speculative_draft_model_path")
    dummy = argument(server_args, "load_format") == "dummy"
    known = NamespaceFacts(private)
    known.update(facts)
    known.update({
        "weights": weights.identity,
        "draft weights": checkpoint_of(draft, None).identity if draft else None,
        "seed of random weights": argument(server_args, "random_seed") if dummy else None,
        "pairs of tokens": is_eagle,
        "KV cache groups": [(each.pool, each.layers, each.replicated) for each in groups.all],
    })  # fmt: skip
    if any(each.ranks_per_head > 1 for each in groups.all):
        known.update({"ranks that share a head": [(each.pool, each.ranks_per_head) for each in groups.all]})
    for each in arguments(server_args):
        if each not in ignored.ARGUMENTS:
            known.add(each, argument(server_args, each))
    if loaders := argument(server_args, "custom_weight_loader"):
        known.add("custom_weight_loader (source)", sources(loaders))
    for variable in sorted(environment):
        if variable.startswith("SGLANG_") and not ignored.variable(variable):
            known.add(variable, environment[variable])
    return known.identity(
        name or weights.name,
        name or argument(server_args, "served_model_name") or server_args.model_path,
        dtype=f"{server_args.dtype}/{getattr(server_args, 'kv_cache_dtype', None) or 'auto'}",
        kv_layout="sglang pages",
        block_size=page_size,
        tp_size=tp_size,
        pp_size=1,
        hash_algorithm="sglang sha256",
        hash_bytes=HASH_BYTES,
    )


def kept_beside_kv(server_args: Any) -> str | None:
    """The command-line option, if this engine has one, with which SGLang keeps data of each computed token besides its
    KV. A linker does not get that data, so the slots that it loads would keep that of earlier tokens.
    """
    for name, off in ignored.KEPT_BESIDE_KV.items():
        if (argument(server_args, name) or off) != off:
            return "--" + name.replace("_", "-")
    return None


def arguments(server_args: Any) -> Sequence[str]:
    """The names of all arguments."""
    if (names := getattr(server_args, "__struct_fields__", None)) is not None:
        return tuple(names)
    if dataclasses.is_dataclass(server_args):
        return [each.name for each in dataclasses.fields(server_args)]
    return list(vars(server_args))


def argument(server_args: Any, name: str) -> Any:
    """The value of an argument, or the one that SGLang has chosen if the choice was left to it."""
    # Later versions keep their choices beside what was asked for.
    overrides = sys.modules.get("sglang.srt.arg_groups.overrides")
    resolve = getattr(overrides, "resolution_result", None)
    return getattr(server_args, name, None) if resolve is None else resolve(server_args, name)
