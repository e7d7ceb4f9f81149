"""Reads the facts about slower tiers. Those that cannot be read are left out, as in `gather`. Makes no named file."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import mmap
import os
import pwd
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvsidecar.cache.slots import SLOT_ALIGN
from kvsidecar.cli.doctor.facts import Cluster, DiskTier
from kvsidecar.daemon.settings import Settings
from kvsidecar.errors import TierFailed
from kvsidecar.support import memory_limits
from kvsidecar.support.file_lock import try_lock
from kvsidecar.tiers.cluster.backend import reach
from kvsidecar.tiers.disk.backend import facts_of
from kvsidecar.tiers.disk.directory import EXTENTS, INDEX, needs
from kvsidecar.tiers.disk.extents import PAGE

SPEED_BYTES: Final = 256 << 20
SPEED_SECONDS: Final = 10.0
"""Time limit of a measurement in each direction; a slower disk is measured with fewer bytes."""
PIECE_BYTES: Final = 4 << 20
LOAD_SECONDS: Final = 20.0
"""Time limit for loading the client's library."""
PACKAGES: Final = [f"mooncake-transfer-engine{variant}" for variant in ("-non-cuda", "", "-cuda13")]


def disk_tier(settings: Settings | None, *, speed: bool) -> DiskTier:
    if settings is None or settings.disk_dir is None:
        return DiskTier()
    directory, capacity = Path(settings.disk_dir), settings.disk_size or 0
    need = needs(facts_of(capacity // SLOT_ALIGN * SLOT_ALIGN))
    return _look_at(directory, capacity, need, (EXTENTS, INDEX), speed=speed)


def shared_tier(settings: Settings | None) -> DiskTier:
    if settings is None or settings.shared_dir is None:
        return DiskTier()
    return _look_at(Path(settings.shared_dir), settings.shared_size or 0, 0, (), speed=False)


def _look_at(directory: Path, capacity: int, need: int, own: Sequence[str], *, speed: bool) -> DiskTier:
    """Examine the directory of a tier.

    Args:
        own: files that one process at a time uses; none: the directory is shared.
    """
    place = existing(directory)
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if place == directory else 0))
    except OSError as error:
        return DiskTier(str(directory), capacity, error.strerror or str(error))
    try:
        is_, free = os.fstat(fd), os.fstatvfs(fd)
        held = sum(_blocks(directory / name) for name in own)
        direct, rates, problem = _try_file(fd, speed=speed)
        return DiskTier(
            directory=str(directory),
            capacity=capacity,
            exists=place == directory,
            owner=name_of(is_.st_uid),
            owned=is_.st_uid == os.geteuid(),
            mode=stat.S_IMODE(is_.st_mode),
            writable=os.access(place, os.W_OK | os.X_OK),
            file_system=file_system(place),
            in_use=bool(own) and place == directory and not try_lock(fd),
            held=held,
            room=free.f_bavail * free.f_frsize + held,
            need=need,
            direct=direct,
            speed=rates,
            speed_problem=problem,
        )
    except OSError as error:
        return DiskTier(str(directory), capacity, error.strerror or str(error))
    finally:
        os.close(fd)  # and the lock with it


def _blocks(path: Path) -> int:
    """Bytes that a file takes on the disk."""
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0


def _try_file(directory: int, *, speed: bool) -> tuple[bool | None, tuple[float, float] | None, str]:
    """Whether files there support O_DIRECT, the bytes a second of writing and reading, and why these are unknown."""
    path = f"/proc/self/fd/{directory}"
    for direct in (True, False):
        try:
            flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                continue
            return None, None, error.strerror or str(error)
        try:
            with mmap.mmap(-1, PAGE) as page:
                os.pwritev(fd, [page], 0)
            return direct, _speed(fd) if speed else None, ""
        except OSError as error:
            if not direct:
                return False, None, error.strerror or str(error)
        finally:
            os.close(fd)
    raise AssertionError


def _speed(fd: int) -> tuple[float, float]:
    """Bytes a second of writing and of reading back. Raises OSError."""
    with mmap.mmap(-1, PIECE_BYTES) as piece:
        piece[:] = os.urandom(PIECE_BYTES)
        began, written = time.monotonic(), 0
        while written < SPEED_BYTES and time.monotonic() - began < SPEED_SECONDS:
            written += os.pwritev(fd, [piece], written)
        os.fdatasync(fd)
        write = written / max(1e-9, time.monotonic() - began)
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began, got = time.monotonic(), 0
        while got < written and time.monotonic() - began < SPEED_SECONDS:
            got += os.preadv(fd, [piece], got) or written
        return write, min(got, written) / max(1e-9, time.monotonic() - began)


def file_system(path: Path, root: Path = memory_limits.ROOT) -> str:
    """Type of the file system of a directory; empty if unknown."""
    found, longest = "", -1
    parts = path.resolve().parts
    for fields, kind, _ in memory_limits.mounts(root):
        point = Path(fields[4].encode().decode("unicode_escape")).parts
        if parts[: len(point)] == point and len(point) >= longest:
            found, longest = kind, len(point)
    return found


def cluster(settings: Settings | None) -> Cluster:
    if settings is None or settings.cluster_master is None:
        return Cluster()
    master, version, unreached = settings.cluster_master, version_of(*PACKAGES), ""
    try:
        tried = bool(reach(master))
    except TierFailed as error:
        tried, unreached = True, str(error)
    return Cluster(master, version, _load_problem() if version else "", unreached, tried)


def _load_problem() -> str:
    """Why the client's library cannot be loaded: in a process of its own, because it may hang or crash."""
    command = [sys.executable, "-P", "-c", "import mooncake.store"]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=LOAD_SECONDS, check=False, close_fds=False
        )
    except OSError as error:
        return f"no process that loads it can be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it was not loaded within {LOAD_SECONDS:g} s"
    if not ran.returncode:
        return ""
    return (ran.stderr.strip().splitlines() or [f"the process that loads it exited with {ran.returncode}"])[-1]


def version_of(*packages: str) -> str:
    """The version of the first of these packages that is installed; empty if none is."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def existing(directory: Path) -> Path:
    """The directory, or its parent if the daemon has yet to make it: the doctor makes nothing."""
    return directory if os.path.lexists(directory) else directory.parent.resolve()


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
