"""Directories, file systems and masters that the tests have, as the doctor sees them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvsidecar.cli.doctor import gather_tiers
from kvsidecar.cli.doctor.facts import DiskTier
from kvsidecar.cli.doctor.gather import gather
from kvsidecar.cli.doctor.gather_tiers import cluster, disk_tier, file_system, shared_tier
from kvsidecar.daemon.setting_sources import load_settings
from kvsidecar.daemon.settings import Settings
from kvsidecar.support.file_lock import try_lock
from kvsidecar.support.units import MiB
from tests.e2e.disks import disk_daemon, tier_metric
from tests.harness import eventually
from tests.marks import processes


def settings(**flags: str) -> Settings:
    return load_settings({"config": None, **flags})


def look(directory: Path, *, speed: bool = False) -> DiskTier:
    return disk_tier(settings(disk_dir=str(directory), disk_size="1MiB"), speed=speed)


def test_a_directory_that_the_daemon_will_make_is_not_made(tmp_path: Path) -> None:
    tier = look(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert (tier.problem, tier.exists, tier.owned, tier.writable) == ("", False, True, True)
    assert (tier.held, tier.in_use, tier.speed) == (0, False, None)
    assert tier.room > MiB
    assert MiB < tier.need < 8 * MiB, "with the index"
    assert tier.file_system
    assert not list(tmp_path.iterdir())


def test_a_shared_directory_is_looked_at_and_neither_made_nor_locked(tmp_path: Path) -> None:
    asked = settings(shared_dir=str(tmp_path / "new"), shared_size="1MiB")
    tier = shared_tier(asked)
    assert not list(tmp_path.iterdir())
    assert (tier.problem, tier.exists, tier.writable, tier.need) == ("", False, True, 0)
    (tmp_path / "new").mkdir(0o700)
    fd = os.open(tmp_path / "new", os.O_RDONLY)
    assert try_lock(fd)
    assert not shared_tier(asked).in_use
    os.close(fd)
    assert shared_tier(settings()).directory == ""


def test_the_speed_is_measured_when_asked_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_tiers, "SPEED_BYTES", 8 << 20)
    tier = look(tmp_path, speed=True)
    assert tier.speed is not None
    assert min(tier.speed) > 0
    assert not list(tmp_path.iterdir())


def test_a_disk_that_takes_no_file_is_told_with_the_reason(tmp_path: Path) -> None:
    tier = look(Path("/proc"))
    assert (tier.direct, tier.speed) == (None, None)
    assert tier.speed_problem
    (tmp_path / "file").write_text("")
    assert look(tmp_path / "file").problem == "Not a directory"
    assert look(tmp_path / "no" / "where").problem == "No such file or directory"
    (tmp_path / "link").symlink_to(tmp_path)
    assert look(tmp_path / "link").problem


def test_a_directory_with_a_mode_that_the_tier_refuses(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    assert look(tmp_path).mode == 0o770


@processes
def test_a_directory_in_use_and_what_an_earlier_daemon_has_left(short_dir: Path) -> None:
    flags = {"config": None, "pool_size": "1MiB", "device": "host"}
    with disk_daemon(short_dir) as daemon:
        daemon.wait_ready()
        eventually(lambda: tier_metric(daemon, "up") == 1)
        assert look(short_dir / "disk").in_use
        assert gather({**flags, "socket": daemon.socket}, None).daemon.tiers == {"disk": ""}
    tier = look(short_dir / "disk")
    assert not tier.in_use
    assert tier.held > 0
    assert tier.room >= tier.need


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:1 / /mnt/a\\040b rw - nfs4 server:/x rw\n"
        "3 2 0:2 / /mnt/a\\040b/deep rw - xfs /dev/sdb rw\n"
        "4 1 0:3 / /mnt/aa rw - tmpfs none rw\n"
    )
    kinds = {"/mnt": "ext4", "/mnt/a b/c": "nfs4", "/mnt/a b/deep/c": "xfs", "/mnt/aa": "tmpfs", "/mnt/a": "ext4"}
    assert {path: file_system(Path(path), tmp_path) for path in kinds} == kinds


def test_a_master_that_listens_and_one_that_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        master = f"127.0.0.1:{listener.getsockname()[1]}"
        found = cluster(settings(cluster_master=master))
    assert (found.master, found.unreached, found.tried) == (master, "", True)
    lost = cluster(settings(cluster_master=master))
    assert master in lost.unreached
    assert cluster(settings(cluster_master="etcd://127.0.0.1:1")).tried is False
    assert cluster(settings()).master == ""


@processes
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise ImportError('libnuma.so.1: no such file')", "ImportError: libnuma.so.1: no such file"),
        ("import os; os.kill(os.getpid(), 9)", "the process that loads it exited with -9"),
        ("", ""),
    ],
)
def test_a_client_that_does_not_load_or_kills_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "mooncake" / "store.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gather_tiers._load_problem() == problem
