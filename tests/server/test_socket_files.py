"""The files of one daemon, beside others that come and go at the same paths."""

from __future__ import annotations

import asyncio
import grp
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsidecar.errors import ConfigError, SocketInUse
from kvsidecar.server import socket_files
from kvsidecar.server.socket_files import SocketFiles, socket_group_id
from kvsidecar.support.file_lock import RUNNING_SECONDS
from tests.harness import SECONDS
from tests.marks import processes


def files_at(directory: Path, mode: int = 0o600) -> SocketFiles:
    return SocketFiles(directory / "kvs.sock", mode=mode, gid=None)


def acquire(files: SocketFiles) -> SocketFiles:
    assert asyncio.run(files.acquire(wait_seconds=0, stop=asyncio.Event()))
    return files


@pytest.fixture
def files(short_dir: Path) -> Iterator[SocketFiles]:
    held = acquire(files_at(short_dir))
    yield held
    held.release()


def test_what_is_published_has_its_mode_and_leaves_nothing_beside_it(short_dir: Path) -> None:
    files = acquire(files_at(short_dir, mode=0o660))
    with files.listen(files.grpc_path), files.listen(files.attach_path):
        assert stat.S_IMODE(files.grpc_path.stat().st_mode) == 0o660
        assert files.missing() == []
        assert sorted(os.listdir(short_dir)) == ["kvs.sock", "kvs.sock.attach", "kvs.sock.lock"]
    files.release()
    assert os.listdir(short_dir) == ["kvs.sock.lock"]


def test_what_another_has_put_there_is_missing_and_is_not_removed(files: SocketFiles) -> None:
    with files.listen(files.grpc_path), socket.socket(socket.AF_UNIX) as other:
        files.grpc_path.unlink()
        assert files.missing() == [files.grpc_path]
        other.bind(str(files.grpc_path))
        assert files.missing() == [files.grpc_path]
        files.withdraw(files.grpc_path)
        assert files.grpc_path.exists()
        with files.listen(files.grpc_path):
            assert files.missing() == []


def test_a_file_that_is_no_socket_is_not_replaced(files: SocketFiles) -> None:
    files.grpc_path.write_text("somebody's")
    with pytest.raises(SocketInUse, match="is not a socket"):
        files.listen(files.grpc_path)
    assert files.grpc_path.read_text() == "somebody's"
    files.release()
    assert sorted(each.name for each in files.grpc_path.parent.iterdir()) == ["kvs.sock", "kvs.sock.lock"]


def test_a_directory_that_cannot_be_used_is_named_with_the_user_and_the_option(short_dir: Path) -> None:
    (short_dir / "file").write_text("")
    wanted = f"uid {os.geteuid()} cannot use {short_dir}/file/run for the socket .*, or set --socket to another path$"
    with pytest.raises(SocketInUse, match=wanted):
        acquire(files_at(short_dir / "file" / "run"))


def test_a_directory_with_only_the_files_of_this_socket_is_opened_to_its_group(short_dir: Path) -> None:
    directory = short_dir / "kvsidecar"
    acquire(files_at(directory)).release()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    acquire(files_at(directory, mode=0o660)).release()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755


