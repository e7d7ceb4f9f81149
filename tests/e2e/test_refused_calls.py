"""A kernel that refuses system calls, as a seccomp profile does that is older than they are: one sentence each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import SECONDS, DaemonProcess, Rank, done, environment
from tests.refused_calls import can_refuse, command

pytestmark = pytest.mark.skipif(not can_refuse(), reason="this kernel filters no system calls")

NEEDED = ("pidfd_open", "memfd_create", "eventfd2")
SPARED = ("timerfd_create", "sched_getaffinity", "prlimit64", "membarrier", "mbind")


def run(refused: str, arguments: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(refused), sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(**variables),
    )


def serve(directory: Path) -> list[str]:
    flags = ["--device", "host", "--socket", str(directory / "kvs.sock"), "--http-port", "0"]
    return ["-m", "kvsidecar", "serve", *flags]


@pytest.mark.parametrize("call", NEEDED)
def test_a_daemon_that_cannot_do_without_says_which(short_dir: Path, call: str) -> None:
    ended = run(call, serve(short_dir))
    assert ended.returncode == 78
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"kvsidecar: the kernel refuses the system call {call} (Operation not permitted): use ")


def test_a_lock_that_may_not_be_taken_is_said(short_dir: Path) -> None:
    ended = run("flock", serve(short_dir))
    assert ended.returncode == 73
    (line,) = ended.stderr.splitlines()
    assert "kvs.sock.lock cannot be locked (Operation not permitted)" in line


def test_what_a_daemon_can_do_without_does_not_keep_it_from_serving(short_dir: Path) -> None:
    with DaemonProcess(short_dir, under=command(*SPARED)) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        done(rank.store("a"))
        done(rank.load("a", at=[1]))
        assert rank.holds(1, "a")
        rank.close()
        assert "process_max_fds" in daemon.get("/metrics")[1]
        assert daemon.terminate() == 0
        assert not [line for line in daemon.read_log() if line["event"] == "stderr"]


@pytest.mark.parametrize(
    ("call", "program"),
    [
        ("memfd_create", "from kvsidecar.client import HostBuffer; HostBuffer(4096)"),
        ("eventfd2", "from kvsidecar.client import Client; Client()"),
    ],
)
def test_a_client_raises_an_error_of_its_own(call: str, program: str) -> None:
    caught = (
        f"from kvsidecar.client import ClientError\ntry:\n    {program}\nexcept ClientError as error:\n    print(error)"
    )
    ended = run(call, ["-c", caught])
    assert ended.stdout.startswith(f"the kernel refuses the system call {call} "), ended.stderr


@pytest.mark.parametrize("words", [["status"], ["top", "--once"], ["clear", "--all", "--yes"], ["pins"]])
def test_commands_say_it_in_one_line(words: list[str], short_dir: Path) -> None:
    ended = run("eventfd2", ["-m", "kvsidecar", *words, "--socket", str(short_dir / "kvs.sock")])
    assert ended.returncode == 69
    (line,) = ended.stderr.splitlines()
    assert line.startswith("kvsidecar: the kernel refuses the system call eventfd2 ")


def test_the_doctor_names_them(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as daemon:
        daemon.wait_ready()
        flags = ["--device", "host", "--pool-size", "1MiB", "--socket", daemon.socket]
        ended = run("eventfd2", ["-m", "kvsidecar", "doctor", *flags], COLUMNS="200")
        assert "without eventfd2" in ended.stdout
        assert "Traceback" not in ended.stderr
