"""The carriers: which files they hand out, and which they leave alone. Real files in real memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvsidecar.errors import ConfigError, PinFailed, PoolRefused
from kvsidecar.pool.host_pool import HostPool
from kvsidecar.pool.kept_files import FILES, DescriptorStore, KeptFiles, PoolDirectory
from kvsidecar.support import host_memory
from kvsidecar.support.memory_limits import HugePages, PageKind, Pages
from kvsidecar.support.units import KiB, MiB
from tests.marks import processes
from tests.pool.host_pools import MlockPlatform, ignore, mapped, never, nothing_left, spec, tree

POOL, TABLE = FILES
POOL_BYTES, TABLE_BYTES = MiB, 8 * KiB
SMALL = Pages(PageKind.SMALL, mmap.PAGESIZE)
SHM = Path("/dev/shm")

in_memory = pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="there is no /dev/shm to write to")
no_pool_is_left = nothing_left


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvs-", dir=SHM) as directory:
        yield Path(directory) / "pool"


@pytest.fixture
def directory(shm: Path) -> Iterator[PoolDirectory]:
    opened = PoolDirectory(shm)
    yield opened
    opened.close()


def create(directory: PoolDirectory) -> KeptFiles:
    return directory.create(POOL_BYTES, TABLE_BYTES, lambda: SMALL)


def found(directory: PoolDirectory) -> bool:
    files = directory.find()
    if files is not None:
        files.close()
    return files is not None


# -- a directory -----------------------------------------------------------------------------------------------------


@in_memory
def test_what_was_written_is_found_again_and_only_the_user_can_open_it(directory: PoolDirectory) -> None:
    assert not found(directory)
    umask = os.umask(0o777)
    try:
        files = create(directory)
    finally:
        os.umask(umask)
    assert (files.kept, files.carrier) == (False, "directory")
    os.pwrite(files.pool_fd, b"kv", 4096)
    os.pwrite(files.table_fd, b"records", 0)
    files.close()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    for name in FILES:
        assert (directory.path / name).stat().st_mode & 0o777 == 0o600
    again = directory.find()
    assert again is not None
    assert again.kept
    assert (os.fstat(again.pool_fd).st_size, os.fstat(again.table_fd).st_size) == (POOL_BYTES, TABLE_BYTES)
    assert (os.pread(again.pool_fd, 2, 4096), os.pread(again.table_fd, 7, 0)) == (b"kv", b"records")
    assert not any(os.get_inheritable(fd) for fd in (again.pool_fd, again.table_fd))
    again.close()


@in_memory
def test_new_files_are_other_files_and_hold_zeros(directory: PoolDirectory) -> None:
    """What an old copier may still write does not reach them."""
    old = create(directory)
    new = create(directory)
    os.pwrite(old.pool_fd, b"late", 0)
    os.pwrite(old.table_fd, b"late", 0)
    assert (os.pread(new.pool_fd, 4, 0), os.pread(new.table_fd, 4, 0)) == (bytes(4), bytes(4))
    assert os.fstat(old.pool_fd).st_nlink == 0, "the old memory would never be freed"
    old.close()
    new.close()


@in_memory
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["missing", "symlink", "mode", "fifo", "directory", "second name", "owner"])
def test_only_a_plain_file_of_ours_is_used_and_anything_else_is_replaced(
    directory: PoolDirectory, tmp_path: Path, name: str, what: str
) -> None:
    create(directory).close()
    path = directory.path / name
    elsewhere = directory.path.parent / "elsewhere"
    if what in ("missing", "fifo", "directory"):
        path.unlink()
    if what == "symlink":
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    elif what == "mode":
        path.chmod(0o640)
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "second name":
        elsewhere.hardlink_to(path)
    elif what == "owner":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        os.chown(path, 12345, -1)
    fds = len(os.listdir("/proc/self/fd"))
    with capture_logs() as logs:
        assert not found(directory)
    assert bool(logs) == (what != "missing"), "what is not used is said, with the reason"
    assert len(os.listdir("/proc/self/fd")) == fds
    if what == "directory":
        with pytest.raises(PoolRefused, match=r"no pool can be created in --pool-dir .*: Is a directory"):
            create(directory)
        assert len(os.listdir("/proc/self/fd")) == fds
        return
    create(directory).close()
    assert found(directory)
    if elsewhere.exists():
        assert elsewhere.stat().st_size == (POOL_BYTES if name == POOL else TABLE_BYTES), "not ours to change"


def test_a_directory_on_a_disk_is_refused_in_one_sentence(tmp_path: Path) -> None:
    if host_memory.huge_page_bytes(os.open(tmp_path, os.O_RDONLY)) is not None:
        pytest.skip("temporary files are in memory here")
    with pytest.raises(ConfigError, match=r"^pool_dir='.*' is not in memory: use a directory on tmpfs or hugetlbfs"):
        PoolDirectory(tmp_path / "pool")
    if os.access(SHM, os.W_OK):
        with pytest.raises(ConfigError, match=r"^table_dir='.*' is not in memory"):
            PoolDirectory(SHM, tmp_path / "pool")


@in_memory
@pytest.mark.parametrize("what", ["symlink", "file", "no parent"])
def test_what_is_not_a_directory_is_refused(shm: Path, what: str) -> None:
    if what == "symlink":
        (shm.parent / "real").mkdir()
        shm.symlink_to(shm.parent / "real")
    elif what == "file":
        shm.write_text("")
    with pytest.raises(ConfigError, match="cannot be opened as a directory"):
        PoolDirectory(shm / "deeper" if what == "no parent" else shm)


@pytest.fixture
def two_mib(shm: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB."""
    shm.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(shm)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounts are not allowed here")
    yield shm
    subprocess.run(["umount", str(shm)], check=True)


