"""A daemon that has taken over blocks serves them while it pins: those in the chunks that are pinned, and no others."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvsidecar.client import Blocks, LookupMode, Outcome, State
from kvsidecar.support import child_process
from tests.e2e.leftovers import nothing_is_left_of
from tests.e2e.restarts import CHUNKS, grpc_health
from tests.harness import (
    NAMESPACE,
    SECONDS,
    SHARD_BYTES,
    DaemonProcess,
    Gate,
    Rank,
    done,
    eventually,
    hashes,
    layout,
    wait_until_ready,
)
from tests.marks import both_protocols, promise

CHUNK = 128 << 10
A_CHUNK = CHUNK // SHARD_BYTES
"""Whole blocks in the first chunk. The next one lies in two chunks."""
NAMES = [f"block {number}" for number in range(6 * CHUNK // SHARD_BYTES + 3)]
"""They lie in this order in the first seven of eight chunks, behind a free slot, which the self-test takes."""
WIDE = layout(num_blocks=len(NAMES))


@pytest.fixture
def load_gate(short_dir: Path) -> Iterator[Gate]:
    (directory := short_dir / "load").mkdir()
    gate = Gate(directory)
    yield gate
    gate.close()


@contextmanager
def taken_over(
    short_dir: Path, pool_dir: Path, failpoints: str, local: bool = True, *, full: bool = False
) -> Iterator[DaemonProcess]:
    """A daemon that has found the blocks of one that was killed, and pins.

    Args:
        full: the first chunk has no free slot.
    """
    other = replace(NAMESPACE, model="other")
    flags = (*CHUNKS, "--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *flags, local=local) as first:
        before = Rank(first.wait_ready(), namespace=other)
        if not full:
            done(before.store("before"))
        rank = Rank(first, groups=WIDE)
        done(rank.store(*NAMES))
        before.client.clear(other)
        for each in (before, rank):
            each.close()
        first.process.kill()
        first.process.wait(SECONDS)
    with DaemonProcess(short_dir, *flags, local=local, KVSIDECAR_FAILPOINTS=failpoints) as daemon:
        yield daemon


def pinned(daemon: DaemonProcess, chunks: int) -> None:
    """Wait until so many chunks are pinned."""
    while daemon.wait_log("pinning")["pinned_bytes"] < chunks * CHUNK:
        pass


def found(rank: Rank) -> list[bool]:
    """Of all blocks, which are hits; the same as a prefix."""
    flags = rank.client.lookup(NAMESPACE, {0: hashes(*NAMES)}, mode=LookupMode.BITMAP).groups[0].found
    assert rank.hits(*NAMES) == sum(flags)
    return list(flags)


def first_chunks(count: int) -> list[bool]:
    return [number < count * CHUNK // SHARD_BYTES - 1 for number in range(len(NAMES))]


def load_at_end(rank: Rank, name: str) -> int:
    return rank.client.load([Blocks(0, hashes(name), [len(NAMES) - 1])])


def held_load(rank: Rank, daemon: DaemonProcess, gate: Gate) -> int:
    """A load of a kept block that is in flight."""
    job = load_at_end(rank, NAMES[0])
    (copier,) = daemon.copiers()
    eventually(lambda: gate.holds(copier), "the load is in flight")
    return job


@promise("blocks in pinned chunks are hits and load with the right bytes")
@both_protocols
def test_kept_blocks_are_hit_and_loaded_while_the_pool_is_pinned(
    short_dir: Path, pool_dir: Path, gate: Gate, local: bool
) -> None:
    with taken_over(short_dir, pool_dir, f"pool.pin_chunk={gate}", local) as daemon:
        daemon.wait_log("failpoint")
        rank = Rank(daemon, groups=WIDE)
        nothing = rank.client.lookup(NAMESPACE, {0: hashes(*NAMES)}, lease_seconds=600)
        assert (nothing.ready, nothing.groups[0].hits, nothing.lease) == (False, 0, None), "nothing is pinned"
        assert not daemon.get("/ready")[1]["serves_kept"]
        for more, chunks in ((1, 1), (1, 2), (3, 5)):
            gate.let_pass(more)
            pinned(daemon, chunks)
            if chunks == 1:
                assert daemon.wait_log("serving kept blocks")["pinned_bytes"] == CHUNK
            assert found(rank) == first_chunks(chunks)
        names = NAMES[: 5 * CHUNK // SHARD_BYTES - 1]
        answer = rank.client.lookup(NAMESPACE, {0: hashes(*NAMES)}, lease_seconds=600)
        assert (answer.ready, answer.groups[0].hits) == (True, len(names))
        assert answer.lease is not None
        done(rank.load(*names, at=list(range(len(names))), lease=answer.lease))
        assert all(rank.holds(block_id, name) for block_id, name in enumerate(names))
        above = rank.load(NAMES[-1], at=[0])
        assert (above.outcome, above.reason) == (Outcome.DECLINED, "not_found")
        stored = rank.store("new", at=[0])
        assert (stored.outcome, stored.reason) == (Outcome.DECLINED, "not_ready")

        code, ready = daemon.get("/ready")
        assert (code, ready["ready"], ready["state"]) == (503, False, "pinning")
        assert (ready["serves_kept"], ready["pinned_bytes"]) == (True, 5 * CHUNK)
        assert ready["reason"] == "the pool is being pinned; kept blocks in pinned chunks are served"
        assert rank.client.readiness.serves_kept
        assert rank.client.readiness.state is State.PINNING
        assert daemon.metric("kvsidecar_serves_kept_blocks") == 1
        assert daemon.metric("kvsidecar_pool_pinned_bytes") == 5 * CHUNK
        assert grpc_health(daemon) == 2, "NOT_SERVING"
        shown = subprocess.run(
            [sys.executable, "-m", "kvsidecar", "status", "--socket", daemon.socket],
            capture_output=True, text=True, timeout=SECONDS, env=child_process.environment(COLUMNS="200"),
        )  # fmt: skip
        assert "kept blocks in pinned chunks are served: 640 KiB of 1 MiB" in shown.stdout

        gate.let_pass(3)
        wait_until_ready(rank.client)
        assert found(rank) == first_chunks(8)
        done(rank.load(*NAMES, at=list(range(len(NAMES)))))
        assert all(rank.holds(block_id, name) for block_id, name in enumerate(NAMES))
        assert not daemon.get("/ready")[1]["serves_kept"]
        assert daemon.metric("kvsidecar_serves_kept_blocks") == 0
        done(rank.store("new", at=[0]))
        rank.close()
        nothing_is_left_of(daemon)


def test_a_start_without_kept_blocks_serves_nothing_before_it_is_ready(
    short_dir: Path, pool_dir: Path, gate: Gate
) -> None:
    flags = (*CHUNKS, "--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *flags, KVSIDECAR_FAILPOINTS=f"pool.pin_chunk={gate}") as daemon:
        gate.let_pass(7)
        pinned(daemon, 7)
        rank = Rank(daemon)
        assert not rank.client.lookup(NAMESPACE, {0: hashes("a")}).ready
        gate.let_pass()
        wait_until_ready(rank.client)
        assert not [line for line in daemon.log if line["event"] == "serving kept blocks"]
        rank.close()


@pytest.mark.parametrize("direction", ["load", "store"])
def test_nothing_is_served_by_a_copier_that_fails_its_self_test(
    short_dir: Path, pool_dir: Path, direction: str
) -> None:
    with taken_over(short_dir, pool_dir, f"{direction}.in_flight@0=raise(planted)") as daemon:
        assert "planted" in daemon.wait_log("not ready")["reason"]
        assert not [line for line in daemon.log if line["event"] == "serving kept blocks"]
        assert daemon.get("/ready")[1]["state"] == "failed"
        rank = Rank(daemon, groups=WIDE, retry=True)  # the copier that comes next may have to come first
        assert not any(found(rank))
        rank.close()


def test_the_self_test_takes_a_place_in_the_first_chunk_from_the_oldest_block_there(
    short_dir: Path, pool_dir: Path, gate: Gate
) -> None:
    """Of a pool without a free place in this chunk."""
    with taken_over(short_dir, pool_dir, f"pool.pin_chunk@1={gate}", full=True) as daemon:
        daemon.wait_log("serving kept blocks")
        rank = Rank(daemon, groups=WIDE)
        flags = rank.client.lookup(NAMESPACE, {0: hashes(*NAMES)}, mode=LookupMode.BITMAP).groups[0].found
        assert list(flags) == [number < A_CHUNK for number in range(len(NAMES))]
        there = [number for number, flag in enumerate(flags) if flag]
        done(rank.load(*[NAMES[number] for number in there], at=there))
        assert all(rank.holds(number, NAMES[number]) for number in there)
        rank.close()
        gate.let_pass()


@both_protocols
def test_a_pin_that_fails_waits_for_the_loads_before_it_unpins(
    short_dir: Path, pool_dir: Path, gate: Gate, load_gate: Gate, local: bool
) -> None:
    failpoints = f"pool.pin_chunk@4={gate};copier.pin@4=raise(no more pages);load.in_flight@1={load_gate}"
    with taken_over(short_dir, pool_dir, failpoints, local) as daemon:
        daemon.wait_log("serving kept blocks")
        pinned(daemon, 4)
        rank = Rank(daemon, groups=WIDE)
        job = held_load(rank, daemon, load_gate)
        gate.let_pass()
        eventually(lambda: not daemon.get("/ready")[1]["serves_kept"])
        for _ in range(20):  # while it could unpin
            declined = rank.finish(load_at_end(rank, NAMES[1]))
            assert (declined.outcome, declined.reason) == (Outcome.DECLINED, "not_ready")
            assert not rank.client.lookup(NAMESPACE, {0: hashes(NAMES[0])}).ready
            assert daemon.locked_kib() == 4 * CHUNK >> 10, "unpinned under a load"
        assert daemon.get("/ready")[1]["state"] == "pinning"
        load_gate.let_pass()
        done(rank.finish(job))
        assert rank.holds(len(NAMES) - 1, NAMES[0])
        reason = daemon.wait_log("not ready")["reason"]
        assert "chunk 5 of 8" in reason
        assert "no more pages" in reason
        assert daemon.locked_kib() == 0
        assert (daemon.get("/ready")[1]["state"], found(rank)) == ("failed", [False] * len(NAMES))
        rank.close()


def test_sigterm_while_kept_blocks_are_loaded_waits_for_the_loads(
    short_dir: Path, pool_dir: Path, gate: Gate, load_gate: Gate
) -> None:
    failpoints = f"pool.pin_chunk@4={gate};load.in_flight@1={load_gate}"
    with taken_over(short_dir, pool_dir, failpoints) as daemon:
        daemon.wait_log("serving kept blocks")
        rank = Rank(daemon, groups=WIDE)
        job = held_load(rank, daemon, load_gate)
        eventually(lambda: gate.holds(daemon.process.pid))
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_log("stopping")
        gate.let_pass()
        eventually(lambda: daemon.locked_kib() == 5 * CHUNK >> 10)
        for _ in range(20):  # while it could unpin
            assert daemon.get("/ready")[1]["state"] == "draining"
            assert daemon.locked_kib() == 5 * CHUNK >> 10, "unpinned under a load"
        load_gate.let_pass()
        done(rank.finish(job))
        assert rank.holds(len(NAMES) - 1, NAMES[0])
        assert daemon.process.wait(SECONDS) == 0
        rank.close()


def test_a_copier_that_dies_while_kept_blocks_are_served_is_replaced_and_serves_them(
    short_dir: Path, pool_dir: Path, gate: Gate, load_gate: Gate
) -> None:
    failpoints = f"pool.pin_chunk@4={gate};load.in_flight@1=kill"
    with taken_over(short_dir, pool_dir, failpoints) as daemon:
        daemon.wait_log("serving kept blocks")
        eventually(lambda: gate.holds(daemon.process.pid))
        rank = Rank(daemon, groups=WIDE)
        lost = rank.finish(load_at_end(rank, NAMES[0]))
        assert (lost.outcome, lost.reason) == (Outcome.FAILED, "device_lost")
        daemon.wait_log("the copier works")
        daemon.wait_log("rank attached")
        assert rank.client.wait_attached(SECONDS)
        assert found(rank) == first_chunks(4)
        done(rank.load(NAMES[0], at=[0]))
        assert rank.holds(0, NAMES[0])
        gate.let_pass()
        wait_until_ready(rank.client)
        assert found(rank) == first_chunks(8)
        rank.close()
