"""Pins: blocks that stay, as long and as many as they may."""

from __future__ import annotations

import numpy as np
import pytest

from kvsidecar.cache.shares import ShareLimits
from kvsidecar.core.hashes import PackedHashes
from kvsidecar.core.lookups import LookupService
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.pins import MAX_SECONDS, Pin, Pins
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.errors import InvalidRequest, LimitExceeded, Unavailable
from kvsidecar.pool.kept_pins import KeptPins
from tests.cache.cuts import recorded_cache, words_for
from tests.cache.integrity import check_integrity
from tests.cache.support import PAGE, keys, names_readable, namespace, new_cache, open_space, store


class World:
    def __init__(self, most: int = 4) -> None:
        self.now = 0.0
        self.cache = new_cache(8)
        self.metrics = Metrics("host")
        self.readiness = DaemonReadiness(1 << 20)
        self.pins = Pins(self.cache, lambda: self.now, most * PAGE)
        self.lookups = LookupService(
            self.cache, self.readiness, self.metrics, lambda: self.now, lease_max=60.0, pins=self.pins
        )
        self.space = open_space(self.cache)
        store(self.cache, self.space, *range(6))

    def ready(self) -> World:
        self.readiness.pinning()
        self.readiness.become_ready()
        return self

    def pin(self, name: str, *names: int, seconds: float = 100.0) -> tuple[int, int]:
        packed = PackedHashes(b"".join(keys(*names)), 32)
        pin = self.lookups.pin(name, "uid 0", namespace(), [(0, packed)], seconds)
        check_integrity(self.cache)
        return pin.blocks, pin.nbytes // PAGE

    def flood(self) -> None:
        for name in range(100, 120):
            store(self.cache, self.space, name)

    def left(self) -> list[int | str]:
        return names_readable(self.cache, self.space, *range(6))


def test_pinned_blocks_stay_until_they_are_unpinned() -> None:
    world = World().ready()
    assert world.pin("prompt", 0, 1, 77) == (2, 2)
    world.flood()
    assert world.left() == [0, 1]
    assert world.lookups.unpin("prompt")
    assert not world.lookups.unpin("prompt")
    world.flood()
    assert world.left() == []
    assert (list(world.pins), world.pins.nbytes) == ([], 0)


def test_a_pin_expires_and_is_no_lease_that_a_client_forgot() -> None:
    world = World().ready()
    world.pin("prompt", 0, seconds=5)
    world.now = 4.9
    world.lookups.expire()
    assert [pin.name for pin in world.pins] == ["prompt"]
    world.now = 5.0
    world.lookups.expire()
    assert list(world.pins) == []
    assert world.metrics.value("kvsidecar_refusals_total", reason="lease_expired") == 0
    world.flood()
    assert world.left() == []


def test_all_pins_together_have_a_limit_and_a_refused_one_changes_nothing() -> None:
    world = World(most=3).ready()
    world.pin("a", 0, 1)
    with pytest.raises(LimitExceeded, match="8 KiB more would be pinned; others have 8 KiB of the 12 KiB"):
        world.pin("b", 2, 3)
    with pytest.raises(LimitExceeded):
        world.pin("a", 0, 1, 2, 3)
    assert [(pin.name, pin.blocks) for pin in world.pins] == [("a", 2)]
    assert world.cache.stats().leases == 1
    world.pin("a", 3, 4, 5)  # in the place of the other
    world.flood()
    assert world.left() == [3, 4, 5]


def test_a_clear_ends_the_pins_of_its_namespace() -> None:
    world = World().ready()
    world.pin("a", 0, 1)
    world.lookups.clear(namespace("another"))
    assert len(list(world.pins)) == 1
    world.lookups.clear(namespace())
    assert list(world.pins) == []
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
def test_what_cannot_be_pinned_is_refused(name: str, seconds: float, names: tuple[int, ...], problem: str) -> None:
    world = World().ready()
    with pytest.raises(InvalidRequest, match=problem):
        world.pin(name, *names, seconds=seconds)
    assert world.cache.stats().leases == 0


def test_a_daemon_that_is_not_ready_pins_nothing() -> None:
    with pytest.raises(Unavailable):
        World().pin("a", 0)


def test_the_number_of_pins_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsidecar.core.pins.MAX_PINS", 1)
    world = World().ready()
    world.pin("a", 0)
    with pytest.raises(LimitExceeded, match="there are 1 pins"):
        world.pin("b", 1)
    world.pin("a", 1)


# -- across restarts -------------------------------------------------------------------------------------------------


