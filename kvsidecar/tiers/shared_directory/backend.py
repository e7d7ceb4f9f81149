"""Finds, reads and writes the files of a shared directory. Any node may do so at any time, and none waits for another.

A shard is a file whose name is its block hash, below directories that are named after its namespace, its space and the
first digits of the hash. It is written under another name and renamed when it is whole; nothing is flushed. The bytes
are followed by a trailer that names the shard and its checksum: every read verifies it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kvsidecar.errors import TierFailed
from kvsidecar.support import log
from kvsidecar.tiers.backend import (
    Backend,
    BackendStats,
    ReadEnd,
    ShardSpace,
    WriteEnd,
    namespace_digest,
)
from kvsidecar.tiers.private_directory import open_directory
from kvsidecar.tiers.shard_bytes import TRAILER_BYTES, checksum_of, trailer_of, without_first
from kvsidecar.tiers.shared_directory.sweep import SWEEP_SECONDS, TRASH, Sweeper, sweep
from kvsidecar.types import Namespace

ROOT: Final = "kvsidecar-files-1"
"""Below the directory. Its number changes with the format of the files."""
FINDS: Final = 16
"""Files that are looked for at a time: each is a question to the file server."""
RENEW_SECONDS: Final = 600.0
"""A read renews the modification time of a file that is at least as old."""
FORGET_SECONDS: Final = 2.0
"""Files that a call to forget does not remove in this time are removed by a sweep."""
SOON_SHARE: Final = 20
"""A sweep comes early when this node has written one in this many bytes of the size since the last one."""
ATTEMPTS: Final = 3
"""Attempts to write a file whose directory is forgotten meanwhile."""

_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_GONE: Final = {errno.ENOENT, errno.ESTALE}

_log = log.get("shared tier")


class SharedBackend(Backend):
    """Keeps shards in a directory that several nodes share.

    Other nodes change what is there at any time: `keys` is unknown, and `stats` is as old as the last sweep.

    Args:
        path: the directory; made, with mode 0700, if only its last part is missing.
        capacity_bytes: approximate limit for the files of all nodes together.

    Raises:
        TierFailed: the directory cannot be used; the text is one sentence.
    """

    def __init__(self, path: Path, capacity_bytes: int, *, sweep_seconds: float = SWEEP_SECONDS) -> None:
        self._capacity = capacity_bytes
        self._root = _open_root(path)
        self._lock = threading.Lock()
        """Guards all numbers."""
        self._bytes = self._files = self._evicted = 0
        self._written = 0
        """Bytes since the last sweep."""
        self._swept_at = 0.0
        self._finders = ThreadPoolExecutor(FINDS, "look")
        self._sweeper = Sweeper(self._root, self._sweep, sweep_seconds)
        self._sweeper.start()
        _log.info("shared tier opened", directory=str(path), capacity_bytes=capacity_bytes)

    def _sweep(self, due_seconds: float) -> None:
        with self._lock:
            before = self._written
        usage = sweep(self._root, self._capacity, due_seconds)
        with self._lock:
            if usage.at != self._swept_at:  # else what this node has written since then is not in it
                meanwhile = self._written - before  # which the sweep may have seen or not
                self._bytes, self._files, self._written = usage.nbytes + meanwhile, usage.files, meanwhile
                self._evicted += usage.removed
                self._swept_at = usage.at

    def find(self, space: ShardSpace, hashes: Sequence[bytes]) -> list[bool]:
        paths = [_path(self._root, space, each) for each in hashes]
        if len(paths) < FINDS:
            return _there(paths)
        share = -(-len(paths) // FINDS)
        parts = [paths[at : at + share] for at in range(0, len(paths), share)]
        return [each for part in self._finders.map(_there, parts) for each in part]

    # -- reads ---------------------------------------------------------------------------------------------------------

    def read(self, space: ShardSpace, hashes: Sequence[bytes], memory: Sequence[memoryview]) -> list[ReadEnd]:
        return [self._read(space, each, slot) for each, slot in zip(hashes, memory, strict=True)]

    def _read(self, space: ShardSpace, block_hash: bytes, memory: memoryview) -> ReadEnd:
        path = _path(self._root, space, block_hash)
        trailer = bytearray(TRAILER_BYTES + 1)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                got = _read_all(fd, memory, trailer)
                expected = trailer_of(space, block_hash, checksum_of(memory))
                if got == len(memory) + TRAILER_BYTES and trailer[:TRAILER_BYTES] == expected:
                    _used(fd)
                    return ReadEnd.DONE
            finally:
                os.close(fd)
            os.unlink(path)
        except OSError as error:
            if error.errno in _GONE:
                return ReadEnd.MISS
            raise _failed("read", path, error) from error
        self._count(-1, -got)
        return ReadEnd.CORRUPT

    # -- writes --------------------------------------------------------------------------------------------------------

    def write(
        self, space: ShardSpace, hashes: Sequence[bytes], memory: Sequence[memoryview], checksums: Sequence[int | None]
    ) -> list[WriteEnd]:
        ends = [WriteEnd.PRESENT if there else WriteEnd.FULL for there in self.find(space, hashes)]
        for i, block_hash in enumerate(hashes):
            if ends[i] is WriteEnd.FULL and self._has_room(space.shard_bytes + TRAILER_BYTES):
                checksum = checksum_of(memory[i], checksums[i])
                ends[i] = self._write(_path(self._root, space, block_hash), memory[i], space, block_hash, checksum)
        return ends

    def _has_room(self, nbytes: int) -> bool:
        with self._lock:
            room = self._bytes + nbytes <= self._capacity
            if not room or self._written * SOON_SHARE > self._capacity:
                self._sweeper.soon()
            return room

    def _write(self, path: str, memory: memoryview, space: ShardSpace, block_hash: bytes, checksum: int) -> WriteEnd:
        trailer = trailer_of(space, block_hash, checksum)
        directory, _, name = path.rpartition("/")
        unfinished = f"{directory}/.{name}.{secrets.token_hex(8)}"
        for _ in range(ATTEMPTS):
            try:
                _write_file(unfinished, memory, trailer)
                os.rename(unfinished, path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)
                if error.errno in _FULL:
                    return WriteEnd.FULL
                if error.errno not in _GONE:
                    raise _failed("written", path, error) from error
                _make_directory(self._root, directory)
            else:
                self._count(1, len(memory) + len(trailer))
                return WriteEnd.DONE
        raise TierFailed(f"{path} cannot be written: its directory is removed repeatedly")

    def _count(self, files: int, nbytes: int) -> None:
        with self._lock:
            self._files, self._bytes = max(0, self._files + files), max(0, self._bytes + nbytes)
            self._written += max(0, nbytes)

    # -- the rest ------------------------------------------------------------------------------------------------------

    def forget(self, namespace: Namespace | None) -> int:
        """Forget the shards of one namespace, or all, of all nodes. They are gone at once, and removed afterwards."""
        names = os.listdir(self._root) if namespace is None else [namespace_digest(namespace)]
        deadline = time.monotonic() + FORGET_SECONDS
        files = nbytes = 0
        for name in names:
            if name.startswith("."):
                continue
            trash = self._root / f"{TRASH}{secrets.token_hex(8)}"
            try:
                os.rename(self._root / name, trash)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _failed("forgotten", str(self._root / name), error) from error
            for directory, _, found in os.walk(trash):
                for each in found:
                    if time.monotonic() < deadline and not each.startswith("."):
                        with contextlib.suppress(OSError):
                            nbytes += os.stat(f"{directory}/{each}").st_size
                            os.unlink(f"{directory}/{each}")
                            files += 1
            if time.monotonic() < deadline:
                shutil.rmtree(trash, ignore_errors=True)
        if namespace is None:
            self._count(-self._files, -self._bytes)
        else:
            self._count(-files, -nbytes)
        return files

    def probe(self) -> None:
        path = self._root / f".probe-{secrets.token_hex(8)}"
        sent = memoryview(secrets.token_bytes(4096))
        back, rest = memoryview(bytearray(len(sent))), bytearray(1)
        try:
            _write_file(str(path), sent, b"")
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _read_all(fd, back, rest) != len(sent) or sent != back:
                    raise TierFailed(f"{self._root} does not return what was written to it")
            finally:
                os.close(fd)
        except OSError as error:
            raise _failed("written or read", str(path), error) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def stats(self) -> BackendStats:
        with self._lock:
            return BackendStats(self._capacity, self._bytes, self._files, self._evicted, 0, {})

    def close(self) -> None:
        self._sweeper.close()
        self._finders.shutdown()


def _open_root(path: Path) -> Path:
    os.close(open_directory(path, "shared"))
    root = path / ROOT
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
    except OSError as error:
        raise TierFailed(f"the shared tier's directory {path} cannot be used: {error.strerror}") from error
    return root


def _path(root: Path, space: ShardSpace, block_hash: bytes) -> str:
    name = block_hash.hex()
    return f"{root}/{_directory(space)}/{name[:2]}/{name[2:4]}/{name}"


@lru_cache(maxsize=1024)
def _directory(space: ShardSpace) -> str:
    return f"{namespace_digest(space.namespace)}/{space.digest.hex()}"


def _there(paths: Sequence[str]) -> list[bool]:
    found = []
    for path in paths:
        try:
            os.stat(path, follow_symlinks=False)
            found.append(True)
        except OSError as error:
            if error.errno not in _GONE:
                raise _failed("found", path, error) from error
            found.append(False)
    return found


def _used(fd: int) -> None:
    """A file was read whole: the pool has it now, and a sweep removes others first."""
    with contextlib.suppress(OSError):  # where that does not work, as if it were read-only, reads do
        # Also one that a clock which has been set since has put into the future.
        if abs(time.time() - os.fstat(fd).st_mtime) > RENEW_SECONDS:
            os.utime(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _make_directory(root: Path, directory: str) -> None:
    try:
        for parent in reversed(Path(directory).relative_to(root).parents):
            with contextlib.suppress(FileExistsError):
                (root / parent).mkdir(0o700)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
    except OSError as error:
        # Gone: it is being forgotten, and the next attempt makes it. Full: the next attempt says so.
        if error.errno not in _GONE | _FULL:
            raise _failed("made", directory, error) from error


def _write_file(path: str, *parts: memoryview | bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        left = [memoryview(part) for part in parts]
        while left:
            count = os.pwritev(fd, left, at)
            at += count
            left = without_first(left, count)
    finally:
        os.close(fd)  # a network file system may say only here that there is no room


def _read_all(fd: int, *parts: memoryview | bytearray) -> int:
    """Fill these from the start of a file. Returns how many bytes it had for them."""
    at = 0
    left = [memoryview(part) for part in parts]
    while left and (count := os.preadv(fd, left, at)):
        at += count
        left = without_first(left, count)
    return at


def _failed(what: str, path: str, error: OSError) -> TierFailed:
    return TierFailed(f"{path} cannot be {what}: {error.strerror}")


def open_backend(directory: str, capacity_bytes: int, **options: Any) -> SharedBackend:
    """Open the backend in the tier's process."""
    return SharedBackend(Path(directory), capacity_bytes, **options)
