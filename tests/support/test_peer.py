"""Who is at the other end of a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from kvsidecar.support import peer


def test_the_kernel_names_this_process_to_itself() -> None:
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        assert peer.credentials(near) == (os.getpid(), os.getuid(), os.getgid())
        assert peer.groups(near) == frozenset(os.getgroups())


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
