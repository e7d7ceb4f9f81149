"""`--verify`: what changes in the pool is not loaded. The bytes are read by the copiers."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import pytest

from kvsidecar.client import Blocks, Outcome
from kvsidecar.pool.kept_files import FILES
from tests.e2e.endings import attached_again, deaths, job_ends, no_leaks, quick, works
from tests.e2e.leftovers import nothing_is_left_of
from tests.e2e.restarts import kill, started
from tests.harness import DaemonProcess, Gate, Rank, done, hashes
from tests.marks import both_protocols, promise
from tests.open_files import open_files

pytestmark = both_protocols


def pool_of(daemon: DaemonProcess) -> Path:
    (pool,) = [path for path, file in open_files(daemon.process.pid).items() if "kvsidecar-pool" in file]
    return pool


def flip_a_bit(pool: Path, content: bytes) -> None:
    """Where these bytes lie in the pool."""
    with open(pool, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(content)
        assert at >= 0
        memory[at] ^= 1


@promise("a miss at its first load, counted, and the slot is quarantined")
def test_a_block_whose_bytes_changed_in_the_pool_is_a_miss(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, "--verify", "always", local=local) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a", "b"))
        done(rank.load("a", "b", at=[4, 5]))
        flip_a_bit(pool_of(daemon), rank.pattern("a").tobytes())
        rank.fill(6, "before")
        wrong = rank.load("a", "b", at=[6, 7])
        assert (wrong.outcome, wrong.reason) == (Outcome.DECLINED, "checksum")
        assert rank.holds(6, "before"), "wrong bytes were loaded"
        assert (rank.hits("a"), rank.hits("b")) == (0, 1)
        assert daemon.refused("checksum") == 1
        done(rank.store("a"))
        works(rank, "b")
        rank.close()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copier_killed_while_it_reads_slots_costs_the_job(
    short_dir: Path, gate: Gate, direction: str, local: bool
) -> None:
    """One hit is one job here: shards are smaller than a slice."""
    failpoint = f"copier.checksum@{0 if direction == 'store' else 1}={gate}"
    flags = ("--verify", "always")
    with no_leaks(), DaemonProcess(short_dir, *flags, KVSIDECAR_FAILPOINTS=failpoint, local=local) as daemon:
        rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local))
        if direction == "load":
            done(rank.store("a"))
        getattr(rank.client, direction)([Blocks(0, hashes("a"), [5])])
        daemon.wait_log("failpoint")
        (copier,) = daemon.copiers()
        os.kill(copier, signal.SIGKILL)
        (end,) = job_ends(rank.client, 1)
        assert (end.outcome, end.reason) == (Outcome.FAILED, "device_lost")
        attached_again(rank, daemon)
        assert deaths(daemon) == 1
        assert rank.hits("a") == (direction == "load"), "a block is readable though its store was not over"
        gate.let_pass()  # the new process counts its hits from 0
        works(rank, "a" if direction == "load" else "b")
        rank.close()
        nothing_is_left_of(daemon)


def test_a_block_whose_bytes_changed_while_no_daemon_ran_is_a_miss(
    short_dir: Path, pool_dir: Path, local: bool
) -> None:
    flags = ("--pool-dir", str(pool_dir), "--verify", "always")
    with started(short_dir, *flags, local=local) as daemon:
        rank = Rank(daemon)
        done(rank.store("a", "b", "c"))
        wrong = rank.pattern("b").tobytes()
        kill(daemon)
        rank.close()
    flip_a_bit(pool_dir / FILES[0], wrong)
    with started(short_dir, *flags, local=local) as daemon:
        assert daemon.get("/ready")[1]["kept_blocks"] == 3
        rank = Rank(daemon)
        for block_id, name in enumerate("abc", 4):
            rank.fill(block_id, "before")
            job = rank.load(name, at=[block_id])
            if name == "b":
                assert (job.outcome, job.reason) == (Outcome.DECLINED, "checksum")
            else:
                done(job)
            assert rank.holds(block_id, "before" if name == "b" else name)
        assert (rank.hits("a"), rank.hits("b"), rank.hits("c")) == (1, 0, 1)
        assert daemon.refused("checksum") == 1
        assert daemon.metric("kvsidecar_pool_quarantined_bytes") > 0
        kill(daemon)
        rank.close()
    with started(short_dir, *flags, local=local) as daemon:
        rank = Rank(daemon)
        assert (rank.hits("a"), rank.hits("b"), rank.hits("c")) == (1, 0, 1), "the miss was forgotten"
        done(rank.store("b"))
        works(rank, "b")
        rank.close()


def test_verify_may_change_between_daemons(short_dir: Path, pool_dir: Path, local: bool) -> None:
    """What is stored while it is off has no checksum, and is loaded as it is; other blocks keep theirs meanwhile."""
    flags = ("--pool-dir", str(pool_dir))
    for verify, name in (("off", "a"), ("always", "b"), ("off", "c")):
        with started(short_dir, *flags, "--verify", verify, local=local) as daemon:
            rank = Rank(daemon)
            done(rank.store(name))
            changed = rank.pattern(name).tobytes()
            kill(daemon)
            rank.close()
        flip_a_bit(pool_dir / FILES[0], changed)
    for verify, wrong in (("off", ""), ("always", "b")):
        with started(short_dir, *flags, "--verify", verify, local=local) as daemon:
            rank = Rank(daemon)
            assert rank.hits("a", "b", "c") == 3
            reasons = {name: rank.load(name, at=[4]).reason for name in "abc"}
            assert reasons == {name: "checksum" if name == wrong else "" for name in "abc"}
            kill(daemon)
            rank.close()
