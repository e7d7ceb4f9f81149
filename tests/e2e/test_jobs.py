"""Deadlines, flushes and events of jobs, on both carriers: in raw messages, and by a client where it has a part."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvsidecar.client import Blocks, GroupLayout, HostBuffer, Outcome, Region
from kvsidecar.core.jobs import LOAD_BLOCKS
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.endings import until_declined
from tests.e2e.wire import MINUTES, raw_rank
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Gate, Rank, done, eventually, hashes
from tests.marks import both_protocols, lent_daemon, promise

pytestmark = [both_protocols, lent_daemon]

FIRST_STORE = "store.in_flight@2"
"""The first store that is not the self-test's: what comes behind it waits in the worker's queue."""


@pytest.fixture
def held_daemon(short_dir: Path, gate: Gate, local: bool) -> Iterator[DaemonProcess]:
    """The first store runs until `gate` lets it end."""
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"{FIRST_STORE}={gate}", local=local) as process:
        yield process.wait_ready()


def until_running(daemon: DaemonProcess) -> None:
    eventually(lambda: daemon.metric('kvsidecar_jobs_running{direction="store"}'))


@promise("the copy never starts, and its slots and references are released")
def test_a_copy_that_has_not_started_at_its_deadline_never_does(held_daemon: DaemonProcess, gate: Gate) -> None:
    with raw_rank(held_daemon) as rank:
        rank.store(1)
        rank.store(2, deadline_ms=50)
        rank.store(3, deadline_ms=MINUTES)
        assert rank.ended(1) == [(2, "deadline")]
        gate.let_pass()
        assert sorted(rank.ended(2)) == [(1, ""), (3, "")]
        assert held_daemon.metric("kvsidecar_pool_reserved_bytes") == 0
        assert held_daemon.refused("deadline") == 1
        other = Rank(held_daemon)
        assert [other.hits(job) for job in (1, 2, 3)] == [1, 0, 1]
        other.close()


def test_what_is_sent_behind_a_job_of_very_many_blocks_does_not_overtake_it(short_dir: Path, local: bool) -> None:
    """It begins in several steps: neither the release of its lease, nor a store that needs all of the pool, takes
    blocks away from a load meanwhile."""
    blocks, nbytes = 3 * LOAD_BLOCKS + 1, 4096
    layout = GroupLayout(0, blocks, 0, 1, (Region(0, 0, nbytes, nbytes, nbytes, 1),))
    names, others = hashes(*range(blocks)), hashes(*range(blocks, 2 * blocks))
    buffer = HostBuffer(blocks * nbytes)
    with DaemonProcess(short_dir, "--pool-size", "104MiB", "--slab-size", "1MiB", local=local) as daemon:
        client = daemon.wait_ready().client()
        memory = np.frombuffer(buffer.memory, np.uint8)
        memory[:] = np.random.default_rng(5).integers(0, 256, len(memory), np.uint8)
        wanted = memory.copy()
        client.attach(instance="many", namespace=NAMESPACE, buffers=buffer.kv_buffers(), groups=[layout])
        everywhere = list(range(blocks))
        store = client.store([Blocks(0, names, everywhere)])
        done(client.wait([store], SECONDS)[store])
        found = client.lookup(NAMESPACE, {0: names}, lease_seconds=SECONDS)
        assert found.lease is not None
        memory[:] = 0
        load = client.load([Blocks(0, names, everywhere)], lease=found.lease)
        client.release(found.lease)
        store = client.store([Blocks(0, others, everywhere)])
        assert done(client.wait([load], SECONDS)[load]).copied_blocks == blocks
        assert np.array_equal(memory, wanted)
        client.wait([store], SECONDS)
        assert daemon.metric("kvsidecar_pool_reserved_bytes") == 0
        client.close()
        del memory
        buffer.close()


def test_a_copy_that_runs_at_its_deadline_is_finished(short_dir: Path, gate: Gate, local: bool) -> None:
    second_store = "store.in_flight@3"
    with (
        DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"{second_store}={gate}", local=local) as daemon,
        raw_rank(daemon.wait_ready()) as rank,
    ):
        sent = time.monotonic()
        rank.store(1)
        assert rank.ended(1) == [(1, "")]
        # By then it must have started, which took the first one no longer than all of itself, and whoever stands still
        # for a second meanwhile.
        deadline = max(3.0, 20 * (time.monotonic() - sent))
        sent = time.monotonic()
        rank.store(2, deadline_ms=int(deadline * 1000))
        daemon.wait_log("failpoint")
        while time.monotonic() < sent + 1.1 * deadline:
            assert rank.silent()
        gate.let_pass()
        assert rank.ended(1) == [(2, "")]


def test_a_flush_that_cancels_stops_what_has_not_started_and_nothing_else(
    held_daemon: DaemonProcess, gate: Gate
) -> None:
    with raw_rank(held_daemon) as rank:
        rank.store(1)
        until_running(held_daemon)
        for job in (2, 3):
            rank.store(job)
        flushed = rank.flush(2, mode=pb.Flush.MODE_CANCEL)
        assert list(flushed.pending) == []
        assert rank.ended(1) == [(2, "cancelled")]
        gate.let_pass()
        assert rank.ended(2) == [(1, ""), (3, "")]


def test_a_flush_that_finishes_lets_its_jobs_go_first(held_daemon: DaemonProcess, gate: Gate) -> None:
    with raw_rank(held_daemon) as rank:
        rank.store(1)
        until_running(held_daemon)
        for job in (2, 3, 4):
            rank.store(job)
        rank.ask_flush(4, mode=pb.Flush.MODE_FINISH)
        rank.until_taken()
        gate.let_pass()
        assert list(rank.next("flushed").flushed.pending) == []
        assert [job for job, _ in rank.ended(4)] == [1, 4, 2, 3]


def test_a_flush_names_what_still_runs_at_its_deadline(held_daemon: DaemonProcess, gate: Gate) -> None:
    with raw_rank(held_daemon) as rank:
        rank.store(1)
        assert list(rank.flush(mode=pb.Flush.MODE_FINISH, timeout_ms=20).pending) == [1]
        gate.let_pass()
        assert list(rank.flush(mode=pb.Flush.MODE_FINISH).pending) == []


@promise("Flush before GPU blocks are overwritten while their store may still run")
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


class Mark:
    def __init__(self) -> None:
        self.over = threading.Event()

    def synchronize(self) -> None:
        assert self.over.wait(SECONDS)


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


def test_a_device_without_events_orders_on_the_host_and_says_so(daemon: DaemonProcess) -> None:
    with raw_rank(daemon, [bytes(64)]) as rank:
        assert not rank.registered.device_order
        assert "order stores on the host" in rank.registered.device_order_refused
        rank.store(1, event=1)
        end = rank.next("done").done
        assert end.reason == "invalid_request"
        assert "event 1 is not in this rank's ring of 0" in end.error
        rank.store(2)
        assert rank.ended(1) == [(2, "")]
