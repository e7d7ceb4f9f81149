"""Where the bytes of a block are, for every layout that vLLM registers. Needs torch, not a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvsidecar.client import GroupLayout, HostBuffer, NotExportable
from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.ranks import Place

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from kvsidecar.client.torch import shared_empty  # noqa: E402
from kvsidecar.integrations.vllm import memory  # noqa: E402

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 4, 8
PAGE = HEADS * TOKENS * CONTENT * 2
"""Of float16 with shape (BLOCKS, HEADS, TOKENS, CONTENT)."""


def spec(page: int = PAGE, *, block_size: int = TOKENS, **more: Any) -> Any:
    return SimpleNamespace(page_size_bytes=page, block_size=block_size, **more)


def configured(layers: Sequence[str] | Sequence[Sequence[str]], *specs: Any, tensors: Sequence[Any] = ()) -> Any:
    """A KVCacheConfig, with one group per list of layers."""
    groups = [layers] if isinstance(layers[0], str) else layers
    specs = specs or (spec(),)
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[SimpleNamespace(layer_names=list(names), kv_cache_spec=specs[i % len(specs)])
                         for i, names in enumerate(groups)],
        kv_cache_tensors=tensors,
    )  # fmt: skip


def exported(kv_caches: Mapping[str, Any], config: Any) -> RankMemory:
    groups = [
        Group(i, GroupKind.FULL, tuple(each.layer_names), TOKENS, TOKENS, TOKENS)
        for i, each in enumerate(config.kv_cache_groups)
    ]
    return memory.export(memory.views_of(kv_caches, config, groups), config.num_blocks, Place())


def block_bytes(rank: RankMemory, layout: GroupLayout, block: int) -> bytes:
    """The bytes of one block in the order in which the daemon puts them into a slot."""
    parts = []
    for region in layout.regions:
        fd = rank.buffers.allocations[region.allocation].fd
        (buffer,) = (each for each in HostBuffer._open.values() if each.fd == fd)
        data = np.frombuffer(buffer.memory, np.uint8)
        for row in range(region.num_rows):
            start = region.offset + row * region.row_stride + block * region.block_stride
            parts.append(data[start : start + region.row_bytes].tobytes())
    return b"".join(parts)


def of_tensors(tensors: Sequence[Any], block: int) -> list[bytes]:
    """By tensor whose first dimension counts blocks: the bytes of one block in the order of the tensor's dimensions."""
    return [tensor[block].contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def filled(*shape: int, dtype: Any = torch.float16) -> Any:
    """Shared memory in which every two bytes differ from those before."""
    size = int(np.prod(shape)) * dtype.itemsize
    tensor = shared_empty((size,), torch.uint8)
    tensor.copy_(torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, np.uint8)))
    return tensor.view(dtype).view(*shape)


def check_each_block(kv_caches: Mapping[str, Any], config: Any, tensors: Sequence[Any], group: int = 0) -> RankMemory:
    """``tensors``: with blocks first, in the order in which the group's shard has them."""
    rank = exported(kv_caches, config)
    for block in range(BLOCKS):
        assert block_bytes(rank, rank.groups[group], block) == b"".join(of_tensors(tensors, block))
    return rank


def test_layers_at_a_constant_distance_in_one_buffer_are_one_region() -> None:
    whole = filled(3, BLOCKS, HEADS, TOKENS, CONTENT)
    rank = check_each_block({"a": whole[0], "b": whole[1], "c": whole[2]}, configured("abc"), whole)
    assert len(rank.groups[0].regions) == len(rank.buffers.allocations) == 1
    assert rank.groups[0].regions[0].num_rows == 3


def test_a_storage_per_layer_is_exported_once_each() -> None:
    layers = {name: filled(BLOCKS, HEADS, TOKENS, CONTENT) for name in "abc"}
    rank = check_each_block(layers, configured("abc"), list(layers.values()))
    assert len(rank.buffers.allocations) == 3


def test_rows_are_in_the_order_of_the_group_not_of_the_dictionary() -> None:
    layers = {name: filled(BLOCKS, HEADS, TOKENS, CONTENT + i) for i, name in enumerate("ab")}
    pages = {name: spec(tensor[0].numel() * 2) for name, tensor in layers.items()}
    check_each_block(layers, configured("ba", spec(kv_cache_specs=pages)), [layers["b"], layers["a"]])


