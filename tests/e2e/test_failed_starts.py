"""Starts that fail: the reason is the service manager's last status, at once, and the last line of standard error."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import SECONDS, DaemonProcess
from tests.service_manager import ServiceManager

CHUNKS = ("--pool-size", "1MiB", "--slab-size", "128KiB", "--chunk-size", "128KiB")


def refused(directory: Path, *flags: str, **variables: str) -> tuple[int, str, list[str]]:
    """Exit code, last line of standard error, and every status that the service manager was given."""
    with ServiceManager(directory) as manager:
        variables["NOTIFY_SOCKET"] = manager.address
        with DaemonProcess(directory, *flags, until="stderr", **variables) as daemon:
            code = daemon.process.wait(SECONDS)
            said = [line["text"] for line in daemon.read_log() if line["event"] == "stderr"][-1]
        manager.drain()
        assert manager.fields("READY", "STOPPING") == [], "it was neither ready nor told to stop"
        return code, said.strip(), [text for _, text in manager.fields("STATUS")]


@pytest.mark.parametrize(
    ("flags", "code", "reason"),
    [
        (("--pool-dir", "/proc"), 78, "pool_dir='/proc' is not in memory"),
        (("--pool-size", "lots"), 78, "--pool-size='lots'"),
        (("--pool-sise", "1MiB"), 2, "--pool-sise"),
        (("--devices", "host,none"), 78, "device none is not visible"),
        (("--socket-group", "no-such-group", "--socket-mode", "0660"), 78, "'no-such-group' does not exist"),
        (("--pool-size", "900GiB"), 78, "the pool needs 900 GiB"),
    ],
)
def test_a_start_that_fails_says_why_in_the_managers_status(
    short_dir: Path, flags: Sequence[str], code: int, reason: str
) -> None:
    ended, said, statuses = refused(short_dir, *flags)
    assert ended == code
    assert reason in said
    assert statuses[-1].startswith("failed: ")
    assert reason in statuses[-1]
    assert not any("stopping" in each for each in statuses)


@pytest.mark.parametrize("point", ["start.load", "pool.pin_chunk@3", "pool.reserve"])
def test_what_nobody_has_thought_of_is_said_too_and_may_be_tried_again(short_dir: Path, point: str) -> None:
    code, said, statuses = refused(short_dir, *CHUNKS, KVSIDECAR_FAILPOINTS=f"{point}=raise(no more pages)")
    assert code == 1
    assert "no more pages" in said
    assert statuses[-1].startswith("failed: ")
    assert "no more pages" in statuses[-1]
    assert not any("stopping" in each for each in statuses)


def test_a_port_in_use_is_said(short_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, said, statuses = refused(short_dir, "--http-port", str(port))
    assert code == 75
    assert statuses[-1] == f"failed: {said.removeprefix('kvsidecar: ')}"
    assert f"127.0.0.1:{port} (Address already in use)" in said


def test_a_file_in_the_sockets_place_is_said(short_dir: Path) -> None:
    (short_dir / "kvs.sock").write_text("precious")
    code, said, statuses = refused(short_dir)
    assert code == 73
    assert "is not a socket" in said
    assert statuses[-1] == f"failed: {said.removeprefix('kvsidecar: ')}"


def test_a_daemon_that_stays_though_its_pool_cannot_be_pinned_keeps_the_reason_while_it_is_stopped(
    short_dir: Path,
) -> None:
    """What a manager does when the start has timed out."""
    failpoints = "pool.pin_chunk=raise(no more pages)"
    with ServiceManager(short_dir) as manager:
        variables = {"NOTIFY_SOCKET": manager.address, "KVSIDECAR_FAILPOINTS": failpoints}
        with DaemonProcess(short_dir, "--on-pin-failure", "stay", **variables) as daemon:
            assert "no more pages" in manager.wait("STATUS", "not ready: ")["STATUS"]
            assert daemon.terminate() == 0
        manager.drain()
        assert "no more pages" in manager.fields("STATUS")[-1][1]
