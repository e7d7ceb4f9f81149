"""Keeps a directory of shards within its size. The nodes that share it take turns: one at a time, by a lock file.

The age of a file is that of its modification time, which a read renews. All times are the file server's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvsidecar.support import log
from kvsidecar.support.file_lock import try_lock

SWEEP_SECONDS: Final = 300.0
"""Time between sweeps, of all nodes together."""
EARLY_SECONDS: Final = 30.0
"""Time between sweeps when there is too much."""
LOCK: Final = ".sweep"
"""The lock file. Its modification time is that of the last sweep, its content what was left then."""
TRASH: Final = ".trash-"
"""Prefix of a forgotten directory's name until it is removed."""
TRASH_SECONDS: Final = 60.0
"""A forgotten directory is left to the node that forgot it for this long."""
KEPT_SHARE: Final = 0.9
"""Part of the size that a sweep leaves: there is room for what is written until the next one."""
UNFINISHED_SECONDS: Final = 3600.0
"""A file that is still being written after this long will never be finished."""
EMPTY_SECONDS: Final = 60.0
"""A directory that has been empty for this long goes. Writers make the directories of a file first: they are new."""
AGE_STEP: Final = 60.0
"""Ages are counted in steps of this many seconds: what a sweep remembers does not grow with the files."""

_log = log.get("shared tier")


@dataclass(frozen=True, slots=True)
class Usage:
    """The result of a sweep: the files that are there, and their bytes."""

    nbytes: int = 0
    files: int = 0
    at: float = 0.0
    """When the sweep began."""
    removed: int = 0
    """Files removed by this node in this sweep, because others are newer."""


class Sweeper:
    """A thread that sweeps again and again.

    Args:
        root: directory of the files, for the log.
        sweep: called from the thread with the seconds after which a sweep is due. May raise OSError.
    """

    def __init__(self, root: Path, sweep: Callable[[float], None], seconds: float = SWEEP_SECONDS) -> None:
        self._root, self._sweep, self._seconds = root, sweep, seconds
        self._wake = threading.Event()
        self._soon = self._closing = False
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def soon(self) -> None:
        """Sweep before the next turn: there is too much."""
        self._soon = True
        self._wake.set()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            due, self._soon = min(EARLY_SECONDS, self._seconds) if self._soon else self._seconds, False
            try:
                self._sweep(due)
            except OSError as error:
                _log.warning("the shared directory cannot be swept", directory=str(self._root), reason=str(error))
            except Exception:  # noqa: BLE001 - the thread must go on, and the reason be heard
                _log.exception("the sweep of the shared directory failed unexpectedly", directory=str(self._root))
            self._wake.wait(self._seconds)
            self._wake.clear()


def sweep(root: Path, capacity_bytes: int, due_seconds: float) -> Usage:
    """Remove what is too much, unless another node does, or has done so less than ``due_seconds`` ago.

    Raises:
        OSError: a directory cannot be read, or a file not be removed.
    """
    fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Whoever is not due leaves the lock alone: a node that is due would find it taken. Asked again with the lock,
        # because another node may have swept in between.
        if not (_is_due(fd, due_seconds) and try_lock(fd) and _is_due(fd, due_seconds)):
            return _read_usage(fd)
        os.utime(fd)
        usage = _sweep(root, capacity_bytes, os.fstat(fd).st_mtime)
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps([usage.nbytes, usage.files, usage.at]).encode(), 0)
        return usage
    finally:
        os.close(fd)


def _is_due(fd: int, due_seconds: float) -> bool:
    last = os.fstat(fd)
    return not last.st_size or abs(time.time() - last.st_mtime) >= due_seconds


def _read_usage(fd: int) -> Usage:
    try:
        nbytes, files, at = json.loads(os.pread(fd, 256, 0))
        return Usage(int(nbytes), int(files), float(at))
    except (ValueError, TypeError):
        return Usage()  # another node is about to write it


def _sweep(root: Path, capacity_bytes: int, now: float) -> Usage:
    for trash in root.glob(TRASH + "*"):
        with contextlib.suppress(FileNotFoundError):
            if now - trash.lstat().st_ctime >= TRASH_SECONDS:  # since it was renamed
                shutil.rmtree(trash, ignore_errors=True)
    ages: Counter[int] = Counter()
    files = 0
    for entry, is_ in _files(root, lambda directory: _remove_empty(directory, now)):
        if not entry.name.startswith("."):
            ages[_age(is_, now)] += is_.st_size
            files += 1
        elif now - is_.st_mtime > UNFINISHED_SECONDS:
            _remove(entry)
    nbytes, most = ages.total(), int(capacity_bytes * KEPT_SHARE)
    if nbytes <= most:
        return Usage(nbytes, files, now)
    kept = oldest = 0
    for age in sorted(ages):
        oldest = age
        kept += ages[age]
        if kept > most:
            break
    removed = 0
    for entry, is_ in _files(root):
        age = _age(is_, now)
        # Of those that are as old as the oldest that stay, only as many as are too much.
        if not entry.name.startswith(".") and (age > oldest or (age == oldest and nbytes > most)) and _remove(entry):
            nbytes -= is_.st_size
            removed += 1
    return Usage(nbytes, files - removed, now, removed)


def _age(is_: os.stat_result, now: float) -> int:
    return max(0, int((now - is_.st_mtime) / AGE_STEP))


def _files(
    root: Path, on_empty: Callable[[str], object] = lambda _: None
) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """All files below the directories of namespaces. Files that vanish meanwhile are left out.

    Args:
        on_empty: called with each directory that has no entry.
    """
    pending = [f"{root}/{name}" for name in os.listdir(root) if not name.startswith(".")]
    while pending:
        directory, empty = pending.pop(), False
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            empty = True
            for entry in entries:
                empty = False
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    yield entry, entry.stat(follow_symlinks=False)
        if empty:
            on_empty(directory)


def _remove_empty(directory: str, now: float) -> None:
    """Remove a directory, unless it has become empty just now, by its modification time. So each sweep removes one
    level, and nobody who makes a path finds its beginning gone more than once. A directory with a file by now stays."""
    with contextlib.suppress(OSError):
        if now - os.stat(directory, follow_symlinks=False).st_mtime >= EMPTY_SECONDS:
            os.rmdir(directory)


def _remove(entry: os.DirEntry[str]) -> bool:
    """Remove a file. False: somebody else has."""
    try:
        os.unlink(entry.path)
    except FileNotFoundError:
        return False
    return True
