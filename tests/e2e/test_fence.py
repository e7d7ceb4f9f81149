"""A daemon that hangs is given up: no copy of this rank's memory begins any more, whatever the daemon does later."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsidecar.client import Blocks, Outcome, supervisor
from kvsidecar.types import Direction
from tests.harness import SECONDS, DaemonProcess, Gate, Rank, eventually, hashes
from tests.marks import both_protocols, lent_daemon, promise

pytestmark = lent_daemon

DIRECTIONS = pytest.mark.parametrize("direction", list(Direction))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "HANG_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "HANG_SECONDS", 0.2)


@pytest.fixture
def rank(daemon: DaemonProcess) -> Iterator[Rank]:
    rank = Rank(daemon)
    yield rank
    rank.close()


def submit(rank: Rank, direction: Direction) -> int:
    """Load a into block 1, or store block 1 as b."""
    if direction is Direction.LOAD:
        return rank.client.load([Blocks(0, hashes("a"), [1])], timeout=0.1)
    return rank.client.store([Blocks(0, hashes("b"), [1])], timeout=0.1)


@promise("instead of waited for")
@both_protocols
@DIRECTIONS
def test_a_job_of_a_daemon_that_hangs_ends_and_touches_nothing_later(
    daemon: DaemonProcess, rank: Rank, direction: Direction
) -> None:
    rank.store("a", at=[0])
    rank.fill(1, "b")
    daemon.process.send_signal(signal.SIGSTOP)
    done = rank.finish(submit(rank, direction))
    assert (done.outcome, done.reason) == (Outcome.FAILED, "daemon_lost")
    rank.fill(1, "c")
    daemon.process.send_signal(signal.SIGCONT)
    assert rank.client.wait_attached(SECONDS)
    assert rank.holds(1, "c"), "a load has written over what the engine wrote since"
    assert (rank.hits("a"), rank.hits("b")) == (1, 0), "a store has sealed what it read too late"


@both_protocols
@DIRECTIONS
def test_a_copy_that_is_under_way_is_waited_for(short_dir: Path, local: bool, gate: Gate, direction: Direction) -> None:
    hit = 2 if direction is Direction.LOAD else 3  # behind the two of the self-test, and the store of a
    rules = f"{direction}.in_flight@{hit}={gate}"
    with DaemonProcess(short_dir, local=local, KVSIDECAR_FAILPOINTS=rules) as daemon:
        rank = Rank(daemon.wait_ready())
        rank.store("a", at=[0])
        rank.fill(1, "b")
        job = submit(rank, direction)
        eventually(lambda: not rank.client.attached, "the daemon is given up")
        assert not rank.client.wait([job], 0.2), "its call is not over"
        gate.let_pass()
        done = rank.finish(job)
        assert (done.outcome, done.reason) == (Outcome.FAILED, "daemon_lost")
        rank.fill(1, "c")
        assert rank.client.wait_attached(SECONDS)
        assert rank.holds(1, "c")
        rank.close()


def test_a_copier_that_dies_behind_a_shut_fence_ends_the_jobs(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"load.in_flight@2={gate}") as daemon:
        rank = Rank(daemon.wait_ready())
        rank.store("a", at=[0])
        job = submit(rank, Direction.LOAD)
        eventually(lambda: not rank.client.attached, "the daemon is given up")
        (copier,) = daemon.copiers()
        os.kill(copier, signal.SIGKILL)
        assert rank.finish(job).reason == "daemon_lost"
        rank.close()


def test_one_engine_s_fence_does_not_hold_up_another(daemon: DaemonProcess, rank: Rank) -> None:
    other = Rank(daemon, instance="other")
    rank.client.give_up("a test")
    assert rank.client.wait_attached(SECONDS)
    for name, each in (("x", other), ("y", rank)):
        assert each.store(name, at=[2]).outcome is Outcome.DONE
        assert each.load(name, at=[3]).outcome is Outcome.DONE
    other.close()
