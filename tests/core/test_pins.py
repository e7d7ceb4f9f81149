"""Pins: blocks that stay, as long and as many as they may."""

from __future__ import annotations

import pytest

from kvsidecar.core.hashes import PackedHashes
from kvsidecar.core.lookups import LookupService
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.pins import Pins
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.errors import InvalidRequest, LimitExceeded, Unavailable
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