def test_a_directory_with_anything_else_stays_closed_and_the_log_says_so(
    short_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = short_dir / "kvsidecar"
    directory.mkdir(mode=0o700)
    (directory / "a secret").write_text("")
    short_dir.chmod(0o755)
    acquire(files_at(directory, mode=0o660)).release()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert f"chmod g+x,o+x {directory}" in "".join(capfd.readouterr())


def test_a_lock_that_is_no_file_is_named(short_dir: Path) -> None:
    os.mkfifo(short_dir / "kvs.sock.lock")
    with pytest.raises(SocketInUse, match=r"kvs\.sock\.lock is not a file"):
        acquire(files_at(short_dir))


def test_an_acquire_that_is_refused_leaves_what_it_has_found(short_dir: Path) -> None:
    (short_dir / "kvs.sock").write_text("somebody's")
    for _ in range(2):
        with pytest.raises(SocketInUse, match="is not a socket"):
            acquire(files_at(short_dir))
        assert os.listdir(short_dir) == ["kvs.sock"]


@pytest.mark.parametrize("undo", [True, False])
def test_a_start_that_fails_removes_what_it_has_made(short_dir: Path, undo: bool) -> None:
    files = acquire(files_at(short_dir / "made" / "deep"))
    files.listen(files.grpc_path).close()
    files.release(undo=undo)
    assert (short_dir / "made").exists() is not undo


def test_who_waits_for_a_start_that_fails_has_a_lock_of_its_own(short_dir: Path) -> None:
    first = acquire(files_at(short_dir))
    first.mark_ending()

    async def run() -> None:
        second = files_at(short_dir)
        waiting = asyncio.create_task(second.acquire(wait_seconds=SECONDS, stop=asyncio.Event()))
        await asyncio.sleep(0)
        first.release(undo=True)
        assert await waiting
        assert second.missing() == []
        second.release()

    asyncio.run(run())


def test_what_was_left_where_a_socket_is_bound_is_in_nobodys_way(files: SocketFiles, short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left, socket.socket(socket.AF_UNIX) as inner_left:
        left.bind(str(short_dir / "kvs.sock.bound1"))
        inner_left.bind(str(short_dir / "kvs.sock.inner"))
    files.listen(files.grpc_path).close()
    with socket.socket(socket.AF_UNIX) as inner:
        os.close(files.bind_hidden(lambda path: inner.bind(str(path))))
    assert sorted(os.listdir(short_dir)) == ["kvs.sock", "kvs.sock.lock"]


def test_a_hidden_socket_has_no_path_and_is_reached_by_its_descriptor(files: SocketFiles, short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as inner, socket.socket(socket.AF_UNIX) as client:

        def bind(path: Path) -> None:
            inner.bind(str(path))
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            inner.listen()

        fd = files.bind_hidden(bind)
        assert os.listdir(short_dir) == ["kvs.sock.lock"]
        client.connect(f"/proc/self/fd/{fd}")
        client.sendall(b"x")
        assert inner.accept()[0].recv(1) == b"x"
        os.close(fd)


def test_a_lock_that_was_removed_is_taken_again_under_the_same_number(files: SocketFiles, short_dir: Path) -> None:
    number = files.lock
    (short_dir / "kvs.sock.lock").unlink()
    assert [each.name for each in files.missing()] == ["kvs.sock.lock"]
    files.reclaim()
    assert files.missing() == []
    assert files.lock == number
    with pytest.raises(SocketInUse, match=f"pid {os.getpid()} on "):
        acquire(files_at(short_dir))


def test_a_lock_that_another_daemon_has_by_now_is_left_to_it(files: SocketFiles, short_dir: Path) -> None:
    (short_dir / "kvs.sock.lock").unlink()
    other = acquire(files_at(short_dir))
    with other.listen(other.grpc_path):
        with pytest.raises(SocketInUse, match="another kvsidecar serves"):
            files.reclaim()
        assert other.missing() == []
        other.release()
    files.reclaim()
    assert files.missing() == []


def test_a_holder_that_stays_is_not_waited_for(files: SocketFiles, short_dir: Path) -> None:
    with pytest.raises(SocketInUse, match=f"pid {os.getpid()} on "):
        asyncio.run(asyncio.wait_for(files_at(short_dir).acquire(wait_seconds=600, stop=asyncio.Event()), SECONDS))


def test_a_lock_that_was_taken_again_says_that_its_holder_stays(files: SocketFiles, short_dir: Path) -> None:
    (short_dir / "kvs.sock.lock").unlink()
    files.reclaim()
    with pytest.raises(SocketInUse, match=f"pid {os.getpid()} on "):
        asyncio.run(asyncio.wait_for(files_at(short_dir).acquire(wait_seconds=600, stop=asyncio.Event()), SECONDS))


@pytest.mark.parametrize("end", ["told to stop", "told to stop, then removed", "killed"])
@processes
def test_a_holder_that_ends_is_waited_for(files: SocketFiles, short_dir: Path, end: str) -> None:
    if end == "killed":  # and has not closed its files yet
        with subprocess.Popen(["sleep", "infinity"]) as process:
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            os.ftruncate(files.lock, 0)
            os.pwrite(files.lock, f"pid {process.pid} on {socket.gethostname()}".encode(), 0)
            check_waits(files, short_dir)
        return
    files.mark_ending()
    if "removed" in end:
        (short_dir / "kvs.sock.lock").unlink()
        files.reclaim()
    check_waits(files, short_dir)


def check_waits(files: SocketFiles, directory: Path) -> None:
    async def run() -> None:
        late = files_at(directory)
        waiting = asyncio.create_task(late.acquire(wait_seconds=600, stop=asyncio.Event()))
        done, _ = await asyncio.wait([waiting], timeout=2 * RUNNING_SECONDS)
        assert not done
        files.release()
        assert await waiting
        late.release()

    asyncio.run(run())


def test_who_waits_for_a_lock_that_is_removed_meanwhile_waits_for_the_new_one(short_dir: Path) -> None:
    """Else two daemons would hold two files of the same name."""
    first, lock = acquire(files_at(short_dir)), short_dir / "kvs.sock.lock"

    async def run() -> None:
        waiting = asyncio.create_task(files_at(short_dir).acquire(wait_seconds=60, stop=(stop := asyncio.Event())))
        await asyncio.sleep(0)
        lock.unlink()
        second = files_at(short_dir)
        assert await second.acquire(wait_seconds=0, stop=asyncio.Event())
        first.release()  # of the file that was removed, for which the other one waits
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done, "two daemons hold the lock"
        stop.set()
        assert await waiting is False
        second.release()

    asyncio.run(run())


def test_a_group_that_this_process_cannot_give_the_socket_to_is_refused_by_its_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = grp.getgrgid(0).gr_name
    monkeypatch.setattr(os, "getegid", lambda: 4711)
    monkeypatch.setattr(os, "getgroups", list)
    monkeypatch.setattr(socket_files, "has_capability", lambda number: False)
    said = f"^--socket-group='{group}' cannot have the socket from uid {os.geteuid()}, who is not in this group"
    with pytest.raises(ConfigError, match=said):
        socket_group_id("--socket-group", group)
    assert socket_group_id("--socket-group", None) is None
    monkeypatch.setattr(os, "getgroups", lambda: [0])
    assert socket_group_id("--socket-group", group) == 0
    monkeypatch.setattr(os, "getgroups", list)
    monkeypatch.setattr(socket_files, "has_capability", lambda number: number == 0)
    assert socket_group_id("--socket-group", group) == 0
