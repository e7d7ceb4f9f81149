"""A cache of digests of files, in a file that only the user may write: a wrong digest would mean wrong KV."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
import threading
import time
from pathlib import Path

_log = logging.getLogger("kvsidecar")

VERSION = 1
"""Version of the digest algorithm; digests of other versions are discarded."""
MAX_ENTRIES = 8192
MAX_BYTES = 4 << 20
SETTLED_SECONDS = 2.0
"""A file modified more recently than this may change again without a change of its timestamps."""

CLOCKED = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "nfs", "nfs4", "ceph", "lustre", "gpfs",
})  # fmt: skip
"""Filesystems that set ctime by their clock at every change. Others may take it from an image, or invent it."""


def default_path() -> Path | None:
    """The path of the user's cache; None if the user has no cache directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "kvsidecar" / "weights.json"
    except RuntimeError:
        return None


def mount_of(fd: int) -> str:
    """The line about an open file's mount in ``/proc/self/mountinfo``; empty if it cannot be found."""
    try:
        number = Path(f"/proc/self/fdinfo/{fd}").read_text().partition("mnt_id:")[2].split()[0]
        with open("/proc/self/mountinfo") as mounts:
            return next((line for line in mounts if line.split(" ", 1)[0] == number), "")
    except (OSError, IndexError):
        return ""


def times_tell(of: os.stat_result, mount: str) -> bool:
    """Whether different content of this file, or another file in its place, would have another ctime.

    This does not hold in an image (squashfs, erofs, ext4 mounted read-only, OCI volumes), whose times its maker set,
    often the same for all files: two images mounted one after the other may differ in nothing but content.

    Args:
        mount: the result of `mount_of`.
    """
    if of.st_ctime_ns <= 0 or of.st_ctime_ns % 1_000_000_000 == 0:
        return False  # chosen by somebody: a clock hardly ever reads full seconds
    # A mount may be read-only although others write to the filesystem: the last field is the filesystem's own.
    kind, _, options = ([*mount.rpartition(" - ")[2].split(), "", "", ""])[:3]
    return kind in CLOCKED and "ro" not in options.split(",")


class DigestCache:
    """Digests by device, inode, size and times of a file, for files for which `times_tell` holds. Thread-safe.

    Errors of reading or writing the cache file are ignored: digests are computed again.

    Args:
        path: the cache file; None to keep nothing.
    """

    def __init__(self, path: Path | None, *, settled_seconds: float = SETTLED_SECONDS) -> None:
        self._path, self._settled_seconds = path, settled_seconds
        self._lock = threading.Lock()
        self._digests = _read(path)
        self._new: dict[str, str] = {}

    def get(self, of: os.stat_result) -> str | None:
        return self._digests.get(_key(of))

    def put(self, of: os.stat_result, digest: str) -> None:
        if time.time() - max(of.st_mtime, of.st_ctime) >= self._settled_seconds:
            with self._lock:
                self._new[_key(of)] = digest

    def save(self) -> None:
        """Add the new digests to the file, which others may have written meanwhile; drop the oldest."""
        if self._path is None or not self._new:
            return
        digests = {**_read(self._path), **self._new}
        kept = dict(list(digests.items())[-MAX_ENTRIES:])
        name = None
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Atomic: another process may read or replace the file at any instant.
            fd, name = tempfile.mkstemp(dir=self._path.parent, prefix=".weights-")  # mode 0600
            with os.fdopen(fd, "w") as file:
                json.dump({"version": VERSION, "digests": kept}, file)
            os.replace(name, self._path)
        except OSError as error:
            _log.info("kvsidecar: digests of the weights cannot be cached for the next start: %s", error)
            if name is not None:
                with contextlib.suppress(OSError):
                    os.unlink(name)
            return
        self._digests, self._new = kept, {}


def _key(of: os.stat_result) -> str:
    # ctime as well: tools may set mtime, but not ctime.
    return f"{of.st_dev}:{of.st_ino}:{of.st_size}:{of.st_mtime_ns}:{of.st_ctime_ns}"


def _read(path: Path | None) -> dict[str, str]:
    """The digests in a valid file that only this user can have written; else none."""
    if path is None:
        return {}
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            return {}
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            _log.warning("kvsidecar: %s is accessible to other users, so it is ignored: set its mode to 0600", path)
            return {}
        content = json.loads(os.pread(fd, MAX_BYTES, 0))
    except (OSError, ValueError):
        return {}
    finally:
        os.close(fd)
    if not isinstance(content, dict) or content.get("version") != VERSION:
        return {}
    digests = content.get("digests")
    if not isinstance(digests, dict):
        return {}
    return {key: each for key, each in digests.items() if isinstance(each, str) and len(each) == 64}
