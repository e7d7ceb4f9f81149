"""Who is at the other end of a socket; processes that were written down, and waiting for their end."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvsidecar.support import peer
from kvsidecar.support.process_ids import ProcessId, Watched, process_id
from tests.harness import SECONDS
from tests.marks import processes


def test_the_kernel_names_this_process_to_itself() -> None:
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        assert peer.credentials(near) == (os.getpid(), os.getuid(), os.getgid())
        assert peer.groups(near) == frozenset(os.getgroups())


@processes
@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_pidfd_is_of_the_process_at_the_other_end(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_kernel:
        monkeypatch.setattr(peer, "kernel_pidfd", lambda _: None)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as connection:
        listener.bind("")
        script = (
            "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.listen(); print(1, flush=True); input()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(listener.fileno())], pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        connection.connect(listener.getsockname())
        assert peer.credentials(connection).pid == child.pid
        fd = peer.pidfd(connection)
        assert fd is not None
        with open(f"/proc/self/fdinfo/{fd}") as info:
            assert f"Pid:\t{child.pid}\n" in info.read()
        os.close(fd)
        child.communicate(b"\n")


SLEEPS = [sys.executable, "-c", "input()"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPS, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def written(pid: int) -> ProcessId:
    found = process_id(pid)
    assert found is not None
    return found


@processes
def test_a_process_is_waited_for_until_it_has_ended(child: subprocess.Popen[bytes]) -> None:
    async def wait() -> None:
        with Watched([written(child.pid), written(child.pid)]) as watched:
            assert len(watched) == 2
            assert not await watched.wait(0)
            assert not await watched.wait(0.05)
            asyncio.get_running_loop().call_soon(child.kill)
            assert await watched.wait(SECONDS)
            assert await watched.wait(0), "it has ended, and is not reaped"

    asyncio.run(wait())


@processes
def test_one_that_has_ended_is_visible_until_it_is_reaped_and_over_at_once(child: subprocess.Popen[bytes]) -> None:
    before = written(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with Watched([before]) as watched:
        assert len(watched) == 1
        assert asyncio.run(watched.wait(0))
    child.wait()
    with Watched([before]) as watched:
        assert len(watched) == 0
        assert asyncio.run(watched.wait(0))


@processes
def test_another_process_that_has_got_the_number_is_not_waited_for(child: subprocess.Popen[bytes]) -> None:
    pid, start_time = written(child.pid)
    fds = len(os.listdir("/proc/self/fd"))
    earlier = [ProcessId(pid, start_time - 1), ProcessId(0, 0), ProcessId(2**22 + 1, 5), ProcessId(2**63, 5)]
    with Watched(earlier) as watched:
        assert len(watched) == 0
        assert len(os.listdir("/proc/self/fd")) == fds


@processes
def test_a_name_with_parentheses_hides_nothing() -> None:
    script = "open('/proc/self/comm', 'w').write(') R 1 (x'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert written(child.pid).start_time >= written(os.getpid()).start_time
        child.kill()
