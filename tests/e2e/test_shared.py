"""Real daemons that share a directory: what one has written, the other one reads. And two tiers behind one pool."""

from __future__ import annotations

import os
from pathlib import Path

from tests.e2e.disks import POOL_BLOCKS, SIZES, TIER, disk, evict_all, fetched, patient, tier_metric
from tests.harness import DaemonProcess, Rank, done, eventually
from tests.marks import promise


def shared_daemon(directory: Path, shared: Path, *more: str, **environment: str) -> DaemonProcess:
    directory.mkdir(exist_ok=True)
    flags = ("--shared-dir", str(shared), "--shared-size", "64MiB")
    return DaemonProcess(directory, *SIZES, *flags, patient("shared"), *more, **environment)


def is_up(daemon: DaemonProcess, tier: str = "shared") -> bool:
    return tier_metric(daemon, "up", tier) == 1


def written(daemon: DaemonProcess, tier: str = "shared") -> float:
    return tier_metric(daemon, "copied_blocks_total", tier, direction="write")


def was_read(daemon: DaemonProcess, tier: str) -> float:
    return tier_metric(daemon, "copied_blocks_total", tier, direction="read")


@promise("a directory that nodes share")
def test_what_one_daemon_has_written_another_one_reads_and_clears(short_dir: Path) -> None:
    shared = short_dir / "shared"
    with (
        shared_daemon(short_dir / "1", shared, "--shared-admission=all") as one,
        shared_daemon(short_dir / "2", shared) as two,
    ):
        writer, reader = Rank(one.wait_ready()), Rank(two.wait_ready())
        eventually(lambda: is_up(one) and is_up(two))
        done(writer.store("a", "b", "c"))
        eventually(lambda: written(one) == 3)
        assert reader.hits("a", "b", "c") == 0
        assert fetched(reader, "a", "b", "c", "d").groups[0].hits == 3
        done(reader.load("a", "b", "c", at=[0, 1, 2]))
        assert all(reader.holds(at, name) for at, name in enumerate(("a", "b", "c")))
        reader.client.clear(reader.namespace)
        evict_all(writer)
        eventually(lambda: is_up(two))
        eventually(lambda: fetched(writer, "a").groups[0].hits == 0)
        writer.close()
        reader.close()


def test_directories_whose_files_are_gone_go_too(short_dir: Path) -> None:
    shared = short_dir / "shared"
    names = [str(number) for number in range(POOL_BLOCKS)]

    def directories() -> int:
        return sum(len(found) for _, found, _ in os.walk(shared))  # which minds none that go meanwhile

    with shared_daemon(short_dir / "1", shared, "--shared-admission=all") as one:
        writer = Rank(one.wait_ready())
        eventually(lambda: is_up(one))
        done(writer.store(*names))
        eventually(lambda: written(one) == POOL_BLOCKS)
    assert directories() > POOL_BLOCKS
    for each in shared.rglob("*"):
        if len(each.name) == 64:  # a block hash: other nodes have found that there is too much
            each.unlink()
    while (before := directories()) > 1:  # the root stays; a level goes with each sweep, which a start begins with
        for each in shared.rglob("*"):
            os.utime(each, (0, 0))
        with shared_daemon(short_dir / "1", shared, "--shared-admission=all") as one:
            one.wait_ready()
            eventually(lambda before=before: directories() < before)  # type: ignore[misc]
    with shared_daemon(short_dir / "1", shared, "--shared-admission=all") as one:
        writer = Rank(one.wait_ready())
        eventually(lambda: is_up(one))
        done(writer.store("a"))
        eventually(lambda: written(one) == 1)


def test_a_prefix_comes_from_the_disk_and_from_the_shared_directory(short_dir: Path) -> None:
    shared = short_dir / "shared"
    with (
        shared_daemon(short_dir / "1", shared, "--shared-admission=all") as one,
        shared_daemon(
            short_dir / "2", shared, "--shared-admission=none", "--disk-admission=all", *disk(short_dir)
        ) as two,
    ):
        writer, reader = Rank(one.wait_ready()), Rank(two.wait_ready())
        eventually(lambda: is_up(one) and is_up(two) and is_up(two, "disk"))
        assert len(two.children(TIER)) == 2
        done(writer.store("a", "b", "c"))
        eventually(lambda: written(one) == 3)
        done(reader.store("a"))
        eventually(lambda: written(two, "disk") == 1)
        evict_all(reader)
        assert fetched(reader, "a", "b", "c", "d").groups[0].hits == 3
        done(reader.load("a", "b", "c", at=[0, 1, 2]))
        assert all(reader.holds(at, name) for at, name in enumerate(("a", "b", "c")))
        assert (was_read(two, "disk"), was_read(two, "shared")) == (1, 2)
        assert written(two) == 0
        writer.close()
        reader.close()


def test_what_the_disk_loses_comes_from_the_shared_directory(short_dir: Path) -> None:
    shared = short_dir / "shared"
    fails = {"KVSIDECAR_FAILPOINTS": "tier.read@0=raise(a bad place)"}  # the disk's
    with shared_daemon(
        short_dir, shared, *disk(short_dir), "--disk-admission=all", "--shared-admission=all", **fails
    ) as daemon:
        rank = Rank(daemon.wait_ready())
        eventually(lambda: is_up(daemon) and is_up(daemon, "disk"))
        done(rank.store("a"))
        eventually(lambda: (written(daemon), written(daemon, "disk")) == (1, 1))
        evict_all(rank)
        assert fetched(rank, "a").groups[0].hits == 1
        done(rank.load("a", at=[0]))
        assert rank.holds(0, "a")
        assert (was_read(daemon, "disk"), was_read(daemon, "shared")) == (0, 1)
        assert tier_metric(daemon, "unfetched_blocks_total", "disk", reason="failed") == 1
        assert daemon.metric("kvsidecar_pool_reserved_bytes") == 0
        rank.close()
