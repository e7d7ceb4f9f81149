"""Watchers of a daemon with a disk: what was evicted from the pool may still be on the node."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kvsidecar.client import Residency
from tests.e2e.disks import disk_daemon, evict_all, fetched, keep_on_disk, tier_metric, tier_pid
from tests.e2e.watcher import Watcher
from tests.harness import NAMESPACE, SECONDS, Rank, done, eventually, hashes
from tests.marks import both_protocols


@both_protocols
def test_watchers_are_told_what_moves_to_the_disk_and_back(short_dir: Path, local: bool) -> None:
    with disk_daemon(short_dir, local=local) as daemon:
        rank = Rank(daemon.wait_ready())
        watcher = Watcher(daemon)
        watcher.wait_complete()
        keep_on_disk(daemon, rank, "a", "b", "c")
        watcher.wait_for("a", "b", "c")
        watcher.wait_for_disk("a", "b", "c")
        evict_all(rank)
        others = [f"other {each}" for each in range(8)]
        watcher.wait_for(*others)
        assert watcher.on_disk, "the disk still has what the pool has not"
        assert fetched(rank, "a", "b").groups[0].hits == 2
        eventually(lambda: len(watcher.read() & set(watcher.on_disk)) == 2)
        rank.client.clear(NAMESPACE)
        watcher.wait_for()
        watcher.wait_for_disk()
        watcher.close()
        rank.close()


def test_a_snapshot_ends_when_the_disk_has_been_told(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        keep_on_disk(daemon, rank, "a", "b", "c")
        evict_all(rank)
        first = Watcher(daemon)
        first.wait_complete()
        later = Watcher(daemon)
        later.wait_complete()
        assert [len(each.complete[0]) for each in (first, later)] == [3, 3]
        first.wait_for_disk("a", "b", "c")
        keep_on_disk(daemon, rank, "d")
        for each in (first, later):
            each.wait_for_disk("a", "b", "c", "d")
        first.close()
        rank.client.clear(NAMESPACE)
        later.wait_for_disk()
        later.close()
        rank.close()


def test_a_disk_that_makes_room_says_what_has_gone(short_dir: Path) -> None:
    with disk_daemon(short_dir, "--disk-size=512KiB", "--disk-admission=all") as daemon:
        rank = Rank(daemon.wait_ready())
        eventually(lambda: tier_metric(daemon, "up") == 1)
        watcher = Watcher(daemon)
        number = 0
        while Residency.TIER_REMOVED not in watcher.said:
            done(rank.store(number))
            last = set(hashes(number))
            eventually(lambda last=last: watcher.read() is not None and last <= watcher.on_disk)  # type: ignore[misc]
            number += 1
        eventually(lambda: len(watcher.on_disk) == tier_metric(daemon, "blocks"), lambda: len(watcher.on_disk))
        assert 0 < len(watcher.on_disk) < number
        watcher.close()
        rank.close()


def test_what_a_dead_tier_had_is_told_again_by_the_next_one(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        watcher = Watcher(daemon)
        keep_on_disk(daemon, rank, "a", "b")
        watcher.wait_for_disk("a", "b")
        os.kill(tier_pid(daemon), signal.SIGKILL)
        eventually(lambda: watcher.read() is not None and Residency.TIER_CLEARED in watcher.said)
        watcher.wait_for_disk("a", "b")
        assert watcher.read(), "the pool is as it was"
        watcher.close()
        rank.close()


def test_the_disk_is_told_again_after_a_restart_of_the_daemon(short_dir: Path) -> None:
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        watcher = Watcher(daemon)
        keep_on_disk(daemon, rank, "a", "b", "c")
        watcher.wait_for_disk("a", "b", "c")
        daemon.process.kill()
        daemon.process.wait(SECONDS)
        watcher.wait_for_disk()
        rank.close()
    with disk_daemon(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        watcher.wait_for_disk("a", "b", "c")
        assert not watcher.read(), "the pool is new"
        rank.client.clear(NAMESPACE)
        watcher.wait_for_disk()
        watcher.close()
        rank.close()
