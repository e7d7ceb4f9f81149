from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.integrations.vllm.groups import Group, GroupKind, groups_of
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
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=values.pop("dcp", 1), tensor_parallel_size=values.pop("tp", 1)
        ),
        speculative_config=values.pop("speculative", None),
        model_config=values.pop("model", None),
    )


def found(
    *specs: Any, sizes: tuple[int, int] = (16, 16), flags: dict[str, Any] | None = None, **values: Any
) -> tuple[Group, ...]:
    groups = [
        SimpleNamespace(layer_names=[f"layer.{i}"], kv_cache_spec=spec, **(flags or {})) for i, spec in enumerate(specs)
    ]
    cache = SimpleNamespace(kv_cache_groups=groups, cache_hit_alignment_tokens=values.pop("hits", None))
    return groups_of(cache, config(**values), resolve=lambda *_: sizes)


def test_kinds_are_told_apart_by_the_names_of_vllms_classes() -> None:
    groups = found(
        FullAttentionSpec(sliding_window=8),  # hybrid allocation is off: all blocks are kept
        MLAAttentionSpec(),
        SlidingWindowSpec(sliding_window=100),
        SlidingWindowMLASpec(sliding_window=100, extra_retained_tokens=3),
        ChunkedLocalAttentionSpec(attention_chunk_size=64),
        MambaSpec(),
        tp=2,
    )
    assert [(each.kind, each.window, each.replicas) for each in groups] == [
        (GroupKind.FULL, 0, 1),
        (GroupKind.FULL, 0, 2),
        (GroupKind.SLIDING_WINDOW, 100, 1),
        (GroupKind.SLIDING_WINDOW, 103, 2),
        (GroupKind.CHUNKED_LOCAL, 64, 1),
        (GroupKind.STATE, 0, 1),
    ]


def test_layers_with_specs_of_their_own_are_one_group_if_they_are_of_one_kind() -> None:
    specs = {"a": MLAAttentionSpec(), "b": MLAAttentionSpec()}
    (each,) = found(UniformTypeKVCacheSpecs(kv_cache_specs=specs), tp=2)
    assert (each.kind, each.replicas) == (GroupKind.FULL, 2)
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
    specs = {"a": MLAAttentionSpec(), "draft": FullAttentionSpec()}
    (each,) = found(UniformTypeKVCacheSpecs(kv_cache_specs=specs), tp=2)
    assert (each.kind, each.replicas) == (GroupKind.FULL, 1)


def test_a_group_of_windows_keeps_what_its_longest_one_needs() -> None:
    specs = {
        "a": SlidingWindowMLASpec(sliding_window=100),
        "draft": SlidingWindowSpec(sliding_window=100, extra_retained_tokens=3),
    }
    (each,) = found(UniformTypeKVCacheSpecs(kv_cache_specs=specs))
    assert (each.kind, each.window) == (GroupKind.SLIDING_WINDOW, 103)


