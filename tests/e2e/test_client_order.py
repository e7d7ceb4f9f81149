"""Flushes, deadlines and the order of stores, by a client against a real daemon on the host device."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvsidecar.client import DEVICE, Blocks, Outcome
from tests.e2e.endings import until_declined
from tests.harness import SECONDS, DaemonProcess, Gate, Rank, done, eventually, hashes
from tests.marks import both_protocols, lent_daemon

pytestmark = [both_protocols, lent_daemon]


class Mark:
    def __init__(self) -> None:
        self.over = threading.Event()

    def synchronize(self) -> None:
        assert self.over.wait(SECONDS)


class Ring:
    """Events that no daemon on the host can open."""

    handles = (b"\1" * 64,)

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def record(self, index: int) -> None:
        raise AssertionError(f"event {index} was recorded for a daemon that cannot open it")

    def mark(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]


def test_a_daemon_that_cannot_open_events_says_why_and_stores_wait_on_the_host(daemon: DaemonProcess) -> None:
    ring = Ring()
    rank = Rank(daemon, events=ring)
    assert not rank.client.device_order
    assert rank.client.device_order_refused
    job = rank.client.store([Blocks(0, hashes("a"), [0])], after=DEVICE)
    rank.fill(0, "a")  # the kernel that writes the block runs late
    ring.marks[0].over.set()
    done(rank.finish(job))
    done(rank.load("a", at=[1]))
    assert rank.holds(1, "a")
    rank.close()


@pytest.mark.parametrize("cancel", [False, True])
def test_blocks_may_be_overwritten_right_after_a_flush(short_dir: Path, gate: Gate, cancel: bool, local: bool) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@2={gate}", local=local) as daemon:
        rank = Rank(daemon.wait_ready())
        names = ["a", "b", "c", "d", "e"]
        jobs = []
        for block_id, name in enumerate(names):
            rank.fill(block_id, name)
            jobs.append(rank.client.store([Blocks(0, hashes(name), [block_id])]))
        daemon.wait_log("failpoint")
        # All have arrived: a flush that cancels ends here what was not sent.
        eventually(lambda: sum(daemon.get("/status")[1]["jobs"][each] for each in ("queued", "running")) == len(jobs))
        running = frozenset(jobs[:1] if cancel else jobs)
        assert rank.client.flush(jobs, timeout=0.5, cancel=cancel) >= running
        if cancel:  # whenever the daemon has come to it: of what runs on, nothing could be cancelled
            until_declined(daemon, "store", len(jobs) - 1)
        gate.let_pass()
        assert rank.client.flush(jobs, timeout=SECONDS, cancel=cancel) == frozenset()
        rank.kv[:] = 0
        ended = rank.client.wait(jobs, SECONDS)
        stored = [name for name, job in zip(names, jobs, strict=True) if ended[job].outcome is Outcome.DONE]
        if cancel:
            others = [end for end in ended.values() if end.outcome is not Outcome.DONE]
            assert {(end.outcome, end.reason) for end in others} <= {(Outcome.DECLINED, "cancelled")}
            assert others, "nothing was cancelled: the first copy took longer than all messages"
        else:
            assert stored == names
        for name in names:
            assert rank.hits(name) == (name in stored)
        for name in stored:
            done(rank.load(name, at=[7]))
            assert rank.holds(7, name), "the store read after the flush had returned"
        rank.close()


def test_a_flush_does_not_wait_for_the_event_of_another_job(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    rank.fill(0, "a")
    event = Mark()
    waiting = rank.client.store([Blocks(0, hashes("b"), [1])], after=event)
    job = rank.client.store([Blocks(0, hashes("a"), [0])])
    assert rank.client.flush([job], timeout=SECONDS) == frozenset()
    assert rank.client.flush(timeout=0.05) == {waiting}, "a job that still waits has not read its blocks yet"
    event.over.set()
    done(rank.finish(waiting))
    done(rank.finish(job))
    rank.close()


def test_a_copy_that_has_not_started_at_its_deadline_never_does(short_dir: Path, gate: Gate, local: bool) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"load.in_flight@2={gate}", local=local) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a", "b"))
        first = rank.client.load([Blocks(0, hashes("a"), [4])])
        second = rank.client.load([Blocks(0, hashes("b"), [5])], timeout=0.05)
        late = rank.finish(second)
        assert (late.outcome, late.reason) == (Outcome.DECLINED, "deadline")
        gate.let_pass()
        done(rank.finish(first))
        assert rank.holds(4, "a")
        assert not rank.kv[:, 5].any(), "a load was copied after its deadline"
        rank.close()
