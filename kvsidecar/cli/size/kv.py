"""How large a model's KV is: its KV cache groups, as vLLM makes them of the model's ``config.json``.

The formulas are those of vLLM 0.32:

- a page of attention, of MLA and of a state: ``page_size_bytes`` of the specs in ``vllm/v1/kv_cache_interface.py``;
- the parts of a state: ``MambaStateShapeCalculator`` in ``vllm/model_executor/layers/mamba/mamba_utils.py``;
- the block of a model with states: ``Platform._align_hybrid_block_size`` in ``vllm/platforms/interface.py``;
- which layers make up a group: ``_get_kv_cache_groups_uniform_page_size`` in ``vllm/v1/core/kv_cache_utils.py``;
- which blocks of a prompt are kept: ``reachable_block_mask`` in ``vllm/v1/core/single_type_kv_cache_manager.py``.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvsidecar.errors import KVSidecarError


class BadModel(KVSidecarError):
    """The size of a model's KV cannot be computed; the text says what is missing."""


class KVKind(StrEnum):
    FULL = "full"
    """Every block of a prompt."""
    WINDOW = "window"
    """The blocks of the last tokens of a prompt (sliding window, chunked attention)."""
    STATE = "state"
    """One block at the end of a prompt (Mamba, linear attention)."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV cache group."""

    kind: KVKind
    layers: int
    page_bytes: int
    """One layer's block on one rank, without the padding of states, which is not stored."""
    shards: int
    """Ranks that store a part of each block of their own: 1 for MLA, which is equal on all ranks, and of attention not
    more than there are KV heads."""
    block_tokens: int
    window: int = 0
    """Tokens of the window; `KVKind.WINDOW` only."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, in all layers and on all ranks."""
        return self.layers * self.page_bytes * self.shards

    def blocks_of(self, tokens: int, retention: int | None) -> int:
        """Blocks that a prompt leaves.

        Args:
            retention: vLLM's ``--prefix-cache-retention-interval``: 0 keeps what windows and states need at the end of
                a prompt; a larger number also what they need after each multiple of it; None, as before vLLM 0.32, all.
        """
        whole = tokens // self.block_tokens
        if self.kind is KVKind.FULL or retention is None:
            return whole
        need = 1 if self.kind is KVKind.STATE else -(-(self.window - 1) // self.block_tokens)
        ends = 1 + (tokens // retention if retention else 0)
        return min(whole, need * ends)


@dataclass(frozen=True, slots=True)
class KV:
    """The KV of a model, on the ranks of one engine."""

    groups: tuple[KVGroup, ...]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block in the groups that keep every block, or in the first group if there is none."""
        return next(
            (each.block_tokens for each in self.groups if each.kind is KVKind.FULL), self.groups[0].block_tokens
        )

    @property
    def token_bytes(self) -> float:
        """Bytes that one more token of context takes."""
        return sum(each.block_bytes / each.block_tokens for each in self.groups if each.kind is KVKind.FULL)

    @property
    def largest_shard(self) -> int:
        """Bytes of the largest shard: the daemon keeps each rank's part of a block in one slot."""
        return max(each.layers * each.page_bytes for each in self.groups)

    def blocks(self, tokens: int, retention: int | None = 0) -> int:
        """Blocks that a prompt leaves, in all groups."""
        return sum(each.blocks_of(tokens, retention) for each in self.groups)

    def nbytes(self, tokens: int, retention: int | None = 0) -> int:
        """Bytes that a prompt takes in the pool: those of its full blocks."""
        return sum(each.blocks_of(tokens, retention) * each.block_bytes for each in self.groups)


ATTENTION_BLOCK: Final = 16
"""vLLM's default block, tokens; FlashAttention's smallest kernel block, too."""
MLA_BLOCK: Final = 64
"""FlashMLA's block, tokens."""
MLA_STATE_BLOCK: Final = 128
"""Tokens of which the block of a model with MLA and states is a multiple."""
SPARSE_FP8_BYTES: Final = 656
"""A token of DeepSeek's sparse MLA in FP8: 512 values, 4 scales, and 64 values in bfloat16."""
INDEXER_QUANT: Final = 128
"""Values for each scale of 4 bytes in the indexer's keys, of one byte each."""

_DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
_KINDS: Final = {
    "full_attention": KVKind.FULL,
    "attention": KVKind.FULL,
    "indexed_attention": KVKind.FULL,
    "sliding_attention": KVKind.WINDOW,
    "chunked_attention": KVKind.WINDOW,
    "linear_attention": KVKind.STATE,
    "mamba": KVKind.STATE,
    "mamba2": KVKind.STATE,
}
_NO_KV: Final = frozenset({"moe", "mlp"})
"""Layers without attention."""
_UNKNOWN_CACHES: Final = (
    "compress_ratios",
    "compress_rates",
    "global_head_dim",
    "num_global_key_value_heads",
    "cross_attention_layers",
)
"""Fields of models whose caches are built in ways that are not computed here."""


class _Fields:
    """Fields of a configuration."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def number(self, *names: str) -> int:
        """The first of these fields that exists: a whole number above 0."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadModel(f"the model's config.json has {name} = {value!r}, which is not a whole number above 0")
            return value
        more = f" (nor {', '.join(names[1:])})" if names[1:] else ""
        raise BadModel(f"the model's config.json has no {names[0]}{more}, which the size of its KV depends on")


def kv_of(config: dict[str, Any], *, tp: int = 1, fp8: bool = False, block_tokens: int | None = None) -> KV:
    """The KV of a model on ``tp`` tensor-parallel ranks.

    Args:
        fp8: ``--kv-cache-dtype fp8``; otherwise the KV has the model's type.
        block_tokens: ``--block-size``; None: vLLM's default.

    Raises:
        BadModel: a field is missing or wrong, or the model has caches of another kind.
    """
    texts = [config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), dict)]
    fields = _Fields({**config, **(texts[0] if texts else {})})
    if odd := next((name for name in _UNKNOWN_CACHES if fields.has(name)), ""):
        raise BadModel(
            f"the model's config.json has {odd}: its caches differ from layer to layer in a way that this "
            "command cannot compute. Run an engine with a daemon, and use --running"
        )
    if shared := fields.get("num_kv_shared_layers"):
        raise BadModel(
            f"{shared} layers use the KV of others (num_kv_shared_layers), which this command cannot compute: use "
            "--running"
        )
    kinds = _kinds(fields)
    dtype_bytes = _dtype_bytes(fields)
    counts = {kind: kinds.count(kind) for kind in KVKind}
    value_bytes = 1 if fp8 else dtype_bytes
    mla = fields.has("kv_lora_rank")
    if not counts[KVKind.FULL] and not counts[KVKind.WINDOW]:
        raise BadModel(
            "the model has no attention layer: vLLM caches no prefixes of it, so there is nothing to offload"
        )
    if mla and counts[KVKind.WINDOW]:
        raise BadModel("the model has MLA and windows, whose caches this command cannot compute: use --running")
    token_bytes = _mla_token(fields, value_bytes, fp8) if mla else _gqa_token(fields, value_bytes, tp)
    tokens = block_tokens or (MLA_BLOCK if mla else ATTENTION_BLOCK)
    state_bytes = 0
    if counts[KVKind.STATE]:
        state_bytes = _state_bytes(fields, tp, dtype_bytes)
        step = max(tokens, MLA_STATE_BLOCK if mla else ATTENTION_BLOCK)
        tokens = max(tokens, step * math.ceil(state_bytes / (step * token_bytes)))
    page, shards = tokens * token_bytes, 1 if mla else min(tp, _kv_heads(fields))
    window = fields.number("sliding_window", "attention_chunk_size") if counts[KVKind.WINDOW] else 0
    of_group = {
        KVKind.FULL: (page, shards, 0),
        KVKind.WINDOW: (page, shards, window),
        KVKind.STATE: (state_bytes, tp, 0),
    }
    groups = []
    for kind, layers in zip(counts, _split(list(counts.values())), strict=True):
        nbytes, parts, size = of_group[kind]
        groups += [KVGroup(kind, each, nbytes, parts, tokens, size) for each in layers]
    return KV(tuple(groups))


