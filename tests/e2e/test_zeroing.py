"""``--zero-freed``, read off the pool's own bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvsidecar.client import Blocks
from kvsidecar.pool.kept_files import FILES
from tests.cli.command import run
from tests.harness import NAMESPACE, SECONDS, SHARD_BYTES, DaemonProcess, Gate, Rank, done, eventually, hashes, layout
from tests.marks import promise

UNZEROED = "kvsidecar_pool_unzeroed_bytes"
SHORT = layout(row_bytes=3000)
"""A shard has 9000 bytes, its slot 12 KiB."""


def zeroes(short_dir: Path, pool_dir: Path, *more: str, **environment: str) -> DaemonProcess:
    return DaemonProcess(short_dir, "--zero-freed", "on", "--pool-dir", str(pool_dir), *more, **environment)


def all_zeroed(daemon: DaemonProcess) -> None:
    eventually(lambda: daemon.metric(UNZEROED) == 0)


def pool(pool_dir: Path) -> npt.NDArray[np.uint8]:
    return np.fromfile(pool_dir / FILES[0], np.uint8)


def holds_only(pool_dir: Path, rank: Rank, *names: str) -> bool:
    """Whether these blocks are in the pool, and not a byte of anything else."""
    rest = pool(pool_dir)
    for name in names:
        block = rank.pattern(name).tobytes()
        at = rest.tobytes().find(block)
        if at < 0:
            return False
        rest[at : at + len(block)] = 0
    return not rest.any()


@promise("zeroes the bytes of a block soon after the block leaves the pool")
@pytest.mark.parametrize("groups", [layout(), SHORT], ids=["whole pages", "short"])
def test_of_what_is_cleared_or_evicted_no_byte_stays(short_dir: Path, pool_dir: Path, groups: object) -> None:
    with zeroes(short_dir, pool_dir) as daemon:
        rank = Rank(daemon.wait_ready(), groups=groups)  # type: ignore[arg-type]
        for number in range(100):  # of which 85 fit
            done(rank.store(f"before {number}", at=[0]))
        rank.client.clear(NAMESPACE)
        done(rank.store("a", "b", "c"))
        all_zeroed(daemon)
        assert holds_only(pool_dir, rank, "a", "b", "c")
        assert run("clear", "--all", "--yes", "--socket", daemon.socket).returncode == 0
        all_zeroed(daemon)
        assert not pool(pool_dir).any()
        assert daemon.metric("kvsidecar_zeroed_bytes_total") > 80 * SHARD_BYTES
        rank.close()


def test_without_the_option_the_bytes_stay(short_dir: Path, pool_dir: Path) -> None:
    """What the others look for can be found."""
    with DaemonProcess(short_dir, "--pool-dir", str(pool_dir)) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        rank.client.clear(NAMESPACE)
        assert holds_only(pool_dir, rank, "a")
        assert daemon.metric(UNZEROED) == 0
        rank.close()


def test_a_store_into_a_slot_that_is_being_zeroed_waits_and_keeps_its_bytes(
    short_dir: Path, pool_dir: Path, gate: Gate
) -> None:
    with zeroes(short_dir, pool_dir, KVSIDECAR_FAILPOINTS=f"zeroing.slice={gate}") as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        rank.client.clear(NAMESPACE)
        daemon.wait_log("failpoint")
        assert daemon.metric(UNZEROED) == SHARD_BYTES
        assert "12 KiB to be zeroed" in run("status", "--socket", daemon.socket).stdout
        rank.fill(0, "b")
        waits = rank.client.store([Blocks(0, hashes("b"), [0])])
        done(rank.store("c", at=[1]))  # behind it, into another slot
        assert (rank.hits("b"), rank.hits("c")) == (0, 1), "it does not wait"
        gate.let_pass(1000)
        done(rank.finish(waits))
        all_zeroed(daemon)
        done(rank.load("b", "c", at=[2, 3]))
        assert rank.holds(2, "b")
        assert rank.holds(3, "c")
        assert holds_only(pool_dir, rank, "b", "c")
        rank.close()


def test_an_engine_that_ends_while_its_store_waits_leaves_nothing(short_dir: Path, pool_dir: Path, gate: Gate) -> None:
    with zeroes(short_dir, pool_dir, KVSIDECAR_FAILPOINTS=f"zeroing.slice={gate}") as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        rank.client.clear(NAMESPACE)
        daemon.wait_log("failpoint")
        rank.fill(0, "b")
        rank.client.store([Blocks(0, hashes("b"), [0])])
        done(rank.store("c", at=[1]))
        assert not rank.client.close(0.0), "the daemon does not let go of the memory while the store waits"
        gate.let_pass(1000)
        eventually(lambda: not daemon.mapped_buffers())  # the client has no connection any more that could tell it
        all_zeroed(daemon)
        assert daemon.metric("kvsidecar_pool_reserved_bytes") == 0
        again = Rank(daemon)
        there = [name for name in "bc" if again.hits(name)]
        assert "c" in there
        all_zeroed(daemon)
        assert holds_only(pool_dir, again, *there)
        again.close()


def test_what_a_killed_daemon_had_not_zeroed_the_next_one_zeroes(short_dir: Path, pool_dir: Path, gate: Gate) -> None:
    with zeroes(short_dir, pool_dir, KVSIDECAR_FAILPOINTS=f"zeroing.slice={gate}") as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a", "b", "c"))
        assert rank.client.clear(NAMESPACE) == 3
        done(rank.store("d"))
        daemon.wait_log("failpoint")
        daemon.process.kill()
        daemon.process.wait(SECONDS)
        assert not holds_only(pool_dir, rank, "d"), "there is nothing to zero"
        rank.close()
    with zeroes(short_dir, pool_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        assert rank.hits("d") == 1
        all_zeroed(daemon)
        assert holds_only(pool_dir, rank, "d")
        done(rank.load("d", at=[3]))
        assert rank.holds(3, "d")
        rank.close()


def test_what_could_not_be_zeroed_is_zeroed_later_and_the_error_is_heard(short_dir: Path, pool_dir: Path) -> None:
    with zeroes(short_dir, pool_dir, KVSIDECAR_FAILPOINTS="zeroing.slice@0=raise(planned)") as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        rank.client.clear(NAMESPACE)
        assert daemon.wait_log("task failed")["task"] == "zeroing"
        all_zeroed(daemon)
        assert not pool(pool_dir).any()
        assert daemon.metric("kvsidecar_unexpected_errors_total") == 1
        rank.close()
