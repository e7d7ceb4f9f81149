"""The holders of the pool and its table while there is no daemon: systemd's descriptor store, or a directory in memory.

Two files outlive the daemon: the pool, and the table of its contents. Here they are found again or made again. Others
decide whether their contents can be used: by the table's header, and once the former owner has ended.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvsidecar.errors import ConfigError, PoolRefused
from kvsidecar.support import file_lock, host_memory, log, memory_limits, private_files
from kvsidecar.support.memory_limits import HugePages, PageKind, Pages
from kvsidecar.support.units import format_size

FILES: Final = ("kvsidecar-pool", "kvsidecar-table")
"""Their names, in a directory and in systemd's store."""

BARRIER_SECONDS: Final = 5.0
"""The longest wait for the service manager to give back the memory of an earlier pool."""

_log = log.get("pool")


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """The two files, open. Both are in memory, and nobody else but the daemon's user can open them."""

    pool_fd: int
    table_fd: int
    kept: bool
    """They were there before this process."""
    carrier: str
    """Their holder: see `Carrier.name`."""

    def close(self) -> None:
        os.close(self.pool_fd)
        os.close(self.table_fd)


class Carrier(Protocol):
    """Holds the files across daemons. Its calls may block; one runs at a time."""

    @property
    def name(self) -> str:
        """``systemd`` or ``directory``."""

    @property
    def locks(self) -> tuple[int, ...]:
        """Descriptors that every copier must keep open, so that no other daemon uses the files while one lives."""

    @property
    def left_by_stranger(self) -> bool:
        """A daemon whose processes cannot be seen from here used the files until just before: their end cannot be
        waited for."""

    def mark_ending(self) -> None:
        """Make daemons that find the lock taken wait for the end of this one, from now on."""

    def undo(self) -> None:
        """The daemon does not start: remove the files that `create` has made, and what they lie in if that was not
        there before."""

    def find(self) -> KeptFiles | None:
        """The files that an earlier daemon has left, of whatever size; None if there are none that may be used."""

    def create(self, pool_bytes: int, table_bytes: int, choose_pages: Callable[[], Pages]) -> KeptFiles:
        """New files, which hold zeros, in the place of any earlier ones. What those held is freed when the last process
        that has mapped them ends.

        Args:
            choose_pages: for the pool, where its file can have pages of any kind; may raise PoolRefused.

        Raises:
            PoolRefused: they cannot be made.
        """


