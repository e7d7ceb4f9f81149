"""An engine's KV cache groups. Pure: vLLM's spec classes are identified by the names in their MRO, because its versions
have different ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsidecar.integrations.kv_heads import kv_heads_of, ranks_per_head


class GroupKind(StrEnum):
    """The kind of a group: which blocks of a prefix it needs to continue after it."""

    FULL = "full"
    """Every block of the prefix (full attention, MLA)."""
    SLIDING_WINDOW = "sliding_window"
    """The blocks of the last ``window - 1`` tokens."""
    CHUNKED_LOCAL = "chunked_local"
    """The blocks of the last, incomplete chunk of ``window`` tokens."""
    STATE = "state"
    """Only the last block: it holds the state after the last token (Mamba)."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group that is offloaded."""

    index: int
    """vLLM's index of the group; also the daemon's."""
    kind: GroupKind
    layer_names: tuple[str, ...]
    block_tokens: int
    """Tokens per block, of all decode-context-parallel ranks together."""
    hash_tokens: int
    """Tokens per hash of ``request.block_hashes``. A block's hash is that of its last tokens."""
    alignment: int
    """Hits end at a multiple of this many tokens: a multiple of every group's block, the same for all groups."""
    window: int = 0
    """Tokens that vLLM keeps; sliding window and chunked local only."""
    eagle: bool = False
    """The draft head's KV depends on the next token: a hit must be followed by one more readable block."""
    grain: int = 0
    """Hits may also end inside a block, at a multiple of this many tokens (``--prefix-match-unit``); 0: they may not.
    The same for all groups, whose blocks then have one size."""
    lag_tokens: int = 0
    """Number of last computed tokens whose KV the draft model may still overwrite."""
    replicas: int = 1
    """How many consecutive tensor-parallel ranks hold the same KV: all of them with MLA, and those that share a head if
    there are fewer heads than ranks."""
    page_bytes: int = 0
    """Bytes of one layer's block on one rank; of all layers, if they differ."""
    spec: str = ""
    """Class name of vLLM's spec."""

    @property
    def hashes_per_block(self) -> int:
        return self.block_tokens // self.hash_tokens

    @property
    def chained(self) -> bool:
        """Whether a hit needs every block of the prefix."""
        return self.kind is GroupKind.FULL

    @property
    def most_needed(self) -> int:
        """The most blocks of a prefix that a request needs to continue after it, with the one that `eagle` asks for; 0:
        every block."""
        if self.chained:
            return 0
        return -(-self.window // self.block_tokens) + 1 + self.eagle if self.window else 1

    def first_needed(self, tokens: int) -> int:
        """Index of the first block that a request needs to continue after a prefix of ``tokens`` tokens.

        vLLM has null blocks before it. It caches the blocks from it on, so all of those must be loaded.
        """
        first: int = self._first_needed(tokens)
        return max(0, first)

    def first_needed_of(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The result of `first_needed` for each number."""
        first: npt.NDArray[np.int64] = np.maximum(0, self._first_needed(tokens))
        return first

    def _first_needed(self, tokens: Any) -> Any:
        """Like `first_needed`, but below 0 where the first block is meant."""
        if self.kind is GroupKind.SLIDING_WINDOW:
            return (tokens - self.window + 1) // self.block_tokens
        if self.kind is GroupKind.CHUNKED_LOCAL:
            return tokens // self.window * self.window // self.block_tokens
        if self.kind is GroupKind.STATE:
            return (tokens - 1) // self.block_tokens
        return tokens * 0

    def hashes(self, block_hashes: Sequence[bytes], first: int, end: int) -> Sequence[bytes]:
        """The hashes of blocks ``first`` to ``end`` (exclusive) from a request's hashes, as far as it has them."""
        per_block = self.hashes_per_block
        if per_block == 1:
            return block_hashes[first:end]
        return block_hashes[(first + 1) * per_block - 1 : end * per_block : per_block]


_KINDS = (
    # The first name that a class or one of its bases has decides.
    ("SinkFullAttentionSpec", None),
    ("RSWASpec", None),
    ("SlidingWindowSpec", GroupKind.SLIDING_WINDOW),
    ("ChunkedLocalAttentionSpec", GroupKind.CHUNKED_LOCAL),
    ("MambaSpec", GroupKind.STATE),
    ("FullAttentionSpec", GroupKind.FULL),
)


def _resolve(kv_cache_config: Any, vllm_config: Any) -> tuple[int, int]:
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(scheduler_tokens), int(hash_tokens)


def groups_of(
    kv_cache_config: Any, vllm_config: Any, *, resolve: Callable[[Any, Any], tuple[int, int]] = _resolve
) -> tuple[Group, ...]:
    """The groups to offload: all groups for which vLLM caches prefixes.

    Args:
        resolve: returns the tokens per scheduler block and per hash; by default vLLM's own function.

    Raises:
        ValueError: this engine's cache cannot be offloaded; the text says why.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ValueError("prefix caching is off, so blocks have no hashes: enable prefix caching")
    dcp = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)
    alignment, hash_tokens = resolve(kv_cache_config, vllm_config)
    drafts, lag_tokens = _drafts(vllm_config)
    kv_heads = _kv_heads(vllm_config)
    flagged = {i for i, each in enumerate(kv_cache_config.kv_cache_groups) if getattr(each, "is_eagle_group", False)}
    found = []
    for index, each in enumerate(kv_cache_config.kv_cache_groups):
        # Scratch memory that vLLM never shares between requests, or rebuilds after a load.
        if not getattr(each.kv_cache_spec, "prefix_cacheable", True) or not getattr(each, "enable_kv_transfer", True):
            continue
        if getattr(each, "host_resident", False):
            raise ValueError(
                f"KV cache group {index} is in host memory, where HiSparse reads it, and a hit needs what is evicted "
                "from there: use MooncakeStoreConnector or OffloadingConnector with HiSparse"
            )
        kind, window, mla = _kind(index, each.kv_cache_spec)
        block_tokens = each.kv_cache_spec.block_size * (dcp if _is_sharded(each.kv_cache_spec) else 1)
        if block_tokens % hash_tokens or alignment % block_tokens:
            raise ValueError(
                f"KV cache group {index} has blocks of {block_tokens} tokens, but blocks are hashed by {hash_tokens} "
                f"and scheduled by {alignment}: use a block size or Mamba cache mode that they divide"
            )
        found.append(
            Group(
                index,
                kind,
                tuple(each.layer_names),
                block_tokens,
                hash_tokens,
                alignment,
                window,
                eagle=drafts and kind is not GroupKind.STATE and (index in flagged or not flagged),
                lag_tokens=lag_tokens if drafts else 0,
                replicas=_replicas(each.kv_cache_spec, mla, kv_heads, vllm_config.parallel_config),
                page_bytes=each.kv_cache_spec.page_size_bytes,
                spec=type(each.kv_cache_spec).__name__,
            )
        )
    if not found:
        raise ValueError("no KV cache group of this model caches prefixes")
    grain = _grain(found, getattr(kv_cache_config, "cache_hit_alignment_tokens", None))
    return tuple(replace(each, grain=grain) for each in found)


def _grain(groups: Sequence[Group], hit_tokens: int | None) -> int:
    """`Group.grain` of groups in an engine whose own hits end at multiples of ``hit_tokens``; None: unknown."""
    whole = all(
        each.kind in (GroupKind.FULL, GroupKind.STATE) and not each.eagle and each.block_tokens == each.alignment
        for each in groups
    )
    states = any(each.kind is GroupKind.STATE for each in groups)
    fine = hit_tokens is not None and hit_tokens == groups[0].hash_tokens < groups[0].alignment
    return groups[0].hash_tokens if whole and states and fine else 0


def blocks_of_longest(kv_cache_config: Any, vllm_config: Any) -> int:
    """Most blocks, of all groups together, that one request may need at a time."""
    specs = [each.kv_cache_spec for each in kv_cache_config.kv_cache_groups]
    return sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)


def _drafts(vllm_config: Any) -> tuple[bool, int]:
    """Whether a draft model uses the target's hidden states, and how many tokens it is ahead."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return False, 0
    uses = getattr(speculative, "use_eagle_block_drop", None) or speculative.use_eagle
    return bool(uses()), int(getattr(speculative, "num_speculative_tokens", 1) or 1)


def _replicas(spec: Any, mla: bool, kv_heads: int | None, parallel: Any) -> int:
    """`Group.replicas` of a group with this spec.

    Args:
        kv_heads: the heads of each layer that is not MLA; None: unknown.
    """
    ranks: int = getattr(parallel, "tensor_parallel_size", 1)
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return 1  # each rank holds other tokens
    if mla:
        return ranks
    layers = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    one_each = all(getattr(each, "num_kv_heads", None) == 1 and "MambaSpec" not in _names(each) for each in layers)
    return ranks_per_head(kv_heads, ranks) if one_each else 1


def _kv_heads(vllm_config: Any) -> int | None:
    """KV heads of every layer that is not MLA, also in a draft model; None: they may differ, or are unknown."""
    model = getattr(vllm_config, "model_config", None)
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    found = {_kv_heads_of(each) for each in (model, draft) if each is not None}
    return found.pop() if len(found) == 1 else None


def _kv_heads_of(model_config: Any) -> int | None:
    config = getattr(model_config, "hf_text_config", None)
    if config is None or getattr(getattr(model_config, "model_arch_config", None), "per_layer_overrides", None):
        return None
    return kv_heads_of(config.to_dict(), model_config.get_total_num_kv_heads())


def _is_sharded(spec: Any) -> bool:
    """Whether each decode-context-parallel rank holds a part of a block's tokens."""
    sharded = getattr(spec, "dcp_sharded", None)
    # Versions without `dcp_sharded` shard all attention, but not state.
    return bool(sharded) if sharded is not None else "MambaSpec" not in _names(spec)


def _kind(index: int, spec: Any) -> tuple[GroupKind, int, bool]:
    """Kind, window in tokens, and whether all of it is MLA: a draft with heads of its own may share a group with it."""
    layers = list(getattr(spec, "kv_cache_specs", {}).values())
    if layers:
        kinds, windows, mla = zip(*[_kind(index, each) for each in layers], strict=True)
        if len(set(kinds)) > 1 or (kinds[0] is GroupKind.CHUNKED_LOCAL and len(set(windows)) > 1):
            raise ValueError(f"KV cache group {index} mixes layers of different kinds")
        return kinds[0], max(windows), all(mla)
    names = _names(spec)
    kind = next((kind for name, kind in _KINDS if name in names), None)
    if kind is None:
        raise ValueError(f"KV cache group {index} is a {type(spec).__name__}, which this connector does not support")
    window = 0
    if kind is GroupKind.SLIDING_WINDOW:
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    elif kind is GroupKind.CHUNKED_LOCAL:
        window = spec.attention_chunk_size
    return kind, window, bool(names & {"MLAAttentionSpec", "SlidingWindowMLASpec"})


def _names(spec: Any) -> set[str]:
    return {each.__name__ for each in type(spec).__mro__}
