"""A daemon whose standard error takes nothing any more, through the real process: it serves, and ends, all the same."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.client import Client, DaemonUnreachable, Namespace
from tests.harness import SECONDS, DaemonProcess, Rank, done, environment, eventually
from tests.open_files import open_files

LOST = 'kvsidecar_log_lines_lost_total{reason="%s"}'


def find_http(daemon: DaemonProcess) -> None:
    """Where a daemon answers HTTP that cannot say so: its only TCP socket that listens."""
    process = Path(f"/proc/{daemon.process.pid}")
    inodes = {file.removeprefix("socket:[").removesuffix("]") for file in open_files(daemon.process.pid).values()}
    rows = [line.split() for line in (process / "net" / "tcp").read_text().splitlines()[1:]]
    (port,) = {row[1].rpartition(":")[2] for row in rows if row[3] == "0A" and row[9] in inodes}
    daemon.http = f"http://127.0.0.1:{int(port, 16)}"


def wait_ready(daemon: DaemonProcess) -> None:
    """Without its log."""
    with Client(daemon.socket, timeout=SECONDS) as client:

        def is_ready() -> bool:
            assert daemon.process.poll() is None
            with contextlib.suppress(DaemonUnreachable):  # it has no socket yet, or one that does not listen yet
                return client.status().readiness.state == 3  # STATE_READY
            return False

        eventually(is_ready)
    find_http(daemon)


class Pipe:
    """The read end of a daemon's standard error."""

    def __init__(self) -> None:
        self.fd, self.write_end = os.pipe()
        self._rest = b""

    def close(self) -> None:
        for fd in (self.fd, self.write_end):
            if fd >= 0:
                os.close(fd)
        self.fd = self.write_end = -1

    def until(self, event: str) -> list[dict[str, Any]]:
        """Read to the next line with this event; returns what was read."""
        lines: list[dict[str, Any]] = []
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                lines.append(json.loads(line))
                if lines[-1]["event"] == event:
                    return lines
            else:
                assert select.select([self.fd], [], [], SECONDS)[0], f"nobody says {event!r}"
                data = os.read(self.fd, 65536)
                assert data, f"the daemon ended without {event!r}"
                self._rest += data


@contextlib.contextmanager
def pipe() -> Iterator[Pipe]:
    with contextlib.closing(Pipe()) as both:
        yield both


@contextlib.contextmanager
def nobody_reads(directory: Path) -> Iterator[DaemonProcess]:
    """The reader goes away after "ready"."""
    with pipe() as read, DaemonProcess(directory, stderr=read.write_end) as daemon:
        read.until("ready")
        wait_ready(daemon)
        read.close()
        yield daemon


@contextlib.contextmanager
def always_full(directory: Path) -> Iterator[DaemonProcess]:
    fd = os.open("/dev/full", os.O_WRONLY)
    with DaemonProcess(directory, stderr=fd) as daemon:
        os.close(fd)
        wait_ready(daemon)
        yield daemon


GONE = {"closed": nobody_reads, "full": always_full}


