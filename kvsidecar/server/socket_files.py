"""The daemon's files: a lock, and sockets with the configured mode and group.

A second gRPC server binds a live Unix path without an error, takes it over, and unlinks it when it stops, even if it is
another server's by then (measured with grpcio 1.85). So the daemon takes a lock first, and only its holder may remove a
stale socket; and each socket is bound at a path of its own and renamed to where clients look for it, so that nothing
but this module removes it from there, and only while it is the same file.
"""

from __future__ import annotations

import asyncio
import grp
import os
import re
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvsidecar.errors import ConfigError, SocketInUse
from kvsidecar.protocol.paths import attach_path
from kvsidecar.support import file_lock, log
from kvsidecar.support.file_lock import lock_within, try_lock
from kvsidecar.support.memory_limits import has_capability
from kvsidecar.support.private_files import remove_directories, takes_none
from kvsidecar.support.process_ids import is_ending

_BOUND = (".bound1", ".bound2")
"""Suffixes of the paths at which the sockets are bound: not longer than `kvsidecar.protocol.paths.ATTACH_SUFFIX`."""
_CAP_CHOWN = 0
_INNER = ".inner"
"""Suffix of the path at which gRPC's own socket is bound, before it has none. gRPC removes what is there when it
stops."""

_log = log.get("endpoint")