@pytest.mark.parametrize("ratio", [2, 4])
def test_a_kernels_blocks_are_parts_of_the_managers(ratio: int) -> None:
    whole = filled(2, BLOCKS * ratio, HEADS, TOKENS // ratio, CONTENT)
    check_each_block({"a": whole[0], "b": whole[1]}, configured("ab"), whole.unflatten(1, (BLOCKS, ratio)))


def test_heads_before_tokens_or_behind_lie_as_they_lie() -> None:
    whole = filled(2, BLOCKS, TOKENS, HEADS, CONTENT)  # in memory; the tensors say heads first
    layers = {"a": whole[0].transpose(1, 2), "b": whole[1].transpose(1, 2)}
    check_each_block(layers, configured("ab"), whole)


def test_k_and_v_outermost_in_one_tensor() -> None:
    layer = filled(2, BLOCKS, TOKENS, HEADS, CONTENT // 2)
    check_each_block({"a": layer}, configured("a"), [layer[0], layer[1]])


def test_k_and_v_outermost_with_a_kernels_smaller_blocks() -> None:
    layer = filled(2, BLOCKS * 2, TOKENS // 2, HEADS, CONTENT // 2)
    k, v = layer.unflatten(1, (BLOCKS, 2))
    check_each_block({"a": layer}, configured("a"), [k, v])


def test_k_and_v_outermost_in_shape_but_not_in_memory() -> None:
    whole = filled(BLOCKS, 2, TOKENS, HEADS, CONTENT // 2)
    rank = check_each_block({"a": whole.transpose(0, 1)}, configured("a"), [whole])
    assert rank.groups[0].regions[0].row_bytes == PAGE


def test_k_and_v_in_two_tensors() -> None:
    k, v = filled(BLOCKS, HEADS, TOKENS, CONTENT // 2), filled(BLOCKS, HEADS, TOKENS, CONTENT // 2)
    check_each_block({"a": (k, v)}, configured("a"), [k, v])


def test_blocks_outermost_are_one_piece_each() -> None:
    whole = filled(BLOCKS, 3, HEADS, TOKENS, CONTENT)
    rank = check_each_block({"a": whole[:, 0], "b": whole[:, 1], "c": whole[:, 2]}, configured("abc"), [whole])
    (region,) = rank.groups[0].regions
    assert (region.num_rows, region.row_bytes, region.block_stride) == (1, 3 * PAGE, 3 * PAGE)


def test_whole_blocks_may_begin_inside_a_storage() -> None:
    whole = filled(BLOCKS + 1, 2, HEADS, TOKENS, CONTENT)[1:]
    check_each_block({"a": whole[:, 0], "b": whole[:, 1]}, configured("ab"), [whole])


def test_blocks_outermost_with_heads_around_layers_are_one_piece_each() -> None:
    whole = filled(BLOCKS, HEADS, 3, TOKENS, CONTENT)
    layers = {name: whole[:, :, i] for i, name in enumerate("abc")}
    rank = check_each_block(layers, configured("abc"), [whole])
    assert rank.groups[0].regions[0].num_rows == 1


def test_blocks_with_a_gap_are_not_one_piece() -> None:
    whole = filled(BLOCKS, 3, HEADS, TOKENS, CONTENT)
    rank = check_each_block({"a": whole[:, 0], "b": whole[:, 2]}, configured("ab"), [whole[:, 0], whole[:, 2]])
    assert rank.groups[0].regions[0].num_rows == 2


def test_layers_that_overlap_are_not_taken_for_whole_blocks() -> None:
    whole = filled(BLOCKS, 2 * PAGE, dtype=torch.uint8)
    first = whole[:, :PAGE]
    second = whole[:, 8 : PAGE + 8]
    found = memory._whole_blocks([first, second])
    assert found is None


def test_layers_that_share_kv_are_stored_once() -> None:
    layer = filled(BLOCKS, HEADS, TOKENS, CONTENT)
    check_each_block({"a": layer, "b": layer, "not in a group": layer}, configured("ab"), [layer])


def test_groups_that_overlay_the_same_bytes_are_exported_once() -> None:
    whole = filled(2, BLOCKS, HEADS, TOKENS, CONTENT)
    config = configured([list("ab"), list("cd")])
    layers = {"a": whole[0], "b": whole[1], "c": whole[0], "d": whole[1]}
    rank = check_each_block(layers, config, whole, group=1)
    assert len(rank.buffers.allocations) == 1
    assert rank.groups[0].regions == rank.groups[1].regions


def test_padding_behind_a_page_is_left_out() -> None:
    whole = filled(BLOCKS, PAGE + 64, dtype=torch.uint8)
    layer = whole[:, :PAGE].unflatten(1, (HEADS, TOKENS, CONTENT * 2))
    rank = check_each_block({"a": layer}, configured("a", spec(PAGE + 64, page_size_padded=PAGE + 64)), [layer])
    assert rank.groups[0].shard_bytes == PAGE


def test_a_latent_cache_has_no_heads() -> None:
    whole = filled(2, BLOCKS, TOKENS, 9)
    check_each_block({"a": whole[0], "b": whole[1]}, configured("ab", spec(TOKENS * 9 * 2)), whole)


def test_states_of_a_layer_are_rows_of_one_page() -> None:
    page = filled(BLOCKS, 96, dtype=torch.uint8)
    states = [page[:, :32].view(torch.float16).unflatten(1, (2, 8)), page[:, 32:].view(torch.float32)]
    check_each_block({"a": states}, configured("a", spec(96, block_size=1)), states)


def test_a_raw_buffer_is_read_where_the_configuration_says() -> None:
    buffer = filled(64 + BLOCKS * 3 * 32, dtype=torch.int8)
    placed = SimpleNamespace(layers=["x", "a", "b"], offset=64, layer_stride=32, block_stride=96)
    config = configured("ab", spec(32, has_layer_views=False), tensors=[placed])
    blocks = buffer[64:].view(BLOCKS, 3, 32)
    check_each_block({"x": buffer, "a": buffer, "b": buffer}, config, [blocks[:, 1], blocks[:, 2]])


@pytest.mark.parametrize(
    ("kv_caches", "config", "text"),
    [
        ({"b": torch.zeros(BLOCKS, 4)}, configured("a"), "layer a of KV cache group 0 was not registered"),
        ({"a": torch.zeros(BLOCKS + 1, PAGE // 4)}, configured("a"), "does not show which"),
        ({"a": torch.zeros(BLOCKS * 3, PAGE // 12)}, configured("a"), "does not show which"),
        ({"a": torch.zeros(BLOCKS, PAGE // 8)}, configured("a"), f"{PAGE // 2} bytes per block"),
        ({"a": torch.zeros(BLOCKS, PAGE)}, configured("a", spec(page_size_padded=PAGE)), f"{PAGE * 4} bytes per"),
        ({"a": torch.zeros(100, dtype=torch.int8)}, configured("a"), "does not say where"),
        (
            {"a": torch.zeros(100, dtype=torch.int8)},
            configured("a", tensors=[SimpleNamespace(layers=["a"], offset=0, layer_stride=0, block_stride=PAGE)]),
            "of a buffer of 100",
        ),
        ({"a": torch.zeros(BLOCKS, PAGE // 4)}, configured("a"), "shared_empty"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(kv_caches: Any, config: Any, text: str) -> None:
    with pytest.raises(NotExportable, match=text):
        exported(kv_caches, config)


def test_a_pool_of_two_blocks_could_be_k_and_v() -> None:
    config = configured("a")
    config.num_blocks = 2
    with pytest.raises(NotExportable, match="does not show which"):
        exported({"a": filled(2, 2, HEADS, TOKENS, CONTENT // 2)}, config)


def facts(layers: Mapping[str, Any], config: Any) -> list[str]:
    groups = [Group(0, GroupKind.FULL, tuple(config.kv_cache_groups[0].layer_names), TOKENS, TOKENS, TOKENS)]
    return memory.facts_of(memory.views_of(layers, config, groups), {0: ["BACKEND"]})


def test_facts_tell_orders_within_a_block_apart_and_not_where_blocks_are() -> None:
    whole = filled(2, BLOCKS, HEADS, TOKENS, CONTENT)
    one = facts({"a": whole[0], "b": whole[1]}, configured("ab"))
    apart = facts({name: filled(BLOCKS, HEADS, TOKENS, CONTENT) for name in "ab"}, configured("ab"))
    other = filled(2, BLOCKS, TOKENS, HEADS, CONTENT).transpose(2, 3)
    assert one == apart
    assert one != facts({"a": other[0], "b": other[1]}, configured("ab"))
    assert one != facts({"a": whole[0].view(torch.bfloat16), "b": whole[1]}, configured("ab"))
    assert any("BACKEND" in fact for fact in one)


def test_facts_tell_whole_blocks_of_different_orders_apart() -> None:
    layers_outer = filled(BLOCKS, 2, HEADS, TOKENS, CONTENT)
    heads_outer = filled(BLOCKS, HEADS, 2, TOKENS, CONTENT)
    one = facts({"a": layers_outer[:, 0], "b": layers_outer[:, 1]}, configured("ab"))
    other = facts({"a": heads_outer[:, :, 0], "b": heads_outer[:, :, 1]}, configured("ab"))
    swapped = facts({"b": layers_outer[:, 0], "a": layers_outer[:, 1]}, configured("ab"))
    assert len({str(each) for each in (one, other, swapped)}) == 3


def test_the_buffer_of_the_cpu_platform_can_be_shared_and_other_memory_is_as_ever() -> None:
    with memory.SharedKVMemory():
        buffer = torch.zeros(4096, dtype=torch.int8, device=torch.device("cpu"))
        floats, shape = torch.zeros(16), torch.zeros((2, 3), dtype=torch.int8)
    after = torch.zeros(64, dtype=torch.int8)
    assert HostBuffer.holding(buffer.data_ptr()) is not None
    assert buffer.shape == (4096,)
    assert not buffer.any()
    for other in (floats, shape, after):
        assert HostBuffer.holding(other.data_ptr()) is None


def test_the_layers_of_one_tensor_for_all_are_found_by_the_backends_order() -> None:
    whole = filled(BLOCKS, 3, TOKENS, HEADS, CONTENT)
    backend = SimpleNamespace(get_kv_cache_stride_order=lambda include_num_layers_dimension: (1, 0, 3, 2, 4))
    tensors = [SimpleNamespace(shared_by=[name]) for name in "abc"]
    config = configured("abc", tensors=tensors)
    layers = memory.layers_of_cross_layer(whole, backend, config)
    assert torch.equal(layers["b"].view(torch.int16), whole[:, 1].transpose(1, 2).view(torch.int16))
    check_each_block(layers, config, [whole])
