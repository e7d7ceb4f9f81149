"""What is left of a day's budget of writes outlives the process, on whatever clock there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsidecar.tiers.disk.backend import DiskBackend
from kvsidecar.tiers.disk.kept_budget import BUDGET, KeptBudget, Now
from kvsidecar.tiers.policy import DAY_SECONDS
from tests.tiers.support import PAGE, space, write

PER_DAY = 86_400
"""A byte a second."""


class Machine:
    """A directory, and clocks that a test sets."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, Now("one boot", 1000.0, 1e9)
        self.directory = os.open(path, os.O_RDONLY)

    def budget(self) -> KeptBudget:
        """Of another process: the one before was killed."""
        return KeptBudget(self.directory, self.path, PER_DAY, lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now = self.now._replace(since_boot=self.now.since_boot + seconds, wall=self.now.wall + seconds)

    def set_clock(self, by: float) -> None:
        self.now = self.now._replace(wall=self.now.wall + by)

    def reboot(self, seconds: float) -> None:
        self.now = Now("another boot", 10.0, self.now.wall + seconds)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    os.close(machine.directory)


def test_a_start_does_not_fill_it_up(machine: Machine) -> None:
    budget = machine.budget()
    assert budget.left() == PER_DAY
    budget.spend(80_000)
    for _ in range(5):
        budget = machine.budget()
        assert budget.left() == 6400
    machine.wait(100)
    assert budget.left() == machine.budget().left() == 6500
    machine.wait(2 * DAY_SECONDS)
    assert machine.budget().left() == PER_DAY


@pytest.mark.parametrize("by", [-7200.0, +7200.0])
def test_a_clock_that_is_set_within_a_boot_does_not_matter(machine: Machine, by: float) -> None:
    machine.budget().spend(80_000)
    machine.set_clock(by)
    assert machine.budget().left() == 6400
    machine.wait(100)
    assert machine.budget().left() == 6500


def test_over_a_reboot_the_wall_clock_counts(machine: Machine) -> None:
    machine.budget().spend(80_000)
    machine.reboot(600)
    assert machine.budget().left() == 7000


def test_a_clock_that_goes_back_over_a_reboot_gives_nothing(machine: Machine) -> None:
    machine.budget().spend(80_000)
    machine.reboot(-1e6)
    assert machine.budget().left() == 6400
    machine.wait(100)
    assert machine.budget().left() == 6500


def cut(file: Path) -> None:
    os.truncate(file, 0)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[12] ^= 1
    file.write_bytes(data)


def link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


@pytest.mark.parametrize("damage", [cut, flip, link])
def test_what_cannot_be_read_is_taken_for_spent(machine: Machine, damage: Callable[[Path], None]) -> None:
    machine.budget()
    damage(machine.path / BUDGET)
    budget = machine.budget()
    assert budget.left() == 0
    machine.wait(100)
    assert budget.left() == machine.budget().left() == 100


def test_the_engine_keeps_what_it_writes_before_it_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_tier() -> DiskBackend:
        return DiskBackend(
            tmp_path / "tier", 64 * PAGE, slab_bytes=16 * PAGE, lock_seconds=0, write_bytes_per_day=8 * PAGE
        )

    tier = open_tier()
    assert tier.stats().write_bytes_left == 8 * PAGE
    write(tier, space(), [1, 2])
    left = tier.stats().write_bytes_left
    assert left is not None
    assert 6 * PAGE <= left < 7 * PAGE
    write(tier, space(), [1, 2])
    assert tier.stats().write_bytes_left == pytest.approx(left, abs=PAGE - 1), "what is there is not written again"

    def killed(*_: object) -> None:
        raise OSError("killed")

    monkeypatch.setattr(tier._extents, "write", killed)
    with pytest.raises(OSError, match="killed"):
        write(tier, space(), [3])
    tier.close()
    tier = open_tier()
    left = tier.stats().write_bytes_left
    assert left is not None
    assert 5 * PAGE <= left < 6 * PAGE
    tier.close()
