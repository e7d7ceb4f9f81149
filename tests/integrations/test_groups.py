from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.integrations.vllm.groups import Group, Kind, groups_of
from tests.integrations.engine import chain, full, group

# Stand for vLLM's classes: they are told apart by these names.


class KVCacheSpec:
    def __init__(self, block_size: int = 16, **values: Any) -> None:
        self.block_size, self.page_size_bytes = block_size, 1024
        self.__dict__.update(values)


class AttentionSpec(KVCacheSpec):
    pass


class FullAttentionSpec(AttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(AttentionSpec):
    pass


class SlidingWindowMLASpec(SlidingWindowSpec):
    pass


class ChunkedLocalAttentionSpec(AttentionSpec):
    pass


class MambaSpec(KVCacheSpec):
    pass


class EncoderOnlyAttentionSpec(AttentionSpec):
    pass


class UniformTypeKVCacheSpecs(KVCacheSpec):
    pass


def config(**values: Any) -> Any:
    caching = values.pop("caching", True)
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        parallel_config=SimpleNamespace(decode_context_parallel_size=values.pop("dcp", 1)),
        speculative_config=values.pop("speculative", None),
    )


def found(
    *specs: Any, sizes: tuple[int, int] = (16, 16), flags: dict[str, Any] | None = None, **values: Any
) -> tuple[Group, ...]:
    groups = [
        SimpleNamespace(layer_names=[f"layer.{i}"], kv_cache_spec=spec, **(flags or {})) for i, spec in enumerate(specs)
    ]
    cache = SimpleNamespace(kv_cache_groups=groups)
    return groups_of(cache, config(**values), resolve=lambda *_: sizes)


def test_kinds_are_told_apart_by_the_names_of_vllms_classes() -> None:
    groups = found(
        FullAttentionSpec(sliding_window=8),  # hybrid allocation is off: all blocks are kept
        MLAAttentionSpec(),
        SlidingWindowSpec(sliding_window=100),
        SlidingWindowMLASpec(sliding_window=100, extra_retained_tokens=3),
        ChunkedLocalAttentionSpec(attention_chunk_size=64),
        MambaSpec(),
    )
    assert [(each.kind, each.window, each.mla) for each in groups] == [
        (Kind.FULL, 0, False),
        (Kind.FULL, 0, True),
        (Kind.SLIDING_WINDOW, 100, False),
        (Kind.SLIDING_WINDOW, 103, True),
        (Kind.CHUNKED_LOCAL, 64, False),
        (Kind.STATE, 0, False),
    ]


def test_layers_with_specs_of_their_own_are_one_group_if_they_are_of_one_kind() -> None:
    (each,) = found(UniformTypeKVCacheSpecs(kv_cache_specs={"a": MLAAttentionSpec(), "b": MLAAttentionSpec()}))
    assert (each.kind, each.mla) == (Kind.FULL, True)
    for mixed in (
        {"a": FullAttentionSpec(), "b": SlidingWindowSpec(sliding_window=8)},
        {
            "a": ChunkedLocalAttentionSpec(attention_chunk_size=8),
            "b": ChunkedLocalAttentionSpec(attention_chunk_size=16),
        },
    ):
        with pytest.raises(ValueError, match="layers of different kinds"):
            found(UniformTypeKVCacheSpecs(kv_cache_specs=mixed))


def test_a_draft_with_heads_may_share_a_group_with_latent_attention_which_is_not_the_same_on_all_ranks_then() -> None:
    """As of Kimi-K2 with a Llama head for EAGLE-3."""
    (each,) = found(UniformTypeKVCacheSpecs(kv_cache_specs={"a": MLAAttentionSpec(), "draft": FullAttentionSpec()}))
    assert (each.kind, each.mla) == (Kind.FULL, False)


def test_a_group_of_windows_keeps_what_its_longest_one_needs() -> None:
    specs = {
        "a": SlidingWindowMLASpec(sliding_window=100),
        "draft": SlidingWindowSpec(sliding_window=100, extra_retained_tokens=3),
    }
    (each,) = found(UniformTypeKVCacheSpecs(kv_cache_specs=specs))
    assert (each.kind, each.window, each.mla) == (Kind.SLIDING_WINDOW, 103, False)


def test_scratch_that_vllm_does_not_share_is_left_out_and_keeps_no_index() -> None:
    groups = found(FullAttentionSpec(), FullAttentionSpec(prefix_cacheable=False), FullAttentionSpec())
    assert [each.index for each in groups] == [0, 2]


def test_decode_context_parallel_ranks_share_the_tokens_of_a_block_of_attention_but_not_of_state() -> None:
    groups = found(FullAttentionSpec(), MambaSpec(32), sizes=(32, 32), dcp=2)
    assert [each.block_tokens for each in groups] == [32, 32]
    (each,) = found(FullAttentionSpec(dcp_sharded=False), dcp=2)
    assert each.block_tokens == 16


def test_the_draft_models_groups_are_those_that_vllm_flags_or_all() -> None:
    speculative = SimpleNamespace(use_eagle=lambda: True, num_speculative_tokens=3)
    groups = found(FullAttentionSpec(), MambaSpec(), speculative=speculative)
    assert [(each.eagle, each.lag_tokens) for each in groups] == [(True, 3), (False, 3)]
    newer = SimpleNamespace(use_eagle=lambda: True, use_eagle_block_drop=lambda: False, num_speculative_tokens=3)
    assert not found(FullAttentionSpec(), speculative=newer)[0].eagle
    (each,) = found(FullAttentionSpec(), speculative=speculative, flags={"is_eagle_group": True})
    assert each.eagle


@pytest.mark.parametrize(
    ("specs", "values", "text"),
    [
        ([EncoderOnlyAttentionSpec()], {}, "EncoderOnlyAttentionSpec, which this connector does not support"),
        ([SinkFullAttentionSpec()], {}, "SinkFullAttentionSpec, which"),
        ([FullAttentionSpec()], {"caching": False}, "prefix caching is off"),
        ([FullAttentionSpec(24)], {}, "blocks of 24 tokens"),
        ([FullAttentionSpec(prefix_cacheable=False)], {}, "no KV cache group"),
        ([FullAttentionSpec()], {"flags": {"host_resident": True}}, "is in host memory"),
    ],
)
def test_what_cannot_be_offloaded_is_said_in_one_sentence(specs: list[Any], values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        found(*specs, **values)
    assert text in str(refused.value)


def test_a_coarse_block_has_the_hash_of_its_last_tokens() -> None:
    hashes = chain(range(30), 4)
    coarse = group(0, Kind.FULL, 8)
    assert list(coarse.hashes(hashes, 0, 9)) == [hashes[1], hashes[3], hashes[5]]
    assert list(coarse.hashes(hashes, 1, 2)) == [hashes[3]]
    assert list(full().hashes(hashes, 5, 9)) == hashes[5:]


def test_the_first_needed_block_is_vllms_first_that_is_not_null() -> None:
    window = group(0, Kind.SLIDING_WINDOW, 4, window=5)
    assert [window.first_needed(tokens) for tokens in (4, 8, 12, 16)] == [0, 1, 2, 3]
    assert [group(0, Kind.SLIDING_WINDOW, 4, window=6).first_needed(tokens) for tokens in (4, 8, 12)] == [0, 0, 1]
    chunked = group(0, Kind.CHUNKED_LOCAL, 4, window=8)
    assert [chunked.first_needed(tokens) for tokens in (4, 8, 12, 16)] == [0, 2, 2, 4]
    assert group(0, Kind.STATE, 4).first_needed(12) == 2
    assert full().first_needed(12) == 0