def _kinds(fields: _Fields) -> list[KVKind]:
    """The kind of each layer that has KV."""
    if (linear := fields.get("linear_attn_config")) is not None and isinstance(linear, dict):
        full, states = linear.get("full_attn_layers"), linear.get("kda_layers")
        if not isinstance(full, list) or not isinstance(states, list):
            raise BadModel("the model's linear_attn_config has no full_attn_layers or kda_layers")
        return [KVKind.FULL] * len(full) + [KVKind.STATE] * len(states)
    if isinstance(pattern := fields.get("hybrid_override_pattern"), str):
        return [{"*": KVKind.FULL, "M": KVKind.STATE}[each] for each in pattern if each in "*M"]
    named = fields.get("layer_types") or fields.get("layers_block_type")
    if isinstance(named, list) and named:
        if unknown := [each for each in named if each not in _KINDS and each not in _NO_KV]:
            raise BadModel(
                f"the model has layers of the type {unknown[0]!r}, whose KV this command cannot compute: use --running"
            )
        return [_KINDS[each] for each in named if each in _KINDS]
    layers = fields.number("num_hidden_layers", "n_layer", "num_layers")
    if fields.has("linear_num_value_heads"):
        every = fields.number("full_attention_interval")
        return [KVKind.STATE if (layer + 1) % every else KVKind.FULL for layer in range(layers)]
    if fields.has("mamba_num_heads") or fields.has("ssm_state_size") or fields.has("mamba_d_state"):
        raise BadModel("the model has states, but neither layer_types nor hybrid_override_pattern says which layers")
    if fields.has("sliding_window") and fields.get("use_sliding_window") is not False:
        if fields.has("sliding_window_pattern") or fields.has("_sliding_window_pattern"):
            every = fields.number("sliding_window_pattern", "_sliding_window_pattern")
            return [KVKind.WINDOW if (layer + 1) % every else KVKind.FULL for layer in range(layers)]
        return [KVKind.WINDOW] * layers
    if fields.has("attention_chunk_size"):  # Llama 4: layers without positions attend to all
        every = fields.number("no_rope_layer_interval")
        return [KVKind.WINDOW if (layer + 1) % every else KVKind.FULL for layer in range(layers)]
    return [KVKind.FULL] * layers


