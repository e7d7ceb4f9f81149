"""Blocks that expire, by their share or by the request that stored them, also across a restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsidecar.client import Blocks
from kvsidecar.types import MAX_IDLE_SECONDS
from tests.cli.command import hold_blocks, seconds_left
from tests.harness import NAMESPACE, DaemonProcess, Rank, done, eventually, hashes
from tests.marks import promise

SECRET = dataclasses.replace(NAMESPACE, model="secret/llama")
SHARES = """
[[share]]
name = "secret"
namespaces = ["secret/*"]
ttl = 2
"""


@promise("guaranteed and maximum shares of the pool; expiry")
def test_blocks_expire_and_a_restart_does_not_give_them_more_time(short_dir: Path, pool_dir: Path) -> None:
    file = short_dir / "kvsidecar.toml"
    file.write_text(SHARES)
    flags = ("--config", str(file), "--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *flags) as daemon:
        daemon.wait_ready()
        rank, secret = Rank(daemon), Rank(daemon, namespace=SECRET)
        done(secret.store("a"))
        done(rank.store("kept", at=[0]))
        job = rank.client.store([Blocks(0, hashes("short"), [0])], ttl=1.5)
        done(rank.finish(job))
        eventually(lambda: not secret.hits("a"))
        eventually(lambda: not rank.hits("short"))
        eventually(lambda: daemon.metric("kvsidecar_expired_blocks_total") == 2)
        assert rank.hits("kept") == 1
        done(secret.store("b"))
        daemon.process.kill()
        daemon.process.wait()
    with DaemonProcess(short_dir, *flags) as daemon:
        daemon.wait_ready()
        rank, secret = Rank(daemon), Rank(daemon, namespace=SECRET)
        eventually(lambda: not secret.hits("b"))
        assert rank.hits("kept") == 1


CLOCKS = """
import os, time

set_by, suspended = int(os.environ["SET_BY"]), int(os.environ["SUSPENDED"])
real, real_nanoseconds = time.time, time.time_ns
time.time = lambda: real() + set_by
time.time_ns = lambda: real_nanoseconds() + 10**9 * set_by
clock, clock_nanoseconds = time.clock_gettime, time.clock_gettime_ns
time.clock_gettime = lambda which: clock(which) + suspended * (which == time.CLOCK_BOOTTIME)
time.clock_gettime_ns = lambda which: clock_nanoseconds(which) + 10**9 * suspended * (which == time.CLOCK_BOOTTIME)
"""


@pytest.fixture
def daemon_at(short_dir: Path, pool_dir: Path, tmp_path: Path) -> Callable[..., DaemonProcess]:
    """Starts a daemon for which the clock of the day is set by so many seconds, or as many have passed since the boot
    in which the machine was suspended."""
    (tmp_path / "sitecustomize.py").write_text(CLOCKS)

    def start(*, set_by: int = 0, suspended: int = 0) -> DaemonProcess:
        clocks = {"PYTHONPATH": str(tmp_path), "SET_BY": str(set_by), "SUSPENDED": str(suspended)}
        return DaemonProcess(short_dir, "--pool-dir", str(pool_dir), **clocks).wait_ready()

    return start


def test_a_clock_that_is_set_between_two_daemons_gives_no_block_and_no_hold_other_times(
    daemon_at: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    with daemon_at() as daemon:
        rank = Rank(daemon)
        done(rank.store("held"))
        hold_blocks(daemon, tmp_path / "hashes", "prompt", "held", seconds=3600)
        done(rank.finish(rank.client.store([Blocks(0, hashes("short"), [0])], ttl=5)))
        done(rank.finish(rank.client.store([Blocks(0, hashes("long"), [0])], ttl=3600)))
        daemon.process.kill()
        daemon.process.wait()
    with daemon_at(set_by=-7200) as daemon:
        rank = Rank(daemon)
        eventually(lambda: not rank.hits("short"))
        assert 0 < seconds_left(daemon)["prompt"] < 3600
        daemon.process.kill()
        daemon.process.wait()
    with daemon_at(set_by=7200) as daemon:
        rank = Rank(daemon)
        assert 0 < seconds_left(daemon)["prompt"] < 3600
        assert rank.hits("long") == 1


def test_the_time_in_which_the_machine_is_suspended_counts_for_blocks_and_holds(
    daemon_at: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    with daemon_at() as daemon:
        rank = Rank(daemon)
        done(rank.store("held"))
        hold_blocks(daemon, tmp_path / "hashes", "hour", "held", seconds=3600)
        hold_blocks(daemon, tmp_path / "hashes", "day", "held", seconds=86400)
        for name, hours in (("hour", 1), ("day", 24)):
            done(rank.finish(rank.client.store([Blocks(0, hashes(name), [0])], ttl=3600 * hours)))
        daemon.process.kill()
        daemon.process.wait()
    with daemon_at(set_by=7200, suspended=7200) as daemon:
        rank = Rank(daemon)
        eventually(lambda: not rank.hits("hour"))
        assert rank.hits("day") == 1
        left = seconds_left(daemon)
        assert set(left) == {"day"}
        assert left["day"] <= 86400 - 7200


def test_blocks_expire_that_nobody_uses_also_after_a_restart(short_dir: Path, pool_dir: Path, local: bool) -> None:
    flags = ("--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *flags, local=local) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        done(rank.store("kept", at=[0]))
        idle = rank.client.store([Blocks(0, hashes("idle"), [2])], idle_ttl=0.5)
        done(rank.finish(idle))
        eventually(lambda: daemon.metric("kvsidecar_expired_blocks_total") == 1)
        assert [rank.hits(name) for name in ("idle", "kept")] == [0, 1]
        again = rank.client.store([Blocks(0, hashes("again"), [2])], idle_ttl=1)
        done(rank.finish(again))
        daemon.process.kill()
        daemon.process.wait()
    with DaemonProcess(short_dir, *flags, local=local) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        eventually(lambda: not rank.hits("again"))
        assert rank.hits("kept") == 1


def test_a_client_refuses_a_time_without_a_use_that_no_record_can_hold(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    for wrong in (0, -1, MAX_IDLE_SECONDS + 1, float("nan")):
        with pytest.raises(ValueError, match="idle_ttl is"):
            rank.client.store([Blocks(0, hashes("a"), [0])], idle_ttl=wrong)
    done(rank.finish(rank.client.store([Blocks(0, hashes("a"), [0])], idle_ttl=MAX_IDLE_SECONDS)))
    assert rank.hits("a") == 1
    rank.close()
