"""Holds: blocks that stay, as long and as many as they may."""

from __future__ import annotations

import numpy as np
import pytest

from kvsidecar.cache.shares import ShareLimits
from kvsidecar.core import holds as holds_module
from kvsidecar.core.hashes import PackedHashes
from kvsidecar.core.holds import MAX_SECONDS, Hold, Holding, Holds
from kvsidecar.core.lookups import LookupService
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.errors import InvalidRequest, LimitExceeded, Unavailable
from kvsidecar.pool.kept_holds import KeptHolds
from kvsidecar.support.tasks import run_all_steps
from tests.cache.cuts import recorded_cache, words_for
from tests.cache.integrity import check_integrity
from tests.cache.support import PAGE, keys, names_readable, namespace, new_cache, open_space, store


def ended(steps: Holding) -> Hold:
    """What all steps of it return."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        hold: Hold = end.value
        return hold


class World:
    def __init__(self, most: int = 4) -> None:
        self.now = 0.0
        self.cache = new_cache(8)
        self.metrics = Metrics("host")
        self.readiness = DaemonReadiness(1 << 20)
        self.holds = Holds(self.cache, lambda: self.now, most * PAGE)
        self.lookups = LookupService(
            self.cache, self.readiness, self.metrics, lambda: self.now, lease_max=60.0, holds=self.holds
        )
        self.space = open_space(self.cache)
        store(self.cache, self.space, *range(6))

    def ready(self) -> World:
        self.readiness.pinning()
        self.readiness.become_ready()
        return self

    def hold(self, name: str, *names: int, seconds: float = 100.0) -> tuple[int, int]:
        packed = PackedHashes(b"".join(keys(*names)), 32)
        hold = ended(self.lookups.hold(name, "uid 0", namespace(), [(0, packed)], seconds))
        check_integrity(self.cache)
        return hold.blocks, hold.nbytes // PAGE

    def flood(self) -> None:
        for name in range(100, 120):
            store(self.cache, self.space, name)

    def left(self) -> list[int | str]:
        return names_readable(self.cache, self.space, *range(6))


def test_held_blocks_stay_until_they_are_released() -> None:
    world = World().ready()
    assert world.hold("prompt", 0, 1, 77) == (2, 2)
    world.flood()
    assert world.left() == [0, 1]
    assert world.lookups.end_hold("prompt")
    assert not world.lookups.end_hold("prompt")
    world.flood()
    assert world.left() == []
    assert (list(world.holds), world.holds.nbytes) == ([], 0)


def test_a_hold_expires_and_is_no_lease_that_a_client_forgot() -> None:
    world = World().ready()
    world.hold("prompt", 0, seconds=5)
    world.now = 4.9
    world.lookups.expire()
    assert [hold.name for hold in world.holds] == ["prompt"]
    world.now = 5.0
    world.lookups.expire()
    assert list(world.holds) == []
    assert world.metrics.value("kvsidecar_refusals_total", reason="lease_expired") == 0
    world.flood()
    assert world.left() == []


def test_all_holds_together_have_a_limit_and_a_refused_one_changes_nothing() -> None:
    world = World(most=3).ready()
    world.hold("a", 0, 1)
    with pytest.raises(LimitExceeded, match="8 KiB more would be pinned; other pins have 8 KiB of the 12 KiB"):
        world.hold("b", 2, 3)
    with pytest.raises(LimitExceeded):
        world.hold("a", 0, 1, 2, 3)
    assert [(hold.name, hold.blocks) for hold in world.holds] == [("a", 2)]
    assert world.cache.stats().leases == 1
    world.hold("a", 3, 4, 5)  # in the place of the other
    world.flood()
    assert world.left() == [3, 4, 5]


def test_a_clear_ends_the_holds_of_its_namespace() -> None:
    world = World().ready()
    world.hold("a", 0, 1)
    run_all_steps(world.lookups.clear(namespace("another")))
    assert len(list(world.holds)) == 1
    run_all_steps(world.lookups.clear(namespace()))
    assert list(world.holds) == []
    assert world.cache.stats().leased_bytes == 0


@pytest.mark.parametrize(
    ("name", "seconds", "names", "problem"),
    [
        ("", 1, (0,), "a pin's name must"),
        ("a\nb", 1, (0,), "a pin's name must"),
        ("a" * 65, 1, (0,), "a pin's name must"),
        ("a", 0, (0,), "more than 0"),
        ("a", 1e9, (0,), "at most 31622400"),
        ("a", 1, (77,), "none of these blocks is readable"),
    ],
)
def test_what_cannot_be_held_is_refused(name: str, seconds: float, names: tuple[int, ...], problem: str) -> None:
    world = World().ready()
    with pytest.raises(InvalidRequest, match=problem):
        world.hold(name, *names, seconds=seconds)
    assert world.cache.stats().leases == 0


def test_a_daemon_that_is_not_ready_holds_nothing() -> None:
    with pytest.raises(Unavailable):
        World().hold("a", 0)


def test_the_number_of_holds_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsidecar.core.holds.MAX_HOLDS", 1)
    world = World().ready()
    world.hold("a", 0)
    with pytest.raises(LimitExceeded, match="there are 1 pins"):
        world.hold("b", 1)
    world.hold("a", 1)


# -- across restarts -------------------------------------------------------------------------------------------------


class Runs:
    """The runs of one daemon: what outlives each, and the present one. It is ``now`` on a clock that goes on."""

    def __init__(self) -> None:
        self.records = np.zeros(words_for(8, 8), np.uint64)
        self.kept = np.zeros(KeptHolds.file_bytes(8 * PAGE) // 8, np.uint64)
        self.now = 0.0
        self.cache = recorded_cache(self.records, 8, 8)
        self.space = open_space(self.cache)
        store(self.cache, self.space, *range(6))
        self.restart()

    def restart(self, most: int = 8, seconds: float = 0.0) -> None:
        """The next run begins so long after this one."""
        self.now += seconds
        self.cache = recorded_cache(self.records, 8, 8)
        self.space = open_space(self.cache)
        kept = KeptHolds(self.kept)
        self.holds = Holds(self.cache, lambda: self.now, most * PAGE, kept)
        self.holds.restore()
        check_integrity(self.cache)

    def hold(self, name: str, *names: int, seconds: float = 100.0) -> None:
        packed = PackedHashes(b"".join(keys(*names)), 32)
        ended(self.holds.hold(name, "uid 0", namespace(), [(self.space, packed)], seconds))

    def expire(self) -> None:
        self.holds.expired(self.cache.expire(self.now))

    def names(self) -> list[str]:
        return sorted(hold.name for hold in self.holds)

    def left_after_a_flood(self) -> list[int | str]:
        for name in range(100, 120):
            store(self.cache, self.space, name)
        return names_readable(self.cache, self.space, *range(6))


def test_holds_outlive_a_restart_with_all_that_they_say() -> None:
    runs = Runs()
    runs.hold("a", 0, 1)
    runs.hold("b", 1, 2)
    before = {hold.name: hold for hold in runs.holds}
    for _ in range(2):
        runs.restart(seconds=10)
        assert [
            (hold.name, hold.owner, hold.namespace, hold.blocks, hold.nbytes) for hold in sorted_by_name(runs.holds)
        ] == [(name, hold.owner, hold.namespace, hold.blocks, hold.nbytes) for name, hold in before.items()]
    assert runs.left_after_a_flood() == [0, 1, 2]
    assert runs.holds.end("a")
    runs.restart()
    assert runs.names() == ["b"]
    assert runs.left_after_a_flood() == [1, 2]


def sorted_by_name(holds: Holds) -> list[Hold]:
    return sorted(holds, key=lambda hold: hold.name)


def test_no_number_of_restarts_lengthens_a_hold() -> None:
    runs = Runs()
    runs.now += 50
    runs.hold("a", 0, seconds=100)
    for _ in range(4):
        runs.restart(seconds=24)
        runs.expire()
        assert runs.names() == ["a"]
    runs.now += 3.9
    runs.expire()
    assert runs.names() == ["a"]
    runs.now += 0.1
    runs.expire()
    assert runs.names() == []
    assert KeptHolds(runs.kept).find() == [], "its room is not given back"


def test_a_hold_that_expired_while_there_was_no_daemon_is_gone() -> None:
    runs = Runs()
    runs.hold("a", 0, seconds=100)
    runs.restart(seconds=100)
    assert (runs.names(), runs.left_after_a_flood()) == ([], [])
    assert KeptHolds(runs.kept).find() == []


def test_a_clock_that_was_set_back_makes_no_hold_longer_than_one_may_be() -> None:
    runs = Runs()
    runs.hold("a", 0, seconds=100)
    runs.restart(seconds=-900_000)
    (hold,) = runs.holds
    assert hold.expires_at <= MAX_SECONDS


def test_a_hold_is_kept_for_those_of_its_blocks_that_are_still_there() -> None:
    runs = Runs()
    runs.hold("a", 0, 1, 2)
    runs.hold("b", 3)
    runs.cache.clear_blocks(runs.space, keys(1, 3))
    runs.restart()
    assert [(hold.name, hold.blocks, hold.nbytes) for hold in runs.holds] == [("a", 2, 2 * PAGE)]
    store(runs.cache, runs.space, 1)
    runs.restart()
    assert [(hold.name, hold.blocks) for hold in runs.holds] == [("a", 2)], "it grows again"
    assert runs.left_after_a_flood() == [0, 2]


def test_a_cleared_or_replaced_hold_stays_so() -> None:
    runs = Runs()
    runs.hold("a", 0)
    runs.hold("a", 1, 2, seconds=50)
    runs.hold("c", 3)
    runs.restart()
    assert [(hold.name, hold.blocks, hold.expires_at) for hold in sorted_by_name(runs.holds)] == [
        ("a", 2, 50),
        ("c", 1, 100),
    ]
    runs.holds.clear(namespace())
    runs.restart()
    assert runs.names() == []


def test_holds_that_exceed_a_lower_limit_end() -> None:
    runs = Runs()
    runs.hold("a", 0, 1)
    runs.hold("b", 2, 3)
    runs.restart(most=3)
    assert len(runs.names()) == 1
    runs.restart(most=8)
    assert len(runs.names()) == 1


def test_holds_that_take_what_is_guaranteed_to_others_now_end() -> None:
    runs = Runs()
    runs.hold("a", 0, 1)
    cache = recorded_cache(runs.records, 8, 8)
    cache.set_shares([ShareLimits("other", lambda _: False, 7 * PAGE, None)])
    holds = Holds(cache, lambda: runs.now, 8 * PAGE, KeptHolds(runs.kept))
    holds.restore()
    assert list(holds) == []
    assert cache.stats().leases == 0


def test_no_room_for_the_hashes_is_a_refusal_that_changes_nothing() -> None:
    runs = Runs()
    small = KeptHolds(np.zeros(4608 + 512, np.uint64))
    holds = Holds(runs.cache, lambda: 0.0, 8 * PAGE, small)
    ended(holds.hold("a", "uid 0", namespace(), [(runs.space, PackedHashes(keys(0)[0], 32))], 1))
    with pytest.raises(LimitExceeded, match="no room for the hashes of 1 more blocks"):
        ended(holds.hold("b", "uid 0", namespace(), [(runs.space, PackedHashes(keys(1)[0], 32))], 1))
    assert [hold.name for hold in holds] == ["a"]
    assert runs.cache.stats().leases == 1


def test_memory_that_is_needed_ends_the_smallest_hold() -> None:
    runs = Runs()
    runs.hold("a", 0, 1)
    runs.hold("b", 2)
    assert runs.holds.give_up() == "b"
    assert runs.holds.give_up() == "a"
    assert runs.holds.give_up() == ""
    runs.restart()
    assert runs.names() == []


def test_of_a_large_pin_each_step_looks_for_some_blocks_and_all_are_held_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holds_module, "HOLD_STEP", 2)
    world = World().ready()
    packed = PackedHashes(b"".join(keys(0, 77, 78, 79, 1, 2)), 32)
    steps = world.lookups.hold("prompt", "uid 0", namespace(), [(0, packed)], 100.0)
    assert len(list(steps)) == 2
    (hold,) = world.holds
    assert hold.blocks == 3
    world.flood()
    assert world.left() == [0, 1, 2]
    steps = world.lookups.hold("another", "uid 0", namespace(), [(0, packed)], 100.0)
    next(steps)
    assert world.cache.stats().leases == 2
    steps.close()
    assert world.cache.stats().leases == 1
    check_integrity(world.cache)
    with pytest.raises(InvalidRequest, match="readable"):
        world.hold("none", 77, 78, 79)