def _dtype_bytes(fields: _Fields) -> int:
    name = fields.get("dtype") or fields.get("torch_dtype")
    if name is None:
        return 2  # vLLM loads such a model in 16 bits
    if str(name).removeprefix("torch.") not in _DTYPE_BYTES:
        raise BadModel(f"the model's config.json has dtype = {name!r}: known are {', '.join(_DTYPE_BYTES)}")
    size = _DTYPE_BYTES[str(name).removeprefix("torch.")]
    return 2 if size == 4 else size  # vLLM's "auto" loads float32 in 16 bits


def _kv_heads(fields: _Fields) -> int:
    return fields.number("num_key_value_heads", "num_attention_heads", "n_head")


def _gqa_token(fields: _Fields, value_bytes: int, tp: int) -> int:
    """K and V of one token on one rank and in one layer."""
    heads = _kv_heads(fields)
    if heads % tp and tp % heads:
        raise BadModel(f"{heads} KV heads cannot be divided over --tp {tp}")
    if fields.has("head_dim"):
        size = fields.number("head_dim")
    else:
        hidden, of = fields.number("hidden_size", "n_embd"), fields.number("num_attention_heads", "n_head")
        if hidden % of:
            raise BadModel(
                f"the model's config.json has no head_dim, and hidden_size {hidden} is not a multiple of {of} heads"
            )
        size = hidden // of
    return 2 * max(1, heads // tp) * size * value_bytes


def _mla_token(fields: _Fields, value_bytes: int, fp8: bool) -> int:
    """The latent vector of one token in one layer, and the indexer's key."""
    latent = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim")
    if not fields.has("index_topk"):
        return latent * value_bytes
    key = fields.number("index_head_dim")
    return (SPARSE_FP8_BYTES if fp8 else latent * value_bytes) + key + key // INDEXER_QUANT * 4


def _state_bytes(fields: _Fields, tp: int, dtype_bytes: int) -> int:
    """One layer's state on one rank."""

    def part(number: int, what: str) -> int:
        if number % tp:
            raise BadModel(f"{number} {what} cannot be divided over --tp {tp}")
        return number // tp

    linear = fields.get("linear_attn_config")
    if isinstance(linear, dict):  # Kimi's delta attention: the state is in float32
        inner = _Fields(linear)
        heads, size = inner.number("num_heads"), inner.number("head_dim")
        kernel = inner.number("short_conv_kernel_size")
        conv = (kernel - 1) * part(3 * heads * size, "channels") * dtype_bytes
        return conv + part(heads, "heads") * size * size * 4
    if fields.has("linear_num_value_heads"):  # gated delta net
        values, keys = fields.number("linear_num_value_heads"), fields.number("linear_num_key_heads")
        value_dim, key_dim = fields.number("linear_value_head_dim"), fields.number("linear_key_head_dim")
        channels = 2 * key_dim * keys + value_dim * values
        conv = (fields.number("linear_conv_kernel_dim") - 1) * part(channels, "channels") * dtype_bytes
        bytes_of_state = _DTYPE_BYTES.get(str(fields.get("mamba_ssm_dtype")), dtype_bytes)
        return conv + part(values, "value heads") * value_dim * key_dim * bytes_of_state
    if fields.has("mamba_num_heads"):  # Mamba 2
        heads, size = fields.number("mamba_num_heads"), fields.number("mamba_head_dim")
        groups, state = fields.number("n_groups"), fields.number("ssm_state_size")
        groups += tp - groups if groups % tp else 0
        conv = (fields.number("conv_kernel") - 1) * part(heads * size + 2 * groups * state, "channels") * dtype_bytes
        bytes_of_state = _DTYPE_BYTES.get(str(fields.get("mamba_ssm_cache_dtype") or "float32"), 4)
        return conv + part(heads, "heads") * size * state * bytes_of_state
    raise BadModel(
        "the model has states of a kind that this command does not know (known: linear_attn_config, "
        "linear_num_value_heads, mamba_num_heads): use --running"
    )


def _split(counts: Sequence[int]) -> list[list[int]]:
    """The layers of each kind by group. A group has as many layers as the kind with the fewest, or, if all kinds have
    nearly as many, as the kind with the most."""
    there = [number for number in counts if number]
    least, most = min(there), max(there)
    size = most if most < least * 1.5 else least
    found = []
    for number in counts:
        groups = -(-number // size)
        found.append([len(range(each, number, groups)) for each in range(groups)])
    return found
