"""The daemon's files: a lock, and sockets with the configured mode and group.

A second gRPC server binds a live Unix path without an error, takes it over, and unlinks it when it stops (measured with
grpcio 1.85). So the daemon takes a lock first, and only its holder may remove a stale socket.
"""

from __future__ import annotations

import asyncio
import grp
import os
import socket
import stat
from pathlib import Path

from kvsidecar.errors import ConfigError, SocketInUse
from kvsidecar.support import log
from kvsidecar.support.file_lock import lock_within

_log = log.get("endpoint")


class SocketFiles:
    """The lock and the socket paths of one daemon.

    Args:
        path: of the gRPC socket; the attach socket is in the same directory.
        mode: file mode of both sockets.
        group: owner group of both sockets; None: that of the process.
    """

    def __init__(self, path: Path, *, mode: int, group: str | None) -> None:
        self.grpc_path = path
        self.attach_path = path.with_name(path.name + ".attach")
        self._lock_path = path.with_name(path.name + ".lock")
        self.mode = mode
        self.gid = group_id("socket_group", group)
        self._lock: int | None = None

    @property
    def lock(self) -> int:
        """Descriptor of the lock. A RuntimeError before `acquire`."""
        if self._lock is None:
            raise RuntimeError("the lock is not held")
        return self._lock

    async def acquire(self, *, wait_seconds: float, stop: asyncio.Event) -> bool:
        """Take the lock and remove stale sockets. False if ``stop`` was set while another daemon held the lock.

        A daemon that is stopping, or was killed, holds the lock until its pool is unpinned, which takes seconds for a
        large pool; a second pool might not fit beside it. From outside it looks like a running daemon (a killed process
        still listens while the kernel frees its memory), so this waits for any holder.

        Args:
            wait_seconds: maximum wait.

        Raises:
            SocketInUse: another daemon holds the lock, or a path is not a stale socket of this user.
        """
        lock = self._open_lock()
        try:
            if not await self._lock_within(lock, wait_seconds, stop):
                return False
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
            for path in (self.grpc_path, self.attach_path):
                self._remove_stale(path)
            self._lock = lock  # from here on `release` removes the sockets
            return True
        finally:
            if self._lock is None:
                os.close(lock)

    def _open_lock(self) -> int:
        directory = self.grpc_path.parent
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o755 if self.mode & 0o077 else 0o700)
            return os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SocketInUse(f"cannot use {directory} for the socket ({error.strerror}): set socket") from error

    async def _lock_within(self, lock: int, wait_seconds: float, stop: asyncio.Event) -> bool:
        def holder() -> str:
            return os.pread(lock, 300, 0).decode(errors="replace") or "an unknown process"

        def waits() -> None:
            _log.warning(
                "waiting for another daemon to exit",
                socket=str(self.grpc_path),
                holder=holder(),
                wait_seconds=wait_seconds,
            )

        try:
            return await lock_within(lock, wait_seconds, stop, waits)
        except TimeoutError:
            raise SocketInUse(
                f"another kvsidecar serves {self.grpc_path} ({holder()}): stop it, or set socket to another path"
            ) from None

    def secure_grpc_socket(self) -> None:
        """Set group and mode of the bound gRPC socket. Raises SocketInUse if one of the two sockets was replaced."""
        if self.gid is not None:
            os.chown(self.grpc_path, -1, self.gid)
        self.grpc_path.chmod(self.mode)
        for path in (self.grpc_path, self.attach_path):
            found = path.lstat()
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                raise SocketInUse(
                    f"{path} is not the socket that this daemon created: another program writes to its directory"
                )
            if stat.S_IMODE(found.st_mode) != self.mode:
                raise SocketInUse(f"{path} has mode {stat.S_IMODE(found.st_mode):04o} instead of {self.mode:04o}")

    def release(self) -> None:
        """Remove the sockets and release the lock. The lock file stays: if it were removed, two daemons could lock two
        files of the same name."""
        if self._lock is None:
            return
        for path in (self.grpc_path, self.attach_path):
            path.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None

    def _remove_stale(self, path: Path) -> None:
        try:
            found = path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise SocketInUse(f"{path} exists and is not a socket: remove it, or set socket to another path")
        if found.st_uid != os.geteuid():
            raise SocketInUse(f"{path} belongs to uid {found.st_uid}: remove it, or set socket to another path")
        path.unlink()


def group_id(option: str, group: str | None) -> int | None:
    """The id of the group in an option. Raises ConfigError if the group does not exist."""
    if group is None:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"{option}='{group}' does not exist on this machine") from None