class PoolDirectory:
    """A directory on tmpfs or hugetlbfs (``--pool-dir``).

    Only files of this process's user with mode 0600 and one name are used, and no symbolic link is followed: others may
    be able to write to the directory (/dev/shm).

    Args:
        path: is made, with mode 0700, if only its last part is missing.
        table_path: a directory on tmpfs for the table, made like ``path``; None: the same one. Most of the table's
            pages are never written and take no memory, which explicit huge pages would.
        called: what the user calls an option, for the texts of errors.

    Raises:
        ConfigError: one cannot be used; the text is one sentence.
    """

    name = "directory"

    def __init__(self, path: Path, table_path: Path | None = None, called: Callable[[str], str] = str) -> None:
        self.left_by_stranger = False
        """Set by the code that takes the lock."""
        self._running_mark = file_lock.RunningMark()
        self.path = path
        self.huge_page_bytes = check_directories(path, table_path, called)
        self._made: list[Path] = []
        """The directories that were not there before."""
        self._made_files = False
        self._fd = self._open(called("pool_dir"), path)
        self._table_fd = self._fd if table_path is None else self._open(called("table_dir"), table_path)

    def _open(self, option: str, path: Path) -> int:
        try:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
                self._made.append(path)
            return _open_directory(path)
        except OSError as error:
            self.undo()
            raise _unusable(option, path, error) from error

    @property
    def is_there(self) -> bool:
        """Whether the path leads to what was opened: the daemon that had the lock may have removed it."""
        with suppress(OSError):
            return os.path.samestat(self.path.stat(), os.fstat(self._fd))
        return False

    def undo(self) -> None:
        if self._made_files:
            for name, directory in self._places():
                with suppress(OSError):
                    os.unlink(name, dir_fd=directory)
        private_files.remove_directories(self._made)

    @property
    def locks(self) -> tuple[int, ...]:
        return (self._fd,)

    @property
    def lock(self) -> int:
        """Descriptor to be locked by `flock` before anything else is called. Not a file of its own: nobody can remove
        it."""
        return self._fd

    def mark_running(self) -> None:
        """Show that the lock was taken, and is kept until `mark_ending`."""
        if reason := self._running_mark.set(self._fd):
            _log.warning("another daemon will wait for this one", directory=str(self.path), reason=reason)

    def mark_ending(self) -> None:
        self._running_mark.remove()

    def find(self) -> KeptFiles | None:
        with ExitStack() as opened:
            try:
                pool, table = (_closed_by(opened, private_files.open_file(*where)) for where in self._places())
            except FileNotFoundError:
                return None
            except OSError as error:
                _log.warning("a file of --pool-dir is not used", directory=str(self.path), reason=error.strerror)
                return None
            opened.pop_all()
        return KeptFiles(pool, table, True, self.name)

    def _places(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Name and directory of the pool and of the table."""
        return (FILES[0], self._fd), (FILES[1], self._table_fd)

    def create(self, pool_bytes: int, table_bytes: int, choose_pages: Callable[[], Pages]) -> KeptFiles:
        memory_limits.pages_of_file(HugePages.AUTO, pool_bytes, self.huge_page_bytes)  # refuses a size
        (pool_name, pool_dir), (table_name, table_dir) = self._places()
        with ExitStack() as made:
            try:
                # The table first, so that none of an earlier pool ever stands beside the new one.
                for name, directory in ((table_name, table_dir), (pool_name, pool_dir)):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=directory)
                self._check_room(pool_bytes, table_bytes)
                pool = _closed_by(made, private_files.make_file(pool_name, pool_dir, pool_bytes))
                table = _closed_by(made, private_files.make_file(table_name, table_dir, table_bytes))
            except OSError as error:
                raise PoolRefused(f"no pool can be created in --pool-dir {self.path}: {error.strerror}") from error
            made.pop_all()
        self._made_files = True
        return KeptFiles(pool, table, False, self.name)

    def _check_room(self, pool_bytes: int, table_bytes: int) -> None:
        """Refuse files for which there is no room: to write to a page for which there is none is a SIGBUS. (The pool's
        pages are faulted in before they are used, which fails cleanly. The table's are not.)"""
        room: dict[int, int] = {}
        for (_, directory), nbytes in zip(self._places(), (pool_bytes, table_bytes), strict=True):
            limit = os.fstatvfs(directory)
            device = os.fstat(directory).st_dev
            room.setdefault(device, limit.f_bavail * limit.f_frsize)
            if limit.f_blocks and room[device] < nbytes:
                raise PoolRefused(
                    f"the pool and its table need up to {format_size(pool_bytes)} and {format_size(table_bytes)}, more "
                    f"than --pool-dir has room for: raise its size (sizeLimit of an emptyDir), or lower --pool-size"
                )
            room[device] -= nbytes

    def close(self) -> None:
        self.mark_ending()
        for fd in {self._fd, self._table_fd}:
            os.close(fd)


def check_directories(path: Path, table_path: Path | None, called: Callable[[str], str] = str) -> int:
    """Refuse directories that `PoolDirectory` cannot use, and make none. Returns the size of the explicit huge pages of
    the first, 0 if it has none.

    Raises:
        ConfigError: one cannot be used; the text is one sentence.
    """
    pool_named, table_named = called("pool_dir"), called("table_dir")
    huge_page_bytes = _huge_page_bytes(pool_named, path)
    if table_path is not None:
        if _huge_page_bytes(table_named, table_path):
            raise ConfigError(f"{table_named}='{table_path}' is on hugetlbfs: use a directory on tmpfs")
    elif huge_page_bytes:
        raise ConfigError(f"{pool_named}='{path}' is on hugetlbfs: set {table_named} to a directory on tmpfs, too")
    return huge_page_bytes


def _huge_page_bytes(option: str, path: Path) -> int:
    """Size of the explicit huge pages of a directory in memory, or of the parent in which it is going to be made."""
    try:
        try:
            fd = _open_directory(path)
        except FileNotFoundError:
            if path.is_symlink():
                raise
            fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
                os.close(fd)
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None
    except OSError as error:
        raise _unusable(option, path, error) from error
    huge_page_bytes = host_memory.huge_page_bytes(fd)
    os.close(fd)
    if huge_page_bytes is None:
        raise ConfigError(
            f"{option}='{path}' is not in memory: use a directory on tmpfs or hugetlbfs, such as /dev/shm/kvsidecar"
        )
    return huge_page_bytes


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _unusable(option: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{option}='{path}' cannot be opened as a directory: {error.strerror}")


class Send(Protocol):
    """Sends one message to the service manager."""

    def __call__(self, *lines: str, fds: Sequence[int] = ()) -> None: ...


class DescriptorStore:
    """systemd's store of file descriptors (``FDSTORE=1``): it holds memfds while the unit is restarted.

    Args:
        send: sends lines and descriptors to the service manager. A store that does not exist ignores them.
        given: the descriptors by name that the manager has started this process with; they become this object's.
    """

    name = "systemd"
    locks: tuple[int, ...] = ()
    left_by_stranger = False
    """systemd starts a daemon when all processes of the one before have ended."""

    def __init__(self, send: Send, given: Mapping[str, int]) -> None:
        self._send = send
        self._given = dict(given)
        self._made = False
        for name in set(given) - set(FILES):
            _log.warning("a descriptor from the service manager is not used", name=name)
            os.close(self._given.pop(name))

    def mark_ending(self) -> None:
        """Do nothing: systemd knows."""

    def undo(self) -> None:
        for name in FILES if self._made else ():
            self._send("FDSTOREREMOVE=1", f"FDNAME={name}")

    def find(self) -> KeptFiles | None:
        given, self._given = self._given, {}
        if set(given) == set(FILES) and all(host_memory.huge_page_bytes(fd) is not None for fd in given.values()):
            return KeptFiles(given[FILES[0]], given[FILES[1]], True, self.name)
        for fd in given.values():
            os.close(fd)
        return None

    def create(self, pool_bytes: int, table_bytes: int, choose_pages: Callable[[], Pages]) -> KeptFiles:
        for name in FILES:
            self._send("FDSTOREREMOVE=1", f"FDNAME={name}")
        self._wait_until_read()  # the memory of an earlier pool counts until then
        pages = choose_pages()
        with ExitStack() as made:
            try:
                pool = _closed_by(made, host_memory.create_file(pool_bytes, pages, FILES[0]))
                small = Pages(PageKind.SMALL, os.sysconf("SC_PAGE_SIZE"))
                table = _closed_by(made, host_memory.create_file(table_bytes, small, FILES[1]))
            except OSError as error:
                raise PoolRefused(f"no memory for the pool can be reserved: {error.strerror}") from error
            made.pop_all()
        for name, fd in zip(FILES, (pool, table), strict=True):
            self._send("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=[fd])
        self._made = True
        return KeptFiles(pool, table, False, self.name)

    def _wait_until_read(self) -> None:
        """Return when the manager has read all that was sent; in any case after `BARRIER_SECONDS`."""
        near, far = os.pipe2(os.O_CLOEXEC)
        try:
            self._send("BARRIER=1", fds=[far])
        finally:
            os.close(far)
        closed = select.poll()
        closed.register(near, 0)  # the end of the other side is always reported
        closed.poll(BARRIER_SECONDS * 1000)
        os.close(near)


def _closed_by(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd
