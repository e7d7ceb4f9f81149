"""A real daemon with a disk behind its pool: what is used again is written, and comes back."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from kvsidecar.cache.slots import size_class
from kvsidecar.client import LookupMode, LookupResult
from kvsidecar.tiers.disk.directory import EXTENTS
from kvsidecar.types import UNASSIGNED
from tests.cli.command import run
from tests.e2e.disks import (
    POOL_BLOCKS,
    TIER,
    disk_daemon,
    evict_all,
    fetched,
    keep_on_disk,
    tier_metric,
    tier_pid,
    written,
)
from tests.e2e.restarts import owners_in
from tests.harness import NAMESPACE, SECONDS, SHARD_BYTES, DaemonProcess, Gate, Rank, done, eventually, hashes
from tests.marks import promise


@promise("a local disk, which survives kills and reboots")
def test_a_block_that_was_evicted_comes_back_from_disk(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a", "b", "c")
        evict_all(rank)
        assert rank.hits("a", "b", "c") == 0
        assert fetched(rank, "a", "b", "c", "d").groups[0].hits == 3
        done(rank.load("a", "b", "c", at=[0, 1, 2]))
        assert all(rank.holds(at, name) for at, name in enumerate(("a", "b", "c")))
        rank.close()


def test_a_restart_does_not_begin_another_days_budget_of_writes(short_dir: Path) -> None:
    per_day, stored, in_all = 6, 4, 0
    for number in range(3):
        with disk_daemon(short_dir, "--disk-writes-per-day", str(per_day * SHARD_BYTES)) as daemon:
            rank = Rank(daemon.wait_ready())
            eventually(lambda daemon=daemon: tier_metric(daemon, "up") == 1)
            names = [f"{number} {each}" for each in range(stored)]
            done(rank.store(*names))
            done(rank.load(*names, at=list(range(stored))))
            wanted = min(stored, per_day - in_all)
            eventually(lambda daemon=daemon, wanted=wanted: written(daemon) == wanted)
            assert tier_metric(daemon, "unwritten_blocks_total", reason="budget") == stored - wanted
            in_all += wanted
            daemon.process.kill()
            daemon.process.wait()
    assert in_all == per_day


def test_of_a_window_only_the_blocks_that_are_wanted_come_back(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a", "b", "d")
        evict_all(rank)
        names, held = hashes("a", "b", "c", "d", "e"), (True, True, False, True, False)
        wanted: tuple[bool, ...] = ()

        def look_up() -> LookupResult:
            return rank.client.lookup(
                rank.namespace,
                {0: names},
                mode=LookupMode.BITMAP,
                fetch_seconds=60.0,
                wanted={0: wanted},
                fetch_tokens=1 << 20,
            )

        eventually(lambda: look_up().groups[0].held == held)
        assert tier_metric(daemon, "copied_blocks_total", direction="read") == 0
        wanted = (False, True, True, True)
        eventually(lambda: look_up().groups[0].found == (False, True, False, False, False))
        assert not eventually(lambda: not look_up().coming and look_up()).groups[0].coming, "the disk has no c before d"
        wanted = (False, False, False, True)
        eventually(lambda: look_up().groups[0].found == (False, True, False, True, False))
        assert look_up().groups[0].held == (True, False, False, False, False)
        assert tier_metric(daemon, "copied_blocks_total", direction="read") == 2
        done(rank.load("b", "d", at=[0, 1]))
        assert rank.holds(0, "b")
        assert rank.holds(1, "d")
        rank.close()


def test_a_share_has_its_maximum_of_the_disk_and_a_reload_changes_it(short_dir: Path) -> None:
    config, extent = short_dir / "kvsidecar.toml", size_class(SHARD_BYTES)

    def write(most: str) -> None:
        config.write_text(f'[[share]]\nname = "a"\nnamespaces = ["{NAMESPACE.model}"]\n{most}\n')

    write(f"disk_max = {4 * extent}")
    with disk_daemon(short_dir, "--config", str(config), "--disk-admission=all") as daemon:
        rank = Rank(daemon.wait_ready())
        eventually(lambda: tier_metric(daemon, "up") == 1)

        def store(first: int) -> None:
            for number in range(first, first + 12):
                before = written(daemon)
                done(rank.store(str(number)))
                eventually(lambda: written(daemon) == before + 1)  # noqa: B023  # called at once

        store(0)
        eventually(lambda: tier_metric(daemon, "used_bytes") == 4 * extent)
        write(f"disk_max = {10 * extent}")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_log("settings reloaded")
        store(100)
        eventually(lambda: tier_metric(daemon, "used_bytes") == 10 * extent)
        write('disk_max = "many"')
        daemon.process.send_signal(signal.SIGHUP)
        assert "disk_max" in daemon.wait_log("settings not reloaded")["reason"]
        rank.close()


def test_what_is_guaranteed_on_the_disk_stays_over_restarts_and_a_reload_changes_it(short_dir: Path) -> None:
    config, extent = short_dir / "kvsidecar.toml", size_class(SHARD_BYTES)
    other = dataclasses.replace(NAMESPACE, model="other")

    def write(guaranteed: str) -> None:
        of = f'[[share]]\nname = "a"\nnamespaces = ["{NAMESPACE.model}"]\ndisk_guaranteed = {guaranteed}\n'
        config.write_text(of)

    def store(daemon: DaemonProcess, rank: Rank, *names: object) -> None:
        for name in names:
            before = written(daemon)
            done(rank.store(name))
            eventually(lambda: written(daemon) == before + 1)  # noqa: B023  # called at once

    def use(daemon: DaemonProcess) -> dict[str, float]:
        return {share: tier_metric(daemon, "share_used_bytes", share=share) / extent for share in ("a", UNASSIGNED)}

    size = f"--disk-size={20 * extent}"
    write(str(5 * extent))
    flags = ("--config", str(config), "--disk-admission=all", size)
    with disk_daemon(short_dir, *flags) as daemon:
        rank = Rank(daemon.wait_ready())
        eventually(lambda: tier_metric(daemon, "up") == 1)
        store(daemon, rank, *range(8))
        rank.close()
    with disk_daemon(short_dir, *flags) as daemon:
        rank = Rank(daemon.wait_ready(), namespace=other)
        eventually(lambda: tier_metric(daemon, "up") == 1)
        eventually(lambda: "kvsidecar_tier_share_used_bytes{" in daemon.get("/metrics")[1])
        store(daemon, rank, *range(30))
        eventually(lambda: use(daemon) == {"a": 5, UNASSIGNED: 15})
        client = daemon.client()
        (tier,) = client.status().tiers
        assert [(each.name, each.used_bytes, each.guaranteed_bytes) for each in tier.shares] == [
            (UNASSIGNED, 15 * extent, 0),
            ("a", 5 * extent, 5 * extent),
        ]
        client.close()
        table = run("status", "--socket", daemon.socket).stdout
        assert "Shares of the disk" in table
        write(str(2 * extent))
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_log("settings reloaded")
        store(daemon, rank, *range(100, 130))
        eventually(lambda: use(daemon) == {"a": 2, UNASSIGNED: 18})
        write(str(21 * extent))
        daemon.process.send_signal(signal.SIGHUP)
        assert "of the disk together; it has" in daemon.wait_log("settings not reloaded")["reason"]
        assert tier_metric(daemon, "share_guaranteed_bytes", share="a") == 2 * extent
        rank.close()


def test_a_share_of_a_disk_that_is_not_there_stops_the_start(short_dir: Path) -> None:
    share = "[{name='a', namespaces=['*'], disk_max='1MiB'}]"
    socket = ["--socket", str(short_dir / "kvs.sock"), "--http-port", "0"]
    refused = run("serve", "--device", "host", *socket, "--share", share)
    assert refused.returncode == 78
    assert refused.stderr.endswith("kvsidecar: share 'a' has disk_max, but there is no disk tier (--disk-dir)\n")
    assert "Traceback" not in refused.stderr


def test_a_block_is_written_before_it_is_evicted(short_dir: Path) -> None:
    with disk_daemon(short_dir, "--disk-admission=on_evict") as daemon:
        rank = Rank(daemon.wait_ready())
        eventually(lambda: tier_metric(daemon, "up") == 1)
        done(rank.store("a", "b", "c"))
        assert written(daemon) == 0
        for stored in range(4, 4 + POOL_BLOCKS):
            done(rank.store(f"other {stored}"))
            eventually(lambda: written(daemon) >= stored - (POOL_BLOCKS - 2))  # noqa: B023  # called at once
        assert rank.hits("a", "b", "c") == 0
        assert tier_metric(daemon, "unwritten_blocks_total", reason="queue") == 0
        assert fetched(rank, "a", "b", "c").groups[0].hits == 3
        done(rank.load("a", "b", "c", at=[0, 1, 2]))
        assert all(rank.holds(at, name) for at, name in enumerate(("a", "b", "c")))
        rank.close()


@promise("which survives kills and reboots")
@pytest.mark.parametrize("copied", [False, True])
def test_the_disk_outlives_the_daemon_and_a_copy_of_it_serves_another(short_dir: Path, copied: bool) -> None:
    """A copy by the command of docs/upgrade.md; without one, the daemon is killed."""
    directory = short_dir
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a", "b", "c")
        if not copied:
            daemon.process.kill()
        rank.close()
        if copied:
            assert daemon.terminate() == 0
            archive, directory = short_dir / "disk.tar", short_dir / "other"
            directory.mkdir()
            tar = ["tar", "--sparse", "--file", str(archive), "--directory"]
            subprocess.run([*tar, str(short_dir), "--create", "disk"], check=True, timeout=SECONDS)
            subprocess.run([*tar, str(directory), "--extract", "--preserve-permissions"], check=True, timeout=SECONDS)
    with disk_daemon(directory) as daemon:
        rank = Rank(daemon.wait_ready())
        eventually(lambda: tier_metric(daemon, "up") == 1)
        assert fetched(rank, "a", "b", "c").groups[0].hits == 3
        done(rank.load("a", "b", "c", at=[3, 4, 5]))
        assert all(rank.holds(at, name) for at, name in zip((3, 4, 5), ("a", "b", "c"), strict=True))
        rank.close()


def test_a_lookup_that_does_not_wait_fetches_nothing(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a")
        evict_all(rank)
        assert not rank.client.lookup(rank.namespace, {0: hashes("a")}).coming
        assert tier_metric(daemon, "copied_blocks_total", direction="read") == 0
        rank.close()


@promise("on disk always, in memory with an option")
def test_a_bit_that_flips_on_the_disk_is_a_miss_and_counted(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a")
        expected = rank.pattern("a").tobytes()
        rank.close()
    blocks = short_dir / "disk" / EXTENTS
    content = blocks.read_bytes()
    at = content.index(expected)
    blocks.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        eventually(lambda: tier_metric(daemon, "up") == 1)
        assert fetched(rank, "a").groups[0].hits == 0
        assert tier_metric(daemon, "corrupt_blocks_total") == 1
        assert tier_metric(daemon, "unfetched_blocks_total", reason="failed") == 1
        rank.close()


def test_a_tier_that_is_killed_again_and_again_costs_hits_only(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a", "b")
        evict_all(rank)
        for turn in range(3):
            eventually(lambda: tier_metric(daemon, "up") == 1)
            os.kill(tier_pid(daemon), signal.SIGKILL)
            eventually(lambda turn=turn: tier_metric(daemon, "deaths_total") == turn + 1)
            done(rank.store(f"while it is away {turn}"))
        eventually(lambda: tier_metric(daemon, "up") == 1)
        assert fetched(rank, "a", "b").groups[0].hits == 2
        done(rank.load("a", "b", at=[0, 1]))
        assert rank.holds(0, "a")
        assert rank.holds(1, "b")
        assert daemon.metric("kvsidecar_pool_reserved_bytes") == 0
        rank.close()


def test_a_stopped_tier_is_a_miss_after_the_deadline_and_its_slot_waits_for_it(short_dir: Path) -> None:
    with disk_daemon(short_dir, "--disk-deadline", "0.2") as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a")
        evict_all(rank)
        stopped = tier_pid(daemon)
        os.kill(stopped, signal.SIGSTOP)
        assert fetched(rank, "a").groups[0].hits == 0
        done(rank.store("b"))
        assert rank.hits("b") == 1, "the daemon and its engines go on"
        os.kill(stopped, signal.SIGCONT)
        eventually(lambda: fetched(rank, "a").groups[0].hits == 1)
        done(rank.load("a", at=[0]))
        assert rank.holds(0, "a")
        rank.close()


def test_a_tier_that_hangs_is_replaced_and_its_slots_come_back(short_dir: Path, gate: Gate) -> None:
    hang = {"KVSIDECAR_FAILPOINTS": f"tier.before_read@0={gate}"}
    with disk_daemon(short_dir, "--stuck-after", "0.5", "--disk-deadline", "0.2", **hang) as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a")
        evict_all(rank)
        first = tier_pid(daemon)
        rank.client.lookup(rank.namespace, {0: hashes("a")}, fetch_seconds=60.0, prefill_rate=0.001)
        eventually(lambda: tier_metric(daemon, "unfetched_blocks_total", reason="late") == 1)
        eventually(lambda: tier_metric(daemon, "deaths_total") == 1)
        eventually(lambda: daemon.metric("kvsidecar_pool_reserved_bytes") == 0)
        eventually(lambda: daemon.children(TIER) not in ([], [first]))
        rank.close()


def test_a_directory_that_cannot_be_used_is_named_and_the_daemon_serves(short_dir: Path) -> None:
    (short_dir / "disk").write_text("a file")
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        eventually(lambda: "disk" in daemon.get("/status")[1]["tiers"][0]["off"])
        code, ready = daemon.get("/ready")
        assert (code, ready["tiers"]["disk"][:5]) == (200, "off: ")
        done(rank.store("a"))
        assert rank.hits("a") == 1
        rank.close()


def test_a_warm_restart_waits_for_the_tiers_process_too(short_dir: Path, pool_dir: Path) -> None:
    """It might still fill a slot that the new daemon has given to another block."""
    with disk_daemon(short_dir, "--pool-dir", str(pool_dir)) as daemon:
        daemon.wait_ready()
        eventually(lambda: tier_metric(daemon, "up") == 1)
        tier = tier_pid(daemon)
        assert tier in [owner.pid for owner in owners_in(pool_dir)]


def test_a_cluster_that_is_not_there_does_not_stop_the_disk(short_dir: Path) -> None:
    with disk_daemon(short_dir, "--cluster-master", "127.0.0.1:1") as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a")
        evict_all(rank)
        assert fetched(rank, "a", "b").groups[0].hits == 1
        done(rank.load("a", at=[0]))
        assert rank.holds(0, "a")
        eventually(lambda: daemon.get("/status")[1]["tiers"][1]["off"] not in ("", "it has not started yet"))
        disk, cluster = daemon.get("/status")[1]["tiers"]
        assert (disk["name"], disk["off"], cluster["name"]) == ("disk", "", "cluster")
        ready = daemon.get("/ready")[1]["tiers"]
        assert (ready["disk"], ready["cluster"][:5]) == ("on", "off: ")
        rank.close()


# -- what fails ------------------------------------------------------------------------------------------------------


def off(daemon: DaemonProcess) -> str:
    return str(daemon.get("/status")[1]["tiers"][0]["off"])


def test_a_disk_that_takes_no_writes_is_off_until_it_does_and_says_why(short_dir: Path) -> None:
    fail = ";".join(f"tier.write@{each}=raise(no space left on device)" for each in range(4))
    with disk_daemon(short_dir, KVSIDECAR_FAILPOINTS=fail) as daemon:
        rank = Rank(daemon.wait_ready())
        eventually(lambda: tier_metric(daemon, "up") == 1)
        done(rank.store("a"))
        for failed in range(1, 4):
            done(rank.load("a", at=[0]))  # each use tries again
            eventually(lambda failed=failed: tier_metric(daemon, "failures_total") >= failed)
        assert tier_metric(daemon, "unwritten_blocks_total", reason="failed") == 3
        eventually(lambda: tier_metric(daemon, "up") == 1)  # the second probe works
        assert tier_metric(daemon, "failures_total") == 4
        (line, *_) = [line for line in daemon.read_so_far() if line["event"] == "tier off"]
        assert "cannot write" in line["reason"]
        assert "kvsidecar-disk-extents" in line["reason"]
        done(rank.load("a", at=[1]))
        eventually(lambda: written(daemon) == 1)
        assert rank.holds(1, "a")
        rank.close()


def test_a_directory_that_is_removed_is_used_until_the_process_ends_and_made_anew(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a")
        evict_all(rank)
        shutil.rmtree(short_dir / "disk")
        assert fetched(rank, "a").groups[0].hits == 1
        evict_all(rank)
        os.kill(tier_pid(daemon), signal.SIGKILL)
        eventually(lambda: tier_metric(daemon, "deaths_total") == 1)
        eventually(lambda: tier_metric(daemon, "up") == 1)
        assert fetched(rank, "a").groups[0].hits == 0
        keep_on_disk(daemon, rank, "b")
        rank.close()


def test_a_second_daemon_serves_without_the_disk_and_takes_it_when_the_first_is_gone(short_dir: Path) -> None:
    other = short_dir / "other"
    other.mkdir()
    with disk_daemon(short_dir) as first:
        rank = Rank(first.wait_ready())
        keep_on_disk(first, rank, "a")
        # The later of two --disk-dir wins.
        with disk_daemon(other, "--disk-dir", str(short_dir / "disk")) as second:
            theirs = Rank(second.wait_ready())
            eventually(lambda: "in use by another process" in off(second))
            done(theirs.store("b"))
            assert theirs.hits("b") == 1
            evict_all(rank)
            assert fetched(rank, "a").groups[0].hits == 1
            rank.close()
            first.process.kill()
            first.process.wait()
            eventually(lambda: tier_metric(second, "up") == 1)
            assert fetched(theirs, "a").groups[0].hits == 1
            theirs.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to raise a priority")
def test_a_tier_takes_no_core_from_engines_whatever_the_priority_of_the_daemon(short_dir: Path) -> None:
    less = -5 - os.getpriority(os.PRIO_PROCESS, 0)
    with disk_daemon(short_dir, under=["nice", "-n", str(less)]) as daemon:
        daemon.wait_ready()
        eventually(lambda: tier_metric(daemon, "up") == 1)
        assert os.getpriority(os.PRIO_PROCESS, daemon.process.pid) == -5
        assert os.getpriority(os.PRIO_PROCESS, tier_pid(daemon)) == 0
