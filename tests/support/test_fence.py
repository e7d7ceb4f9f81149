"""Memory by which an engine ends the copies of its memory: what either side may conclude from it."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator

import pytest

from kvsidecar.support import fence as module
from kvsidecar.support.fence import Fence, create, lanes
from kvsidecar.types import Direction


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create()
    yield fd
    os.close(fd)


def test_nothing_begins_behind_a_shut_fence(fd: int) -> None:
    fence, lane = Fence(fd), lanes(fd)[Direction.LOAD]
    assert lane.enter()
    lane.leave()
    assert not fence.is_quiet(), "it is not shut"
    fence.shut()
    assert fence.is_quiet()
    assert not lane.enter()
    assert fence.is_quiet(), "what did not begin is not under way"


@pytest.mark.parametrize("direction", list(Direction))
def test_it_is_quiet_when_all_calls_of_both_directions_are_over(direction: Direction, fd: int) -> None:
    fence, lane = Fence(fd), lanes(fd)[direction]
    assert lane.enter()
    assert lane.enter()
    fence.shut()
    assert not fence.is_quiet()
    lane.leave()
    assert not fence.is_quiet()
    lane.leave()
    assert fence.is_quiet()


def test_what_a_dead_copier_had_under_way_is_over_for_the_next_one(fd: int) -> None:
    assert lanes(fd)[Direction.STORE].enter()
    lanes(fd)
    fence = Fence(fd)
    fence.shut()
    assert fence.is_quiet()


def test_an_engine_cannot_take_the_memory_away_from_its_copier(fd: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_what_an_engine_writes_over_the_numbers_deceives_nobody_else(fd: int) -> None:
    lane = lanes(fd)[Direction.STORE]
    assert lane.enter()
    with mmap.mmap(fd, 4096) as shared:
        shared[:] = bytes(4096)
    lane.leave()
    assert lane.enter()
    lane.leave()
    fence = Fence(fd)
    fence.shut()
    assert fence.is_quiet()


def test_a_machine_without_the_barrier_waits_instead(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module, "_SYS_MEMBARRIER", None)
    monkeypatch.setattr(time, "sleep", slept.append)
    fence = Fence(fd)
    fence.shut()
    fence.shut()
    assert len(slept) == 1
