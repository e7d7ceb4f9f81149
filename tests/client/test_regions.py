"""Tensors of every KV layout we know become the regions that name exactly their bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.client.regions import StridedView, regions_of
from kvsidecar.errors import NotExportable
from kvsidecar.types import Region

BLOCKS, PAGE = 10, 64


def view_of(array: np.ndarray, base: np.ndarray, block_dim: int) -> StridedView:  # type: ignore[type-arg]
    offset = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return StridedView(0, offset, array.shape, array.strides, array.itemsize, block_dim)


def test_layers_stacked_in_one_allocation_become_one_region() -> None:
    base = np.zeros((4, BLOCKS, 2, 16), np.int16)
    (region,) = regions_of([view_of(base[layer], base, 0) for layer in range(4)])
    assert region == Region(0, 0, BLOCKS * PAGE, PAGE, PAGE, 4)


def test_k_and_v_apart_become_two_rows_a_layer() -> None:
    base = np.zeros((4, 2, BLOCKS, 32), np.int16)
    (region,) = regions_of([view_of(base[layer], base, 1) for layer in range(4)])
    assert region == Region(0, 0, BLOCKS * PAGE, PAGE, PAGE, 8)


def test_blocks_outermost_is_one_region_without_gaps() -> None:
    base = np.zeros((BLOCKS, 4, 32), np.int16)
    (region,) = regions_of([view_of(base[:, layer], base, 0) for layer in range(4)])
    assert region.block_stride == 4 * PAGE
    assert (region.row_stride, region.num_rows) == (PAGE, 4)


def test_padded_pages_keep_their_stride_and_copy_no_padding() -> None:
    base = np.zeros((BLOCKS, 40), np.int16)
    (region,) = regions_of([view_of(base[:, :32], base, 0)])
    assert region == Region(0, 0, PAGE, 80, PAGE, 1)


def test_separate_allocations_stay_separate_regions() -> None:
    views = [StridedView(layer, 0, (BLOCKS, 32), (PAGE, 2), 2, 0) for layer in range(3)]
    assert [region.allocation for region in regions_of(views)] == [0, 1, 2]


def test_an_interior_pointer_becomes_an_offset() -> None:
    base = np.zeros(BLOCKS * 32 + 100, np.int16)
    view = view_of(base[100:].reshape(BLOCKS, 32), base, 0)
    assert regions_of([view])[0].offset == 200


def test_layers_that_share_kv_count_once() -> None:
    view = StridedView(0, 0, (BLOCKS, 32), (PAGE, 2), 2, 0)
    assert len(regions_of([view, view])) == 1
    assert regions_of([view, view])[0].num_rows == 1


def test_an_uneven_distance_between_layers_is_not_joined() -> None:
    views = [StridedView(0, offset, (BLOCKS, 32), (PAGE, 2), 2, 0) for offset in (0, 1000, 2500)]
    assert [(region.num_rows, region.offset) for region in regions_of(views)] == [(2, 0), (1, 2500)]


def test_layers_in_falling_order_keep_the_order_of_the_layers() -> None:
    views = [StridedView(0, offset, (BLOCKS, 32), (PAGE, 2), 2, 0) for offset in (2000, 1000, 0)]
    assert [region.offset for region in regions_of(views)] == [2000, 1000, 0]


def test_an_expanded_tensor_is_refused() -> None:
    with pytest.raises(NotExportable, match="expanded"):
        regions_of([StridedView(0, 0, (BLOCKS, 2, 32), (PAGE, 0, 2), 2, 0)])


def test_different_numbers_of_blocks_are_refused() -> None:
    with pytest.raises(NotExportable, match=r"\[10, 11\]"):
        regions_of([StridedView(0, 0, (10, 32), (PAGE, 2), 2, 0), StridedView(1, 0, (11, 32), (PAGE, 2), 2, 0)])


def test_nothing_is_refused_with_words() -> None:
    with pytest.raises(NotExportable, match="at least one tensor"):
        regions_of([])


@given(st.data())
def test_regions_name_exactly_the_bytes_of_each_block(data: st.DataObject) -> None:
    """Any permutation of (layer, K/V, block, token, head) and any slice that leaves gaps."""
    sizes = data.draw(st.permutations([("layer", 2), ("kv", 2), ("block", 3), ("token", 2), ("head", 3)]))
    padded = [size + data.draw(st.integers(0, 1)) for _, size in sizes]
    base = np.arange(np.prod(padded), dtype=np.uint8).reshape(padded)
    array = base[tuple(slice(0, size) for _, size in sizes)]
    names = [name for name, _ in sizes]
    layer_dim = names.index("layer")
    block_dim = [name for name in names if name != "layer"].index("block")
    layers = [np.take(np.arange(base.size).reshape(padded)[tuple(slice(0, s) for _, s in sizes)], i, layer_dim)
              for i in range(2)]  # fmt: skip
    views = [view_of(array[(slice(None),) * layer_dim + (i,)], base, block_dim) for i in range(2)]
    regions = regions_of(views)
    for block in range(3):
        named = [
            region.offset + row * region.row_stride + block * region.block_stride + byte
            for region in regions
            for row in range(region.num_rows)
            for byte in range(region.row_bytes)
        ]
        expected = np.concatenate([np.take(layer, block, block_dim).ravel() for layer in layers])
        assert sorted(named) == sorted(expected.tolist())
        assert len(set(named)) == len(named)
