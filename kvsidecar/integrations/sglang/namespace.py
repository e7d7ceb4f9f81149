"""What must be equal for two engines to share blocks, from SGLang's arguments and the files of its weights.

SGLang's page hashes cover tokens, ``extra_key`` (with the LoRA adapter) and ``cache_salt``, and nothing of the model or
its KV layout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from kvsidecar.integrations.checkpoint import checkpoint_of, plain
from kvsidecar.integrations.sglang.groups import Groups
from kvsidecar.integrations.sglang.transfers import HASH_BYTES
from kvsidecar.types import Namespace

FIELDS = (
    "revision", "quantization", "quantization_param_path", "dtype", "kv_cache_dtype", "json_model_override_args",
    "model_impl", "load_format", "attention_backend", "prefill_attention_backend", "decode_attention_backend",
    "speculative_algorithm", "speculative_draft_model_revision", "speculative_draft_model_quantization",
    "enable_dp_attention", "mamba_ssm_dtype",
)  # fmt: skip
"""SGLang's arguments that determine the bytes of a block. Null in versions that lack them."""


def namespace_of(
    server_args: Any,
    groups: Groups,
    *,
    hf_config: Any,
    page_size: int,
    tp_size: int,
    is_eagle: bool,
    facts: Sequence[str],
    name: str | None = None,
) -> Namespace:
    """
    Args:
        is_eagle: whether pages are hashed by pairs of tokens.
        facts: what else determines the bytes of a block: version of SGLang, device, pools, shapes.
        name: of the model, for operators and policies; by default derived from the weights.

    Raises:
        ValueError: the weights cannot be read.
    """
    weights = checkpoint_of(server_args.model_path, hf_config)
    draft = getattr(server_args, "speculative_draft_model_path", None)
    model = name or weights.name
    everything = {
        "checkpoint": weights.identity,
        "draft_checkpoint": checkpoint_of(draft, None).identity if draft else None,
        "random_weights": server_args.random_seed if server_args.load_format == "dummy" else None,
        "eagle": is_eagle,
        "groups": [(each.pool, each.layers, each.replicated) for each in groups.all],
        "facts": list(facts),
        "arguments": {name: plain(getattr(server_args, name, None)) for name in FIELDS},
    }
    return Namespace(
        model=model if len(model) <= 200 else hashlib.sha256(model.encode()).hexdigest(),
        dtype=f"{server_args.dtype}/{getattr(server_args, 'kv_cache_dtype', None) or 'auto'}",
        kv_layout="sglang pages",
        block_size=page_size,
        tp_size=tp_size,
        pp_size=1,
        hash_algorithm="sglang sha256",
        hash_bytes=HASH_BYTES,
        extra=hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest(),
    )
