"""Children end with their parent, and none is lost while it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.support import child_process, supervised_child
from kvsidecar.support.child_side import pack
from tests.harness import SECONDS, eventually
from tests.marks import processes
from tests.open_files import open_files

pytestmark = processes

NOBODY = 41003
"""A user without processes. (Root may have any number.)"""
SLEEP = "import time; print('up', flush=True); time.sleep(3600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
PARENT = """
import subprocess, sys, time
from kvsidecar.support import child_process, supervised_child
from kvsidecar.support.child_side import pack
started = child_process.start([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(3600)"])
print(started.pid, flush=True)
time.sleep(3600)
"""


FULL = f"""
import ctypes, os, resource, sys
from concurrent.futures import ThreadPoolExecutor
from kvsidecar.errors import TooManyProcesses
from kvsidecar.support import child_process, supervised_child, threads
prepare = ctypes.CFUNCTYPE(None)(lambda: os._exit(99))
assert ctypes.CDLL(None).__register_atfork(prepare, None, None, None) == 0
if os.getuid() == 0:
    os.setuid({NOBODY})
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
for attempt in (
    lambda: supervised_child.launch("this"),
    lambda: child_process.start([sys.executable]),
    lambda: threads.started_pool(2),
):
    try:
        attempt()
    except TooManyProcesses as error:
        print(error)
print(threads.submit(ThreadPoolExecutor(1), lambda: 42).result())
os._exit(0)
"""
"""Of a user who has as many processes as it may. Its end is 99 if handlers of a fork have run."""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen(python(PARENT), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        words = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        words.remove("up")
        (pid,) = map(int, words)
        assert alive(pid)
        parent.kill()
        eventually(lambda: not alive(pid), "the child has ended")


def test_a_child_of_a_parent_that_is_gone_does_not_begin() -> None:
    launched = [sys.executable, "-c", child_process._LAUNCHER, "1", "same", *python("print('it runs')")]
    assert subprocess.run(launched, stdout=subprocess.PIPE, check=True).stdout == b""


def test_a_child_has_its_cores_and_not_the_settings_of_another_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIDECAR_POOL_SIZE", "1TiB")
    monkeypatch.setenv("OTHER", "kept")
    mine = os.sched_getaffinity(0)
    code = "import os; print(os.sched_getaffinity(0), os.environ['OTHER'], 'KVSIDECAR_POOL_SIZE' in os.environ)"
    cores = frozenset({min(mine)})
    with child_process.start(python(code), cores=cores, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"{set(cores)} kept False\n"
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_child_is_started_loses_no_child(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[Any]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), number)
            time.sleep(0)  # where Python runs the handlers of signals that came

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            child_process.start(python(SLEEP))
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    (process,) = started
    assert process.returncode is not None


@pytest.mark.parametrize(("code", "by_itself"), [(SLEEP, True), (DEAF, False)])
def test_one_that_does_not_end_is_killed(code: str, by_itself: bool) -> None:
    with child_process.start(python(code), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert child_process.stop(process, SECONDS if by_itself else 0.1) is by_itself
        assert process.returncode == -(signal.SIGTERM if by_itself else signal.SIGKILL)
        assert child_process.stop(process, SECONDS), "ending what is over is harmless"


def test_an_interrupt_while_it_ends_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with child_process.start(python(DEAF), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait = process.wait

        def interrupted(seconds: float | None = None) -> int:
            if seconds is not None:
                raise KeyboardInterrupt
            return wait()

        monkeypatch.setattr(process, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            child_process.stop(process, SECONDS)
        assert process.returncode == -signal.SIGKILL


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\n\xff three\n")
    assert child_process.last_lines(log, 2) == "two\n\ufffd three"


def test_where_no_more_processes_may_be_it_is_said_and_nothing_of_a_fork_runs() -> None:
    """gRPC's handlers of a fork end the process."""
    ran = subprocess.run(python(FULL), stdout=subprocess.PIPE, text=True, check=False, timeout=SECONDS)
    assert ran.returncode == 0
    *said, inline = ran.stdout.splitlines()
    assert [each.partition(" at present")[0] for each in said] == [
        "this user may start no more processes",
        "this user may start no more processes",
        "this user may start no more threads or processes",
    ]
    assert inline == "42"


def test_a_child_of_the_daemon_has_no_descriptor_that_it_was_not_given(tmp_path: Path) -> None:
    """Also none that a library in C has left inheritable."""
    with (tmp_path / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        launched = supervised_child.launch("kvsidecar.tiers.process")
        with launched.connection, launched.process:
            launched.connection.settimeout(SECONDS)
            launched.connection.sendall(pack({"do": "bound"}))
            assert launched.connection.recv(1)
            sockets = [each for each in open_files(launched.process.pid).values() if "socket" in each]
            assert len(sockets) == 1
            assert str(tmp_path / "file") not in open_files(launched.process.pid).values()
            launched.process.kill()