class Runs:
    """The runs of one daemon: what outlives each, and the present one. It is ``now`` on a clock that goes on."""

    def __init__(self) -> None:
        self.records = np.zeros(words_for(8, 8), np.uint64)
        self.kept = np.zeros(KeptPins.file_bytes(8 * PAGE) // 8, np.uint64)
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
        kept = KeptPins(self.kept)
        self.pins = Pins(self.cache, lambda: self.now, most * PAGE, kept)
        self.pins.restore()
        check_integrity(self.cache)

    def pin(self, name: str, *names: int, seconds: float = 100.0) -> None:
        self.pins.pin(name, "uid 0", namespace(), [(self.space, keys(*names))], seconds)

    def expire(self) -> None:
        self.pins.expired(self.cache.expire(self.now))

    def names(self) -> list[str]:
        return sorted(pin.name for pin in self.pins)

    def left_after_a_flood(self) -> list[int | str]:
        for name in range(100, 120):
            store(self.cache, self.space, name)
        return names_readable(self.cache, self.space, *range(6))


def test_pins_outlive_a_restart_with_all_that_they_say() -> None:
    runs = Runs()
    runs.pin("a", 0, 1)
    runs.pin("b", 1, 2)
    before = {pin.name: pin for pin in runs.pins}
    for _ in range(2):
        runs.restart(seconds=10)
        assert [(pin.name, pin.owner, pin.namespace, pin.blocks, pin.nbytes) for pin in sorted_by_name(runs.pins)] == [
            (name, pin.owner, pin.namespace, pin.blocks, pin.nbytes) for name, pin in before.items()
        ]
    assert runs.left_after_a_flood() == [0, 1, 2]
    assert runs.pins.unpin("a")
    runs.restart()
    assert runs.names() == ["b"]
    assert runs.left_after_a_flood() == [1, 2]


def sorted_by_name(pins: Pins) -> list[Pin]:
    return sorted(pins, key=lambda pin: pin.name)


def test_no_number_of_restarts_lengthens_a_pin() -> None:
    runs = Runs()
    runs.now += 50
    runs.pin("a", 0, seconds=100)
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
    assert KeptPins(runs.kept).find() == [], "its room is not given back"


def test_a_pin_that_expired_while_there_was_no_daemon_is_gone() -> None:
    runs = Runs()
    runs.pin("a", 0, seconds=100)
    runs.restart(seconds=100)
    assert (runs.names(), runs.left_after_a_flood()) == ([], [])
    assert KeptPins(runs.kept).find() == []


def test_a_clock_that_was_set_back_makes_no_pin_longer_than_one_may_be() -> None:
    runs = Runs()
    runs.pin("a", 0, seconds=100)
    runs.restart(seconds=-900_000)
    (pin,) = runs.pins
    assert pin.expires_at <= MAX_SECONDS


def test_a_pin_is_kept_for_those_of_its_blocks_that_are_still_there() -> None:
    runs = Runs()
    runs.pin("a", 0, 1, 2)
    runs.pin("b", 3)
    runs.cache.clear_blocks(runs.space, keys(1, 3))
    runs.restart()
    assert [(pin.name, pin.blocks, pin.nbytes) for pin in runs.pins] == [("a", 2, 2 * PAGE)]
    store(runs.cache, runs.space, 1)
    runs.restart()
    assert [(pin.name, pin.blocks) for pin in runs.pins] == [("a", 2)], "it grows again"
    assert runs.left_after_a_flood() == [0, 2]


def test_a_cleared_or_replaced_pin_stays_so() -> None:
    runs = Runs()
    runs.pin("a", 0)
    runs.pin("a", 1, 2, seconds=50)
    runs.pin("c", 3)
    runs.restart()
    assert [(pin.name, pin.blocks, pin.expires_at) for pin in sorted_by_name(runs.pins)] == [
        ("a", 2, 50),
        ("c", 1, 100),
    ]
    runs.pins.clear(namespace())
    runs.restart()
    assert runs.names() == []


def test_pins_that_exceed_a_lower_limit_end() -> None:
    runs = Runs()
    runs.pin("a", 0, 1)
    runs.pin("b", 2, 3)
    runs.restart(most=3)
    assert len(runs.names()) == 1
    runs.restart(most=8)
    assert len(runs.names()) == 1


def test_pins_that_take_what_is_guaranteed_to_others_now_end() -> None:
    runs = Runs()
    runs.pin("a", 0, 1)
    cache = recorded_cache(runs.records, 8, 8)
    cache.set_shares([ShareLimits("other", lambda _: False, 7 * PAGE, None)])
    pins = Pins(cache, lambda: runs.now, 8 * PAGE, KeptPins(runs.kept))
    pins.restore()
    assert list(pins) == []
    assert cache.stats().leases == 0


def test_no_room_for_the_hashes_is_a_refusal_that_changes_nothing() -> None:
    runs = Runs()
    small = KeptPins(np.zeros(4608 + 512, np.uint64))
    pins = Pins(runs.cache, lambda: 0.0, 8 * PAGE, small)
    pins.pin("a", "uid 0", namespace(), [(runs.space, keys(0))], 1)
    with pytest.raises(LimitExceeded, match="no room for the hashes of 1 more blocks"):
        pins.pin("b", "uid 0", namespace(), [(runs.space, keys(1))], 1)
    assert [pin.name for pin in pins] == ["a"]
    assert runs.cache.stats().leases == 1


def test_memory_that_is_needed_ends_the_smallest_pin() -> None:
    runs = Runs()
    runs.pin("a", 0, 1)
    runs.pin("b", 2)
    assert runs.pins.give_up() == "b"
    assert runs.pins.give_up() == "a"
    assert runs.pins.give_up() == ""
    runs.restart()
    assert runs.names() == []
