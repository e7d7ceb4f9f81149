import pytest

from benchmarks.peers.shapes import SHAPES, SIZES, bfloat16_elements, pool_gib, shape_named


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_block_is_two_mebibytes_or_an_eighth_of_a_70b_models_block(shape):
    expected = {"tp8-4k": 160 * 4096, "tp8-8k": 80 * 8192}.get(shape.name, 2 << 20)
    assert shape.block_bytes == expected
    assert shape.layers * shape.planes == shape.rows


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_row_holds_whole_tokens_of_bfloat16(shape):
    assert bfloat16_elements(shape) * 2 * 16 == shape.row_bytes


def test_shapes_are_found_by_name_and_an_unknown_one_names_what_there_is():
    assert [shape_named(shape.name) for shape in SHAPES] == list(SHAPES)
    with pytest.raises(ValueError, match="contiguous, stacked-64k"):
        shape_named("stacked")


@pytest.mark.parametrize("jobs", [1, 4, 9])
def test_the_pool_holds_every_job_of_every_size_with_a_third_to_spare(jobs):
    needed = jobs * sum(SIZES) * (2 << 20)
    assert pool_gib(jobs) << 30 >= needed * 1.5
    assert pool_gib(jobs) - 1 << 30 < needed * 1.5
