"""`kvsidecar size` and vLLM agree on the groups of a model and on the bytes of their blocks.

Specs are made of each known model's configuration, as the model's code makes them. Pages, states and groups are vLLM's.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvsidecar.cli.size.kv import ATTENTION_BLOCK, MLA_BLOCK, MLA_STATE_BLOCK, KVKind, kv_of
from kvsidecar.cli.size.models import KNOWN

pytestmark = pytest.mark.older
if not hasattr(kv_cache_utils, "get_kv_cache_groups"):
    pytest.skip("this vLLM groups layers by another function: the older one is asked", allow_module_level=True)
get_kv_cache_groups = kv_cache_utils.get_kv_cache_groups

DTYPE = torch.bfloat16
LAYOUT = SimpleNamespace(is_block_outermost=False)
CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: LAYOUT),
    model_config=SimpleNamespace(),
    speculative_config=None,
    parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    kv_transfer_config=None,
    attention_config=None,
    num_speculative_tokens=0,
)


def attention(config: dict[str, Any], tp: int, block: int, window: int = 0) -> KVCacheSpec:
    if "kv_lora_rank" in config:
        size = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=size, dtype=DTYPE)
    heads = max(1, config["num_key_value_heads"] // tp)  # ModelConfig.get_num_kv_heads
    same = {"block_size": block, "num_kv_heads": heads, "head_size": config["head_dim"], "dtype": DTYPE}
    return SlidingWindowSpec(**same, sliding_window=window, dcp_sharded=False) if window else FullAttentionSpec(**same)


def state(config: dict[str, Any], tp: int, block: int, padded: int | None) -> MambaSpec:
    if linear := config.get("linear_attn_config"):
        kernel = linear["short_conv_kernel_size"]
        shapes = MambaStateShapeCalculator.kda_state_shape(
            tp, linear["num_heads"], linear["head_dim"], conv_kernel_size=kernel
        )
        dtypes = MambaStateDtypeCalculator.kda_state_dtype(DTYPE, "auto")
    else:
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp,
            config["linear_num_key_heads"],
            config["linear_num_value_heads"],
            config["linear_key_head_dim"],
            config["linear_value_head_dim"],
            config["linear_conv_kernel_dim"],
        )
        dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(DTYPE, "auto", "auto")
    return MambaSpec(block_size=block, shapes=tuple(shapes), dtypes=dtypes, page_size_padded=padded)


def block_of(config: dict[str, Any], tp: int) -> int:
    """As `Platform._align_hybrid_block_size` makes it, for FlashAttention and FlashMLA."""
    block = MLA_BLOCK if "kv_lora_rank" in config else ATTENTION_BLOCK
    if "linear_attn_config" not in config and "linear_num_value_heads" not in config:
        return block
    step = MLA_STATE_BLOCK if "kv_lora_rank" in config else block
    one_token = attention(config, tp, 1).page_size_bytes
    return step * math.ceil(state(config, tp, -1, None).page_size_bytes / (step * one_token))


def specs_of(config: dict[str, Any], tp: int) -> dict[str, KVCacheSpec]:
    block = block_of(config, tp)
    full = attention(config, tp, block)
    specs: dict[str, KVCacheSpec] = {}
    if linear := config.get("linear_attn_config"):
        states = set(linear["kda_layers"])
        assert states.isdisjoint(linear["full_attn_layers"])
        assert len(states) + len(linear["full_attn_layers"]) == config["num_hidden_layers"]
    for layer in range(config["num_hidden_layers"]):
        window = 0
        is_state = linear and layer + 1 in states
        if every := config.get("full_attention_interval"):
            is_state = (layer + 1) % every != 0
        if types := config.get("layer_types"):
            window = config["sliding_window"] if types[layer] == "sliding_attention" else 0
        elif every := config.get("sliding_window_pattern"):
            window = config["sliding_window"] if (layer + 1) % every else 0
        specs[f"layers.{layer}"] = (
            state(config, tp, block, full.page_size_bytes) if is_state else attention(config, tp, block, window)
        )
        if "index_topk" in config:
            key = config["index_head_dim"]
            specs[f"layers.{layer}.indexer"] = MLAAttentionSpec(
                block_size=block, num_kv_heads=1, head_size=key + key // 128 * 4, dtype=torch.uint8
            )
    return specs


def block_bytes(spec: KVCacheSpec, layers: int) -> int:
    """That the connector stores: without padding."""
    if isinstance(spec, MambaSpec):
        assert spec.state_content_size_bytes <= spec.page_size_bytes
        return spec.state_content_size_bytes * layers
    return spec.page_size_bytes * (1 if isinstance(spec, UniformTypeKVCacheSpecs) else layers)


KINDS = ((SlidingWindowSpec, KVKind.WINDOW), (MambaSpec, KVKind.STATE), (KVCacheSpec, KVKind.FULL))


@pytest.mark.parametrize("model", KNOWN)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_groups_and_their_bytes_are_those_of_vllm(model: str, tp: int) -> None:
    config = KNOWN[model]
    groups = get_kv_cache_groups(CONFIG, specs_of(config, tp))
    theirs = [
        (
            next(kind for spec, kind in KINDS if isinstance(each.kv_cache_spec, spec)),
            each.kv_cache_spec.block_size,
            block_bytes(each.kv_cache_spec, len(each.layer_names)),
        )
        for each in groups
    ]
    ours = [(each.kind, each.block_tokens, each.layers * each.page_bytes) for each in kv_of(config, tp=tp).groups]
    assert sorted(ours) == sorted(theirs)


def test_of_a_window_vllm_keeps_the_blocks_that_a_hit_needs() -> None:
    (group, window) = kv_of(KNOWN["gpt-oss-120b"]).groups
    spec = attention(KNOWN["gpt-oss-120b"], 1, window.block_tokens, window.window)
    mask = SlidingWindowManager.reachable_block_mask(
        0, 100, window.block_tokens, spec, use_eagle=False, retention_interval=0, reachable_boundaries=[1600]
    )
    assert mask is not None
    assert sum(mask) == window.blocks_of(1600, 0)
    assert group.blocks_of(1600, 0) == 100
