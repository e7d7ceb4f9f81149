"""Daemon and process of a tier know the same spaces, and few of them, however many there have been."""

from __future__ import annotations

import random

import pytest

from kvsidecar.tiers import space_numbers
from kvsidecar.tiers.backend import ShardSpace
from kvsidecar.tiers.space_numbers import KnownSpaces, SpaceNumbers
from tests.cache.support import namespace


class Process:
    """What the process of a tier does with what the daemon tells it."""

    def __init__(self) -> None:
        self.known = KnownSpaces()
        self.watched: dict[int, ShardSpace] = {}

    def watch(self, number: int) -> None:
        space = self.known.get(number)
        assert space is not None
        self.watched[number] = space


@pytest.mark.parametrize("seed", range(10))
def test_both_sides_mean_the_same_and_keep_few_of_very_many_spaces(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took its names on both sides, as long as the process lived."""
    rng = random.Random(seed)
    monkeypatch.setattr(space_numbers, "MAX_SPACES", 4)
    numbers, process = SpaceNumbers(), Process()
    watched: set[ShardSpace] = set()

    def number_of(space: ShardSpace) -> int:
        number, is_new = numbers.of(space)
        if is_new:
            process.known.add(number, space)
        assert process.known.get(number) == space
        return number

    for _ in range(500):
        space = ShardSpace(namespace(f"{rng.randrange(12)}"), 0, 0, 1, 4096)
        match rng.randrange(4):
            case 0:
                before = numbers.unwatch(space)
                watched.discard(space)
                if before is not None:
                    del process.watched[before]
            case 1:
                number = number_of(space)
                if (before := numbers.watch(space, number)) is not None:
                    del process.watched[before]
                process.watch(number)
                watched.add(space)
            case _:
                number_of(space)
        assert {numbers.watched(number) for number in process.watched} == set(process.watched.values()) == watched
        assert len(process.watched) == len(watched)
        assert len(numbers._numbers) == len(process.known._spaces) <= 4
    assert numbers.watched(0) is None