@in_memory
@processes
def test_a_file_system_that_is_too_small_is_a_refusal(two_mib: Path, shm: Path) -> None:
    directory = PoolDirectory(two_mib)
    directory.create(MiB, MiB, lambda: SMALL).close()
    directory.create(MiB, MiB, lambda: SMALL).close()  # in the place of the first, whose room it needs
    for pool_bytes, table_bytes in ((2 * MiB, 4096), (4096, 2 * MiB), (4 * MiB, 0)):
        with pytest.raises(PoolRefused, match="more than --pool-dir has room for: raise its size"):
            directory.create(pool_bytes, table_bytes, lambda: SMALL)
        assert not found(directory)
    beside = PoolDirectory(two_mib, shm.parent / "table")
    beside.create(2 * MiB, 64 * MiB, lambda: SMALL).close()
    assert (shm.parent / "table" / TABLE).stat().st_size == 64 * MiB
    beside.close()
    directory.close()


@in_memory
@processes
def test_a_file_system_that_others_have_filled_is_a_failed_pin_and_not_a_signal(two_mib: Path) -> None:
    directory = PoolDirectory(two_mib)
    pool = HostPool(spec(nbytes=MiB), MlockPlatform())
    files = directory.create(pool.nbytes, 4096, lambda: SMALL)
    os.close(files.table_fd)
    (two_mib / "filler").write_bytes(bytes(MiB + MiB // 2))
    pool.use(files.pool_fd)
    with pytest.raises(PinFailed, match="the directory of the pool is full"):
        pool.pin(ignore, never())
    directory.close()


@in_memory
def test_the_lock_is_the_directorys_and_is_held_by_every_copy_of_the_descriptor(directory: PoolDirectory) -> None:
    other = PoolDirectory(directory.path)
    copier = os.dup(*directory.locks)  # as a copier inherits it
    fcntl.flock(directory.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    directory.close()
    with pytest.raises(BlockingIOError):
        fcntl.flock(other.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(copier)
    fcntl.flock(other.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other.close()
    directory._fd = os.open("/", os.O_RDONLY)  # for the fixture to close


# -- systemd's store -------------------------------------------------------------------------------------------------


class Manager:
    """systemd's end, in a thread: it keeps what it is sent, and what it is told to remove it closes."""

    def __init__(self) -> None:
        self.near, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.stored: list[tuple[str, int]] = []
        self.answers = True
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, *lines: str, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.near, ["\n".join(lines).encode()], fds)

    def _read(self) -> None:
        while message := socket.recv_fds(self._far, 4096, 8)[:2]:
            fields = dict(line.split("=", 1) for line in message[0].decode().split("\n"))
            if fields.get("FDSTORE") == "1":
                assert fields["FDPOLL"] == "0"
                self.stored.append((fields["FDNAME"], *message[1]))
            elif fields.get("FDSTOREREMOVE") == "1":
                time.sleep(0.05)  # a manager has other things to do
                for each in [each for each in self.stored if each[0] == fields["FDNAME"]]:
                    self.stored.remove(each)
                    os.close(each[1])
            elif fields.get("BARRIER") == "1" and self.answers:
                os.close(message[1][0])

    def given(self) -> dict[str, int]:
        """The descriptors of the next process; all that was sent before has been read."""
        far, near = os.pipe()
        self.send("BARRIER=1", fds=(near,))
        os.close(near)
        os.read(far, 1)
        os.close(far)
        return {name: os.dup(fd) for name, fd in self.stored}


def test_a_store_gives_back_what_it_was_sent_sealed_and_of_the_kind_that_was_chosen() -> None:
    manager = Manager()
    first = DescriptorStore(manager.send, {})
    assert first.find() is None
    files = first.create(POOL_BYTES, TABLE_BYTES, lambda: SMALL)
    os.pwrite(files.pool_fd, b"kv", 0)
    files.close()
    second = DescriptorStore(manager.send, manager.given())
    kept = second.find()
    assert kept is not None
    assert (kept.kept, kept.carrier) == (True, "systemd")
    assert os.pread(kept.pool_fd, 2, 0) == b"kv"
    assert fcntl.fcntl(kept.pool_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    kept.close()
    assert second.find() is None, "handed out once"


def test_a_cold_start_removes_the_old_files_before_it_looks_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager()
    DescriptorStore(manager.send, {}).create(POOL_BYTES, TABLE_BYTES, lambda: SMALL).close()
    given = manager.given()
    assert set(given) == set(FILES)
    second = DescriptorStore(manager.send, given)
    old = second.find()
    assert old is not None
    old.close()

    def look() -> Pages:
        assert manager.stored == [], "the memory of the old pool still counts"
        return SMALL

    second.create(2 * POOL_BYTES, TABLE_BYTES, look).close()
    again = manager.given()
    assert {name: os.fstat(fd).st_size for name, fd in again.items()} == {POOL: 2 * POOL_BYTES, TABLE: TABLE_BYTES}
    assert len(manager.stored) == 2, "the store has only so many places"
    monkeypatch.setattr("kvsidecar.pool.kept_files.BARRIER_SECONDS", 0.1)
    manager.answers = False
    DescriptorStore(manager.send, again).create(POOL_BYTES, TABLE_BYTES, lambda: SMALL).close()  # not for ever


@pytest.mark.parametrize("names", [(POOL,), (TABLE,), ("http", *FILES), ("http",)])
def test_descriptors_of_others_are_closed_and_said_and_half_a_pool_is_none(names: tuple[str, ...]) -> None:
    given = {name: os.memfd_create(name) for name in names}
    with capture_logs() as logs:
        files = DescriptorStore(lambda *_, fds=(): None, given).find()
    assert [each["name"] for each in logs] == [name for name in names if name == "http"]
    assert (files is not None) == (set(FILES) <= set(names))
    if files is not None:
        files.close()
    for fd in given.values():
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_what_is_not_in_memory_is_not_a_pool(tmp_path: Path) -> None:
    given = {name: os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in FILES}
    if host_memory.huge_page_bytes(given[POOL]) is not None:
        pytest.skip("temporary files are in memory here")
    assert DescriptorStore(lambda *_, fds=(): None, given).find() is None


# -- the pool's own part ---------------------------------------------------------------------------------------------


def kept_memfd(nbytes: int, content: bytes) -> int:
    fd = host_memory.create_file(nbytes, SMALL)
    os.pwrite(fd, content, 0)
    os.posix_fallocate(fd, 0, nbytes)
    return fd


@pytest.mark.parametrize("huge_pages", [HugePages.NONE, HugePages.AUTO])
def test_a_kept_file_is_pinned_with_what_it_holds_and_closed_by_the_pool(huge_pages: HugePages) -> None:
    content = os.urandom(3 * MiB)
    fd = kept_memfd(4 * MiB, content)
    pool = HostPool(spec(nbytes=4 * MiB, huge_pages=huge_pages), MlockPlatform())
    pool.use(fd)
    pool.pin(ignore, never())
    assert pool.fd == fd
    assert bytes(pool.view()[: len(content)]) == content
    assert not pool.view()[len(content) :].any()
    now = mapped()
    assert (now.size, now.locked) == (4 * MiB, 4 * MiB)
    pool.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_that_is_in_use_already_is_not_asked_for_again(tmp_path: Path) -> None:
    """A container that was restarted: nothing of its own limit is in use, and nearly all of the pod's, by the pool."""
    nbytes, room = 64 * MiB, 300 * MiB
    root = tree(tmp_path, {"proc/meminfo": f"MemTotal: 1048576 kB\nMemAvailable: {room // KiB} kB\n"})

    def check(fd: int | None) -> None:
        pool = HostPool(spec(nbytes=nbytes, memory_check=True), MlockPlatform(), root=root)
        if fd is not None:
            pool.use(fd)
        try:
            pool.check()
        finally:
            pool.close()

    with pytest.raises(PoolRefused, match="300 MiB of the machine's 1 GiB are available"):
        check(None)
    with pytest.raises(PoolRefused, match="300 MiB of the machine's 1 GiB are available"):
        check(host_memory.create_file(nbytes, SMALL))  # of the right size, and empty
    check(kept_memfd(nbytes, b""))


def test_a_kept_pool_must_still_be_lockable() -> None:
    pool = HostPool(spec(nbytes=MiB, memory_check=True), MlockPlatform(limit=MiB - 1))
    pool.use(kept_memfd(MiB, b""))
    with pytest.raises(PoolRefused, match="RLIMIT_MEMLOCK"):
        pool.pin(ignore, never())


@pytest.mark.parametrize(
    ("wish", "huge", "nbytes", "refusal"),
    [
        (HugePages.HUGETLB, 0, 2 * MiB, "needs a --pool-dir on hugetlbfs"),
        (HugePages.THP, 2 * MiB, 2 * MiB, "--huge-pages thp needs a --pool-dir on tmpfs"),
        (HugePages.NONE, 2 * MiB, 2 * MiB, "--huge-pages none needs a --pool-dir on tmpfs"),
        (HugePages.AUTO, 2 * MiB, 3 * MiB, "is not a multiple of the huge page size 2 MiB"),
        (HugePages.AUTO, 2 * MiB, 4 * MiB, ""),
        (HugePages.NONE, 0, MiB, ""),
        (HugePages.AUTO, 0, MiB, ""),
    ],
)
def test_the_pages_are_those_of_the_file_system(
    tmp_path: Path, wish: HugePages, huge: int, nbytes: int, refusal: str
) -> None:
    from kvsidecar.support.memory_limits import pages_of_file

    if refusal:
        with pytest.raises(PoolRefused, match=refusal):
            pages_of_file(wish, nbytes, huge, tmp_path)
    else:
        kind = PageKind.HUGETLB if huge else PageKind.SMALL  # a machine without transparent huge pages
        assert pages_of_file(wish, nbytes, huge, tmp_path).kind is kind