class SocketFiles:
    """The lock and the socket paths of one daemon.

    Args:
        path: path of the gRPC socket; the attach socket is in the same directory.
        mode: file mode of both sockets.
        gid: owner group of both sockets; None: that of the process.
    """

    def __init__(self, path: Path, *, mode: int, gid: int | None) -> None:
        self.grpc_path = path
        self.attach_path = Path(attach_path(str(path)))
        self._lock_path = path.with_name(path.name + ".lock")
        self._bound_at = {
            each: path.with_name(path.name + suffix)
            for each, suffix in zip((self.grpc_path, self.attach_path), _BOUND, strict=True)
        }
        self._inner = path.with_name(path.name + _INNER)
        self.mode = mode
        self.gid = gid
        self._lock: int | None = None
        self._running_mark = file_lock.RunningMark()
        self._made_lock = False
        self._made: list[Path] = []
        """Directories that were not there before, the innermost last."""
        self._published: dict[Path, os.stat_result] = {}

    @property
    def lock(self) -> int:
        """Descriptor of the lock. A RuntimeError before `acquire`."""
        if self._lock is None:
            raise RuntimeError("the lock is not held")
        return self._lock

    async def acquire(self, *, wait_seconds: float, stop: asyncio.Event) -> bool:
        """Take the lock and remove stale sockets. False if ``stop`` was set while another daemon held the lock.

        A daemon that is stopping, or was killed, holds the lock until its pool is unpinned, which takes seconds for a
        large pool; a second pool might not fit beside it. So this waits for it; one that is not about to end is not
        waited for.

        Args:
            wait_seconds: maximum wait.

        Raises:
            SocketInUse: another daemon holds the lock, or a path is not a stale socket of this user.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            lock = self._open_lock()
            try:
                if not await self._lock_within(lock, max(0.0, deadline - time.monotonic()), stop):
                    return False
                # While this waited, the file may have been removed, and be another daemon's by now.
                if _is_at(self._lock_path, os.fstat(lock)):
                    self._lock = lock
            finally:
                if self._lock is None:
                    os.close(lock)
            if self._lock is not None:
                break
        try:
            self._take(lock)
        except SocketInUse:
            self.release(undo=True)
            raise
        return True

    def _take(self, lock: int) -> None:
        """Name the holder of this lock in its file, and remove what nobody serves any more."""
        with suppress(OSError):  # for people: a disk that is full keeps no daemon from its lock
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
        if reason := self._running_mark.set(lock):
            _log.warning("another daemon will wait for this one", lock=str(self._lock_path), reason=reason)
        for path in self._bound_at:
            self._remove_stale(path)

    def mark_ending(self) -> None:
        """Make daemons that start from now on wait for the end of this one."""
        self._running_mark.remove()

    def _open_lock(self) -> int:
        directory = self.grpc_path.parent
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._make(directory)
            try:
                lock = os.open(self._lock_path, flags | os.O_EXCL, 0o600)
                self._made_lock = True
            except FileExistsError:
                lock = os.open(self._lock_path, flags, 0o600)
                self._made_lock = False
        except OSError as error:
            remove_directories(self._made)
            raise _unusable(directory, error.strerror) from error
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            os.close(lock)
            raise SocketInUse(f"{self._lock_path} is not a file: remove it, or set --socket to another path")
        return lock

    def _make(self, directory: Path) -> None:
        if directory.is_dir():
            if directory == self.grpc_path.parent:
                self._open_to_group(directory)
            return
        if directory.parent != directory:
            self._make(directory.parent)
        # The mode is that of the innermost, as mkdir -m does it.
        innermost = directory == self.grpc_path.parent
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700 if innermost and not self.mode & 0o077 else 0o755 if innermost else 0o777)
            self._made.append(directory)

    def _open_to_group(self, directory: Path) -> None:
        """An earlier daemon may have made it for its own user alone: a socket for a group is of no use in there."""
        if not self.mode & 0o077:
            return
        if is_private_to_socket(self.grpc_path):
            directory.chmod(0o755)
            _log.info("opened the directory of the socket to its group", directory=str(directory), mode="0755")
        elif closed := closed_to_group(self.grpc_path, os.getegid() if self.gid is None else self.gid):
            _log.warning("the socket's group cannot reach it", directory=str(closed), fix=f"chmod g+x,o+x {closed}")

    async def _lock_within(self, lock: int, wait_seconds: float, stop: asyncio.Event) -> bool:
        def waits() -> None:
            _log.warning(
                "waiting for another daemon to exit",
                socket=str(self.grpc_path),
                holder=_holder(lock),
                wait_seconds=round(wait_seconds, 3),
            )

        try:
            return await lock_within(lock, wait_seconds, stop, waits, lambda: _was_killed(lock))
        except TimeoutError:
            raise self._in_use(lock) from None
        except OSError as error:
            raise SocketInUse(
                f"{self._lock_path} cannot be locked ({error.strerror}): set --socket to another path"
            ) from error

    def _in_use(self, lock: int) -> SocketInUse:
        return SocketInUse(
            f"another kvsidecar serves {self.grpc_path} ({_holder(lock)}): stop it, or set --socket to another path"
        )

    # -- sockets ---------------------------------------------------------------------------------------------------

    def listen(self, path: Path) -> socket.socket:
        """A socket that listens at ``path``, does not block, and replaces one of this daemon's.

        Raises:
            SocketInUse: it cannot be made.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        old = os.umask(0o177)  # no other user may connect between bind and chmod
        try:
            self._remove_stale(self._bound_at[path])
            listener.bind(str(self._bound_at[path]))
            listener.listen(1024)
            self._publish(path)
        except OSError as error:
            listener.close()
            raise SocketInUse(f"{path} cannot be bound: {error.strerror}") from error
        except SocketInUse:
            listener.close()
            raise
        finally:
            os.umask(old)
        return listener

    def bind_hidden(self, bind: Callable[[Path], object]) -> int:
        """Let a socket be bound, then remove its path, so that nobody else finds or removes it.

        Args:
            bind: binds a socket at this path and listens. Raises RuntimeError if it cannot.

        Returns:
            A descriptor of the socket's file, the caller's: this process connects to ``/proc/self/fd/`` and its number.

        Raises:
            SocketInUse: it cannot be made.
        """
        path = self._inner
        self._remove_stale(path)
        old = os.umask(0o177)
        try:
            bind(path)
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, RuntimeError) as error:
            raise SocketInUse(f"{path} cannot be bound: {error}") from error
        finally:
            os.umask(old)
        found = os.fstat(fd)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o177:
            os.close(fd)
            raise SocketInUse(
                f"{path} is not the socket that this daemon created: another program writes to its directory"
            )
        path.unlink(missing_ok=True)
        return fd

    def _publish(self, path: Path) -> None:
        """Give the socket that was bound its mode and group, and rename it to ``path``. Raises SocketInUse."""
        bound = self._bound_at[path]
        try:
            if self.gid is not None:
                os.chown(bound, -1, self.gid, follow_symlinks=False)
            bound.chmod(self.mode)
            found = bound.lstat()
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                raise SocketInUse(
                    f"{path} is not the socket that this daemon created: another program writes to its directory"
                )
            if stat.S_IMODE(found.st_mode) != self.mode:
                raise SocketInUse(f"{path} has mode {stat.S_IMODE(found.st_mode):04o} instead of {self.mode:04o}")
            self._remove_stale(path)
            bound.rename(path)
        except OSError as error:
            raise SocketInUse(f"{path} cannot be created: {error.strerror}") from error
        self._published[path] = found

    def missing(self) -> list[Path]:
        """Paths of the published sockets, and of the lock, that are gone or not this daemon's any more."""
        wanted = dict(self._published)
        if self._lock is not None:
            wanted[self._lock_path] = os.fstat(self._lock)
        return [path for path, is_ in wanted.items() if not _is_at(path, is_)]

    def reclaim(self) -> None:
        """Make the directory and the lock again if they were removed, so that sockets can be published.

        Copiers that run keep the file that was removed: a daemon that starts after this one was killed does not wait
        for them. Those that are started from now on keep the new one.

        Raises:
            SocketInUse: another daemon holds the lock by now, or nothing can be made there.
        """
        if _is_at(self._lock_path, os.fstat(self.lock)):
            if not os.access(self.grpc_path.parent, os.W_OK | os.X_OK, effective_ids=True):
                raise SocketInUse(f"{self.grpc_path.parent} may not be written to")
            return
        lock = self._open_lock()
        try:
            if not try_lock(lock):
                raise self._in_use(lock)
            self._take(lock)
            os.dup2(lock, self.lock, inheritable=False)  # the number that new copiers are given
        except OSError as error:
            raise SocketInUse(f"{self._lock_path} cannot be created again: {error.strerror}") from error
        finally:
            os.close(lock)

    def withdraw(self, path: Path) -> None:
        """Remove a socket that was published, unless the path is another daemon's by now."""
        if self._is_mine(path):
            path.unlink(missing_ok=True)
        self._published.pop(path, None)

    def release(self, *, undo: bool = False) -> None:
        """Remove the sockets and release the lock. The lock file stays, for daemons that wait for it.

        Args:
            undo: the daemon does not start: remove the lock file and the directories, too, that this object has made.
        """
        if self._lock is None:
            return
        self.mark_ending()
        for path in tuple(self._published):
            self.withdraw(path)
        for path in (*self._bound_at.values(), self._inner):  # of a socket that could not be published
            with suppress(SocketInUse, OSError):
                self._remove_stale(path)
        if undo and self._made_lock and _is_at(self._lock_path, os.fstat(self._lock)):
            self._lock_path.unlink(missing_ok=True)  # who waits for it takes the next one of this name
        os.close(self._lock)
        self._lock = None
        if undo:
            remove_directories(self._made)

    def _is_mine(self, path: Path) -> bool:
        """Whether this daemon's socket is published there."""
        return path in self._published and _is_at(path, self._published[path])

    def _remove_stale(self, path: Path) -> None:
        if not self._is_mine(path) and _is_stale(path):
            path.unlink()


def check_path(path: Path) -> None:
    """Refuse a path at which no socket can be made, as a start does, and make nothing.

    Raises:
        SocketInUse: the text is one sentence.
    """
    directory = path.parent
    place = next(each for each in path.parents if os.path.lexists(each))
    if problem := takes_none(place):
        raise _unusable(directory, f"{place} {problem}")
    for each in (path, Path(attach_path(str(path)))):
        _is_stale(each)


def _unusable(directory: Path, why: str | None) -> SocketInUse:
    return SocketInUse(
        f"uid {os.geteuid()} cannot use {directory} for the socket ({why}): let it write there, or set --socket to "
        "another path"
    )


def _is_stale(path: Path) -> bool:
    """Whether a socket of this user is there, which nobody serves. Raises SocketInUse: it is something else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketInUse(f"{path} exists and is not a socket: remove it, or set --socket to another path")
    if found.st_uid != os.geteuid():
        raise SocketInUse(f"{path} belongs to uid {found.st_uid}: remove it, or set --socket to another path")
    return True


def _is_at(path: Path, is_: os.stat_result) -> bool:
    """Whether this file is there, and not another one that has its name by now."""
    with suppress(OSError):
        return os.path.samestat(path.lstat(), is_)
    return False


def _holder(lock: int) -> str:
    return os.pread(lock, 300, 0).decode(errors="replace") or "an unknown process"


def _was_killed(lock: int) -> bool:
    """Whether the holder, if it is a process of this host, is ending."""
    found = re.fullmatch(r"pid (\d{1,9}) on (.*)", _holder(lock))
    return found is not None and found[2] == socket.gethostname() and is_ending(int(found[1]))


def is_private_to_socket(path: Path) -> bool:
    """Whether the directory of a socket is this user's alone, and has nothing in it but the files of this socket: so
    nothing else is seen if it is opened to others."""
    try:
        found = path.parent.lstat()
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700
        return mine and all(each.startswith(path.name) for each in os.listdir(path.parent))
    except OSError:
        return False


def closed_to_group(path: Path, gid: int) -> Path | None:
    """The first directory on the way to a socket that this group may not search; None: it may search all that can be
    examined."""
    for directory in reversed(path.parents):
        try:
            found = directory.stat()
        except OSError:
            return None
        if not found.st_mode & (stat.S_IXGRP if found.st_gid == gid else stat.S_IXOTH):
            return directory
    return None


def socket_group_id(option: str, group: str | None) -> int | None:
    """`group_id` of a group to which this process may give its sockets. Raises ConfigError if it may not."""
    gid = group_id(option, group)
    if gid is None or gid in (os.getegid(), *os.getgroups()) or has_capability(_CAP_CHOWN):
        return gid
    raise ConfigError(
        f"{option}='{group}' cannot have the socket from uid {os.geteuid()}, who is not in this group: add the "
        "daemon's user to it, and log in again"
    )


def group_id(option: str, group: str | None) -> int | None:
    """The id of the group in an option. Raises ConfigError if the group does not exist."""
    if group is None:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"{option}='{group}' does not exist on this machine") from None
