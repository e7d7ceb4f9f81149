"""Young objects are collected before there are many."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.young_objects import COLLECT, FULL_SECONDS, MANY, SECONDS, YoungObjects
from tests.clock import Clock


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that were collected, by nothing else."""
    found: list[int] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            found.append(info["generation"])

    gc.collect()
    gc.disable()
    gc.callbacks.append(collected)
    yield found
    gc.callbacks.remove(collected)
    gc.enable()


def test_many_young_objects_are_collected_and_few_are_left_alone(collections: list[int]) -> None:
    clock = Clock()
    look = YoungObjects(clock)
    gc.collect(0)
    collections.clear()
    look()
    assert collections == []
    kept = [[] for _ in range(MANY + 1)]  # type: ignore[var-annotated]
    clock.now += SECONDS
    look()
    assert collections == [0]
    assert kept


def test_it_does_not_look_at_each_turn(collections: list[int]) -> None:
    clock = Clock()
    look = YoungObjects(clock)
    look()
    kept = [[] for _ in range(MANY + 1)]  # type: ignore[var-annotated]
    clock.now += SECONDS / 2
    look()
    assert collections == []
    clock.now += SECONDS / 2
    look()
    assert collections == [0]
    assert kept


def test_old_ones_that_are_freed_do_not_hide_young_ones(collections: list[int]) -> None:
    """Python counts one against the other, and would never collect."""
    old = [[] for _ in range(4 * MANY)]  # type: ignore[var-annotated]
    gc.collect(0)
    before = gc.get_threshold()
    gc.set_threshold(MANY, 10, 10)
    gc.enable()
    try:
        collections.clear()
        kept = []
        for _ in range(2 * MANY):
            old.pop()
            kept.append([])  # type: ignore[var-annotated]
        assert collections == []
        YoungObjects(Clock())()
        assert collections == [0]
    finally:
        gc.set_threshold(*before)


def test_all_objects_are_collected_after_a_time(collections: list[int]) -> None:
    clock = Clock()
    look = YoungObjects(clock)
    for _ in range(25):
        clock.now += FULL_SECONDS / 10
        look()
    assert collections.count(2) == 2


def test_no_number_of_younger_collections_begins_a_full_one(collections: list[int]) -> None:
    before = gc.get_threshold()
    gc.freeze()  # so that few objects are many beside the old ones
    gc.collect()
    collections.clear()
    gc.set_threshold(1, *COLLECT[1:])
    gc.enable()
    try:
        kept = [[] for _ in range(120_000)]  # type: ignore[var-annotated]
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    assert kept
    assert collections.count(1) > 5_000
    assert 2 not in collections


async def test_a_turn_of_the_loop_ends_with_a_call() -> None:
    loop_time, order = LoopTime(), []
    loop_time.at_end_of_iteration = lambda: order.append("end")
    loop_time.later(lambda: order.append("step"))
    await loop_time.turn()
    assert order[:2] == ["step", "end"]