class Model:
    """vLLM's ``ModelConfig``.

    Args:
        config: what the model's own configuration says.
    """

    def __init__(self, total: int, **config: Any) -> None:
        self._total, self.hf_text_config = total, SimpleNamespace(to_dict=lambda: config)
        self.model_arch_config = SimpleNamespace(per_layer_overrides=None)

    def get_total_num_kv_heads(self) -> int:
        return self._total


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (8, 2), (16, 4), (6, 1)])
def test_ranks_that_share_a_kv_head_hold_the_same(ranks: int, replicas: int) -> None:
    heads = max(1, 4 // ranks)
    specs = [FullAttentionSpec(num_kv_heads=heads), SlidingWindowSpec(num_kv_heads=heads, sliding_window=9)]
    model = Model(4, num_key_value_heads=4, vision={"num_attention_heads": 16}, linear_num_key_heads=16)
    groups = found(*specs, MambaSpec(num_kv_heads=1), model=model, tp=ranks)
    assert [each.replicas for each in groups] == [replicas, replicas, 1]


@pytest.mark.parametrize(
    ("total", "config"),
    [
        (4, {"num_key_value_heads": 4, "swa_num_key_value_heads": 8}),
        (4, {"num_key_value_heads": 4, "attention_other_setting": {"num_attention_groups": 8}}),
        (4, {"num_kv_heads": [4, 8]}),
        (2, {"num_key_value_heads": 4}),
        (4, {"block_configs": [{"attention": {"n_heads_in_group": 4}}, {"attention": {"n_heads_in_group": 8}}]}),
        (4, {"num_attention_heads": 4}),
    ],
)
def test_where_layers_may_differ_in_their_kv_heads_every_rank_stores_its_own(total: int, config: Any) -> None:
    """A rank has one head of each then, whichever it is."""
    (each,) = found(FullAttentionSpec(num_kv_heads=1), model=Model(total, **config), tp=8)
    assert each.replicas == 1


@pytest.mark.parametrize(("heads", "replicas"), [(4, 2), (8, 1)])
def test_a_draft_with_other_kv_heads_shares_none(heads: int, replicas: int) -> None:
    draft = Model(heads, num_key_value_heads=heads)
    speculative = SimpleNamespace(use_eagle=lambda: False, draft_model_config=draft)
    model = Model(4, num_key_value_heads=4)
    (each,) = found(FullAttentionSpec(num_kv_heads=1), model=model, speculative=speculative, tp=8)
    assert each.replicas == replicas


def test_with_decode_context_parallelism_each_rank_holds_other_tokens() -> None:
    groups = found(MLAAttentionSpec(), FullAttentionSpec(num_kv_heads=1), sizes=(32, 32), dcp=2, tp=8)
    assert [each.replicas for each in groups] == [1, 1]


GRAIN = {"sizes": (64, 16), "hits": 16}


def test_hits_end_inside_blocks_where_those_of_vllm_do() -> None:
    assert [each.grain for each in found(FullAttentionSpec(64), MambaSpec(64), **GRAIN)] == [16, 16]


@pytest.mark.parametrize(
    ("specs", "values"),
    [
        ([FullAttentionSpec(64), MambaSpec(64)], {"hits": 64}),
        ([FullAttentionSpec(64), MambaSpec(64)], {"hits": None}),
        ([FullAttentionSpec(64), MambaSpec(64), SlidingWindowSpec(64, sliding_window=9)], {}),
        ([FullAttentionSpec(32), MambaSpec(64)], {}),
        ([FullAttentionSpec(64), FullAttentionSpec(64)], {}),
        (
            [FullAttentionSpec(64), MambaSpec(64)],
            {"speculative": SimpleNamespace(use_eagle=lambda: True, num_speculative_tokens=1)},
        ),
    ],
    ids=["whole blocks", "an older vLLM", "windows", "blocks of two sizes", "no states", "a draft head"],
)
def test_otherwise_hits_end_with_blocks(specs: list[Any], values: dict[str, Any]) -> None:
    assert {each.grain for each in found(*specs, **{**GRAIN, **values})} == {0}


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
    coarse = group(0, GroupKind.FULL, 8)
    assert list(coarse.hashes(hashes, 0, 9)) == [hashes[1], hashes[3], hashes[5]]
    assert list(coarse.hashes(hashes, 1, 2)) == [hashes[3]]
    assert list(full().hashes(hashes, 5, 9)) == hashes[5:]


def test_the_first_needed_block_is_vllms_first_that_is_not_null() -> None:
    window = group(0, GroupKind.SLIDING_WINDOW, 4, window=5)
    assert [window.first_needed(tokens) for tokens in (4, 8, 12, 16)] == [0, 1, 2, 3]
    assert [group(0, GroupKind.SLIDING_WINDOW, 4, window=6).first_needed(tokens) for tokens in (4, 8, 12)] == [0, 0, 1]
    chunked = group(0, GroupKind.CHUNKED_LOCAL, 4, window=8)
    assert [chunked.first_needed(tokens) for tokens in (4, 8, 12, 16)] == [0, 2, 2, 4]
    assert group(0, GroupKind.STATE, 4).first_needed(12) == 2
    assert full().first_needed(12) == 0
