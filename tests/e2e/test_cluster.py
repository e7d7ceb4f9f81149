"""Two real daemons with a Mooncake Store behind their pools: what one has written, the other one reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.disks import POOL_BLOCKS, SIZES, disk, fetched, patient, tier_metric
from tests.harness import DaemonProcess, Rank, done, eventually
from tests.mooncake_cluster import Cluster, missing

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(missing()), reason=missing() or "it is there")]


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    started = Cluster(tmp_path)
    yield started
    started.close()


def cluster_daemon(directory: Path, cluster: Cluster, *more: str) -> DaemonProcess:
    directory.mkdir()
    return DaemonProcess(directory, *SIZES, "--cluster-master", cluster.address, patient("cluster"), *more)


def is_up(daemon: DaemonProcess) -> bool:
    return tier_metric(daemon, "up", "cluster") == 1


def test_what_one_daemon_has_written_another_one_reads(short_dir: Path, own_cluster: Cluster) -> None:
    with (
        cluster_daemon(short_dir / "1", own_cluster, "--cluster-admission=all") as one,
        cluster_daemon(short_dir / "2", own_cluster) as two,
    ):
        writer, reader = Rank(one.wait_ready()), Rank(two.wait_ready())
        eventually(lambda: is_up(one) and is_up(two))
        done(writer.store("a", "b", "c"))
        eventually(lambda: tier_metric(one, "copied_blocks_total", "cluster", direction="write") == 3)
        assert reader.hits("a", "b", "c") == 0
        assert fetched(reader, "a", "b", "c", "d").groups[0].hits == 3
        done(reader.load("a", "b", "c", at=[0, 1, 2]))
        assert all(reader.holds(at, name) for at, name in enumerate(("a", "b", "c")))
        writer.close()
        reader.close()


def test_a_daemon_serves_without_its_cluster_and_takes_it_when_it_is_there(
    short_dir: Path, own_cluster: Cluster
) -> None:
    own_cluster.master.kill()
    own_cluster.master.wait()
    with cluster_daemon(short_dir / "1", own_cluster) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        assert rank.hits("a") == 1
        assert fetched(rank, "b").groups[0].hits == 0
        assert not is_up(daemon)
        own_cluster.start_master()
        eventually(lambda: is_up(daemon))
        rank.close()


def test_a_prefix_comes_from_the_disk_and_from_the_cluster(short_dir: Path, own_cluster: Cluster) -> None:
    with (
        cluster_daemon(short_dir / "1", own_cluster, "--cluster-admission=all") as one,
        cluster_daemon(
            short_dir / "2", own_cluster, "--cluster-admission=none", "--disk-admission=all", *disk(short_dir)
        ) as two,
    ):
        writer, reader = Rank(one.wait_ready()), Rank(two.wait_ready())
        eventually(lambda: is_up(one) and is_up(two) and tier_metric(two, "up") == 1)
        done(writer.store("a", "b", "c"))
        eventually(lambda: tier_metric(one, "copied_blocks_total", "cluster", direction="write") == 3)
        done(reader.store("a"))
        eventually(lambda: tier_metric(two, "copied_blocks_total", direction="write") == 1)
        done(reader.store(*(f"other {each}" for each in range(POOL_BLOCKS))))
        assert fetched(reader, "a", "b", "c").groups[0].hits == 3
        done(reader.load("a", "b", "c", at=[0, 1, 2]))
        assert all(reader.holds(at, name) for at, name in enumerate(("a", "b", "c")))
        assert tier_metric(two, "copied_blocks_total", direction="read") == 1
        assert tier_metric(two, "copied_blocks_total", "cluster", direction="read") == 2
        writer.close()
        reader.close()
