"""Sockets at paths of any name; and sockets, their directory and the lock that are removed under a daemon that runs."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsidecar.client import Client
from kvsidecar.errors import ClientError
from tests.cli.command import run
from tests.harness import SECONDS, DaemonProcess, Rank, done, eventually
from tests.marks import both_protocols, promise


@pytest.fixture
def directory(short_dir: Path) -> Iterator[Path]:
    """Of the sockets: it may be removed."""
    (made := short_dir / "run").mkdir()
    yield made
    made.mkdir(exist_ok=True)


@pytest.fixture
def daemon(directory: Path, local: bool) -> Iterator[DaemonProcess]:
    with DaemonProcess(directory, local=local) as process:
        yield process.wait_ready()


def answers(daemon: DaemonProcess) -> bool:
    """Whether a client that comes now is served, over the attach socket and over gRPC."""
    try:
        with Client(daemon.socket, timeout=SECONDS) as client:
            return client.status().epoch > 0
    except ClientError:
        return False


@promise("If the lock file or a socket is removed, the daemon creates it again within about a second")
@both_protocols
@pytest.mark.parametrize("gone", [("",), (".attach",), ("", ".attach"), ("", ".attach", ".lock"), ("directory",)])
def test_they_are_made_again_and_who_is_attached_goes_on(
    daemon: DaemonProcess, directory: Path, gone: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(daemon)
    done(rank.store("a"))
    for _ in range(2):
        if gone == ("directory",):
            shutil.rmtree(directory)
        for suffix in gone if gone != ("directory",) else ():
            os.unlink(daemon.socket + suffix)
        line = daemon.wait_log("sockets were removed, and have been created again")
        assert line["missing"]
        assert answers(daemon)
        eventually(lambda: rank.hits("a") == 1)
        done(rank.load("a", at=[3]))
        assert daemon.get("/ready")[0] == 200
    attached = [each.message for each in caplog.records if "is lost" in each.message]
    assert not attached, "the session has ended"
    late = Rank(daemon)
    assert late.hits("a") == 1
    second = DaemonProcess(directory, "--lock-wait", "0", until="stderr")
    with second:
        assert second.process.wait(SECONDS) == 73
    assert answers(daemon), "a second daemon has taken the sockets"
    assert daemon.terminate() == 0
    assert sorted(each.name for each in directory.iterdir()) == ["kvs.sock.lock"]


def test_a_directory_that_cannot_be_made_again_is_said(daemon: DaemonProcess, directory: Path) -> None:
    rank = Rank(daemon)
    done(rank.store("a"))
    assert rank.hits("a") == 1
    shutil.rmtree(directory)
    directory.write_text("in the way")
    line = daemon.wait_log("sockets are gone and cannot be created again")
    assert str(directory) in line["reason"]
    code, ready = daemon.get("/ready")
    assert (code, ready["ready"]) == (503, False)
    assert "nobody can connect" in ready["reason"]
    assert daemon.get("/health")[0] == 200, "a restart would lose the cache"
    done(rank.store("b"))
    assert rank.hits("a", "b") == 2, "who is attached is served as before"
    directory.unlink()
    daemon.wait_log("sockets were removed, and have been created again")
    eventually(lambda: daemon.get("/ready")[0] == 200)
    assert answers(daemon)


def test_a_client_says_that_a_connected_daemon_takes_no_calls(
    daemon: DaemonProcess, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(daemon)
    done(rank.store("a"))
    shutil.rmtree(directory)
    directory.write_text("in the way")
    daemon.wait_log("sockets are gone and cannot be created again")
    with caplog.at_level(logging.INFO, "kvsidecar.client"):
        said = "accepts no calls, so lookups miss"
        eventually(lambda: rank.hits("a") == 0 and any(said in each.message for each in caplog.records))
        directory.unlink()
        eventually(lambda: rank.hits("a") == 1)
    messages = [each.message for each in caplog.records]
    assert sum(said in each for each in messages) == 1
    assert sum("accepts calls again" in each for each in messages) == 1


def test_a_second_daemon_that_has_taken_the_sockets_keeps_them(directory: Path, daemon: DaemonProcess) -> None:
    """The lock was removed, too, and the second one was faster than the first one noticed."""
    daemon.process.send_signal(signal.SIGSTOP)
    shutil.rmtree(directory)
    with DaemonProcess(directory) as second:
        second.wait_ready()
        daemon.process.send_signal(signal.SIGCONT)
        line = daemon.wait_log("sockets are gone and cannot be created again")
        assert f"another kvsidecar serves {daemon.socket} (pid {second.process.pid}" in line["reason"]
        assert daemon.get("/ready")[0] == 503
        assert second.terminate() == 0
        daemon.wait_log("sockets were removed, and have been created again")
        eventually(lambda: daemon.get("/ready")[0] == 200)
    daemon.process.send_signal(signal.SIGSTOP)
    shutil.rmtree(directory)
    with DaemonProcess(directory) as second:
        second.wait_ready()
        daemon.process.send_signal(signal.SIGCONT)
        daemon.wait_log("sockets are gone and cannot be created again")
        assert daemon.terminate() == 0
        assert answers(second), "the first one has removed the second one's sockets"


@pytest.mark.parametrize("name", ["a%2Fb%20c", "100%", "a#b", "a?b=c", "a b", "ü", "a:b@c"])
def test_whatever_its_path_is_both_protocols_find_the_socket(short_dir: Path, name: str) -> None:
    (directory := short_dir / name).mkdir()
    with DaemonProcess(directory) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        daemon.local = False
        over_grpc = Rank(daemon)
        assert over_grpc.hits("a") == 1
        assert run("status", "--socket", daemon.socket).returncode == 0
        over_grpc.close()
        rank.close()
        assert daemon.terminate() == 0
    assert [each.name for each in directory.iterdir()] == ["kvs.sock.lock"]
