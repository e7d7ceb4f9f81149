from __future__ import annotations

import pytest

from kvsidecar.integrations.vllm.ranks import Place


def places(tp_size: int, num_stages: int, **more: object) -> list[Place]:
    return [
        Place(tp_rank, tp_size, stage, num_stages, **more)  # type: ignore[arg-type]
        for stage in range(num_stages)
        for tp_rank in range(tp_size)
    ]


def test_every_rank_of_a_world_has_another_number() -> None:
    assert [place.rank for place in places(2, 3)] == [0, 1, 2, 3, 4, 5]
    assert {place.world_size for place in places(2, 3)} == {6}


def test_split_kv_has_a_shard_for_every_rank_which_stores_it() -> None:
    assert [place.shard(0) for place in places(2, 2)] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert all(place.stores(0) for place in places(2, 2))


def test_replicated_kv_has_a_shard_for_every_stage_which_its_first_rank_stores() -> None:
    every = places(2, 2, replicas={1: 2})
    assert [place.shard(1) for place in every] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [place.stores(1) for place in every] == [True, False, True, False]
    assert [place.shard(0) for place in every] == [(0, 4), (1, 4), (2, 4), (3, 4)], "other groups are split"


def test_a_group_has_no_shard_on_a_stage_without_layers_of_it() -> None:
    every = places(2, 3, stages_of={0: (0, 2)})
    assert [place.shard(0) for place in every if place.stage != 1] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    with pytest.raises(ValueError):
        every[2].shard(0)


def test_ranks_that_share_a_head_have_one_shard_which_the_first_of_them_stores() -> None:
    every = places(4, 2, replicas={0: 2})
    assert [place.shard(0) for place in every] == [(0, 4), (0, 4), (1, 4), (1, 4), (2, 4), (2, 4), (3, 4), (3, 4)]
    assert [place.stores(0) for place in every] == [True, False] * 4