def serves(daemon: DaemonProcess) -> None:
    """A rank attaches, stores and loads; the probes answer."""
    rank = Rank(daemon, client=daemon.client())
    done(rank.store("a"))
    done(rank.load("a", at=[3]))
    assert rank.holds(3, "a")
    rank.close()
    assert daemon.get("/ready")[0] == daemon.get("/health")[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("reason", GONE)
def test_a_log_that_takes_nothing_fails_neither_a_request_nor_the_end(
    short_dir: Path, reason: str, number: signal.Signals
) -> None:
    with GONE[reason](short_dir) as daemon:
        serves(daemon)
        assert daemon.metric(LOST % reason) >= 2, "attached and detached were said to nobody"
        daemon.process.send_signal(number)
        assert daemon.process.wait(SECONDS) == 0
        assert not Path(daemon.socket).exists()


@pytest.mark.parametrize("reason", GONE)
def test_a_second_signal_still_ends_it_at_once(short_dir: Path, reason: str) -> None:
    with GONE[reason](short_dir) as daemon:
        # Stopped, it finds both signals when it goes on.
        daemon.process.send_signal(signal.SIGSTOP)
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.send_signal(signal.SIGINT)
        daemon.process.send_signal(signal.SIGCONT)
        assert daemon.process.wait(SECONDS) in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_a_log_on_a_full_disk_goes_on_when_there_is_room_and_says_what_was_lost(short_dir: Path) -> None:
    disk = short_dir / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        log, filler = disk / "log", disk / "filler"
        with log.open("wb") as stderr, DaemonProcess(short_dir, stderr=stderr.fileno()) as daemon:
            wait_ready(daemon)
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * 4096)
            while not daemon.metric(LOST % "full"):  # what is left of the log's last page
                serves(daemon)
            filler.unlink()
            serves(daemon)
            lost = daemon.metric(LOST % "full")
            assert daemon.terminate() == 0
        lines = log.read_bytes().splitlines()
        said = [json.loads(line) for line in lines if b"lines of the log were lost" in line]
        assert [each["full"] for each in said] == [lost]
        assert json.loads(lines[-1])["event"] == "stopped"
        assert sum(not line.endswith(b"}") for line in lines) <= 1, "a torn line spoiled the next one"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_reader_that_is_stuck_holds_up_nothing_and_is_told_what_it_missed(short_dir: Path) -> None:
    # Nothing has such a namespace; a character of it is six in JSON, so that it makes 30 KB of log.
    long = Namespace("\1" * 1000, "\1" * 1000, "\1" * 1000, 16, 1, 1, "\1" * 1000, extra="\1" * 1000)
    with pipe() as read, DaemonProcess(short_dir, stderr=read.write_end) as daemon:
        read.until("ready")
        wait_ready(daemon)
        os.close(read.write_end)
        read.write_end = -1
        fcntl.fcntl(read.fd, fcntl.F_SETPIPE_SZ, 4096)
        with daemon.client() as operator:
            while daemon.metric(LOST % "behind") < 3:
                operator.clear(long)
            serves(daemon)
            lost = daemon.metric(LOST % "behind")
            said: list[int] = []
            while sum(said) < lost:
                said += [each["behind"] for each in read.until("lines of the log were lost") if "behind" in each]
            assert sum(said) == lost
            operator.clear(long)
            assert read.until("cleared")[-1]["part"] == "rpc", "it goes on"
            while daemon.metric(LOST % "behind") == lost:
                operator.clear(long)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(SECONDS) == 0


@pytest.mark.parametrize("flags", [["--pool-size", "lots"], ["--pool-size", "1MiB", "--http-host", "no such host"]])
def test_the_exit_code_is_right_though_nobody_reads_why(short_dir: Path, flags: list[str]) -> None:
    command = [sys.executable, "-m", "kvsidecar", "serve", "--device", "host", "--socket", str(short_dir / "kvs.sock")]
    with pipe() as read:
        os.close(read.fd)
        read.fd = -1
        ran = subprocess.run(
            [*command, "--http-port", "0", *flags], stderr=read.write_end, timeout=SECONDS, env=environment()
        )
    assert ran.returncode == 78


def test_a_reload_of_the_log_level_reaches_the_copiers_also_those_that_start_later(short_dir: Path) -> None:
    """A copier warns of every failpoint, if its level lets it. Requests are answered in order, that of the level before
    that of the second rank."""
    file = short_dir / "kvsidecar.toml"
    file.write_text('log_level = "error"')
    with (
        pipe() as read,
        DaemonProcess(
            short_dir, "--config", str(file),
            stderr=read.write_end, KVSIDECAR_FAILPOINTS="copier.import=delay(0)",
        ) as daemon,
    ):  # fmt: skip
        wait_ready(daemon)
        one = Rank(daemon, client=daemon.client())
        file.write_text('log_level = "info"')
        daemon.process.send_signal(signal.SIGHUP)
        said = read.until("settings reloaded")
        two = Rank(daemon, client=daemon.client(), instance="two")
        said += read.until("failpoint")
        assert [line["hit"] for line in said if line["event"] == "failpoint"] == [2], (
            "of the self-test, or the first rank"
        )
        two.close()
        (copier,) = daemon.copiers()
        os.kill(copier, signal.SIGKILL)
        assert read.until("failpoint")[-1]["hit"] == 0, "the next process counts from 0"
        one.close()
