"""What `kvsidecar serve` writes to standard error: at a terminal, and where writing fails half way."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvsidecar.daemon.serve import bar
from kvsidecar.support import log
from kvsidecar.support.log import Text
from kvsidecar.support.log_writer import LogWriter, Loss
from kvsidecar.types import Readiness, State
from tests.cli.command import run
from tests.harness import SECONDS, DaemonProcess, Gate
from tests.marks import processes
from tests.terminal import Terminal

SLOW = {"KVSIDECAR_FAILPOINTS": "pool.pin_chunk=delay(0.2)"}
CSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def serve(short_dir: Path, columns: int = 80, **variables: str) -> Terminal:
    flags = ["--device", "host", "--pool-size", "512KiB", "--chunk-size", "64KiB", "--slab-size", "64KiB"]
    socket = str(short_dir / "kvs.sock")
    return Terminal("serve", *flags, "--socket", socket, "--http-port", "0", columns=columns, **variables)


# -- at a terminal -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 80, 240])
@processes
def test_no_line_is_broken_by_the_terminal(short_dir: Path, columns: int) -> None:
    with serve(short_dir, columns, **SLOW) as terminal:
        drawn = terminal.until("\x1b[1mready", raw=True)
        terminal.press(b"\x03")
        assert terminal.end() == 0
    assert "\x1b[32m" in drawn, "no colors"
    lines = [CSI.sub("", part).rstrip("\r\n") for part in re.split(r"\r\x1b\[K|\r\n", drawn)]
    assert max(len(line) for line in lines) <= columns
    bars = [line for line in lines if line.startswith("pinning ")]
    assert len(set(bars)) >= 4
    assert all("█" in line or "░" in line for line in bars)
    kinds = re.compile(r"pinning |\d\d:\d\d:\d\d \[| {9}\w+=|$")
    assert [line for line in lines if not kinds.match(line)] == []
    assert "http://127.0.0.1:" in drawn
    if columns == 240:  # the version of a checkout between two releases is long
        assert not any(line.startswith(" ") for line in lines), "there was room for all of it"


@processes
def test_no_color_and_ascii_are_heeded(short_dir: Path) -> None:
    with serve(short_dir, NO_COLOR="1", PYTHONIOENCODING="ascii", **SLOW) as terminal:
        drawn = terminal.until("] ready", raw=True)
        terminal.press(b"\x03")
        assert terminal.end() == 0
    assert set(CSI.findall(drawn)) == {"\x1b[K"}
    assert drawn.isascii()
    assert "#" in drawn
    assert "Traceback" not in drawn


@pytest.mark.parametrize("command", [["status"], ["top", "--once", "--interval", "0.1"], ["engines"], ["doctor"]])
def test_every_command_can_be_read_in_ascii(daemon: DaemonProcess, command: list[str]) -> None:
    shown = run(*command, "--socket", daemon.socket, PYTHONIOENCODING="ascii", LC_ALL="C", COLUMNS="100")
    assert shown.returncode in (0, 1), shown.stderr
    assert "Traceback" not in shown.stderr
    assert shown.stdout.isascii()
    if command[0] in ("status", "top"):
        assert "..........  0 B of 1 MiB used" in shown.stdout


@processes
def test_a_terminal_that_was_stopped_holds_up_nothing(short_dir: Path) -> None:
    gate = Gate(short_dir)  # the pool becomes ready only when nothing can be drawn any more
    rules = f"pool.pin_chunk@7={gate}"
    with contextlib.closing(gate), serve(short_dir, 200, KVSIDECAR_FAILPOINTS=rules) as terminal:
        # Not until the bar: it is drawn below the first of the lines that wait, and this one may be the next.
        (url,) = re.findall(r"http=(http://[\d.:]+)", terminal.until(" tcp_port="))
        terminal.press(b"\x13")  # Ctrl-S
        gate.let_pass()
        state = ""
        while state != "ready":
            with urllib.request.urlopen(f"{url}/status", timeout=SECONDS) as reply:
                state = json.load(reply)["readiness"]["state"]
        terminal.press(b"\x11")  # Ctrl-Q
        terminal.until("] ready")
        terminal.press(b"\x03")
        assert terminal.end() == 0


def test_the_bar_is_there_while_the_pool_is_pinned_and_never_wider_than_it_may_be() -> None:
    now = Readiness(State.PINNING, 4 << 20, 1 << 20, 1e9, 6.0)
    assert bar(now, 80) == f"pinning {'█' * 9}{'░' * 30} 1 MiB of 4 MiB, 1 GB/s, 6 s left"
    assert {len(bar(now, columns)) for columns in range(1, 60)} == set(range(1, 60))
    assert bar(Readiness(State.READY, 4 << 20), 80) == ""


def test_what_a_client_chose_does_not_steer_the_terminal() -> None:
    with open(os.devnull, "w") as stream:
        text = Text(stream)(None, "", {"level": "info", "event": "attached", "instance": "\x1b[2Jx", "empty": ""})
    assert text.endswith(r"empty='' instance='\x1b[2Jx'")
    assert text.isprintable()


# -- where writing fails half way ----------------------------------------------------------------------------------


def describe(lost: Mapping[Loss, int]) -> str:
    return f"lost {dict(lost)}"


def test_a_torn_line_does_not_spoil_the_next_one() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    writer = LogWriter(write, describe)
    fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, 4096)
    writer.write(b"x" * 6000 + b"\n")  # the pipe has room for a part of it
    os.read(read, 100)
    os.close(read)
    assert writer.flush(SECONDS)
    assert writer.lost()[Loss.CLOSED] == 1
    file = os.open("/tmp", os.O_RDWR | os.O_TMPFILE)
    os.dup2(file, write)
    writer.write(b"next\n")
    assert writer.flush(SECONDS)
    assert os.pread(file, 1000, 0) == b"\nlost {<Loss.CLOSED: 'closed'>: 1}\nnext\n"
    os.close(file)


def test_a_descriptor_that_somebody_made_non_blocking_loses_nothing() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    writer = LogWriter(write, describe)
    lines = [b"%d" % number * 1000 + b"\n" for number in range(100)]
    for line in lines:
        writer.write(line)
    assert not writer.flush(0.0)
    got = b""
    while len(got) < sum(map(len, lines)):
        got += os.read(read, 65536)
    assert got == b"".join(lines)
    assert writer.flush(SECONDS)
    assert not any(writer.lost().values())
    os.close(read)


def test_lines_beyond_what_may_wait_are_lost_and_said() -> None:
    read, write = os.pipe()
    writer = LogWriter(write, describe, max_waiting=1000)
    writer.write(b"a" * 200_000 + b"\n")  # one line may always wait
    assert os.read(read, 1) == b"a", "it is being written"
    for _ in range(5):
        writer.write(b"lost\n")
    while not os.read(read, 65536).endswith(b"\n"):
        pass
    assert writer.flush(SECONDS), "there is room again"
    writer.write(b"b\n")
    assert os.read(read, 65536) == b"lost {<Loss.BEHIND: 'behind'>: 5}\nb\n"
    os.close(read)


def test_what_clients_cause_is_one_line_of_a_kind_at_a_time_and_says_how_many_there_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log, "LIMITED_SECONDS", 3600.0)
    with capture_logs() as lines:
        caused = log.limited("part")
        for number in range(100):
            caused.warning("one", number=number)
            caused.info("two")
        monkeypatch.setattr(log, "LIMITED_SECONDS", 0.0)
        caused.warning("one", number=100)
    assert [(line["event"], line["log_level"], line.get("left_out")) for line in lines] == [
        ("one", "warning", None),
        ("two", "info", None),
        ("one", "warning", 99),
    ]


def test_kinds_of_lines_take_no_more_and_more_memory() -> None:
    rate = log.Rate()
    for number in range(10 * log.MAX_KINDS):
        assert rate.passes(str(number)) == 0
        assert rate.passes(str(number)) is None
    assert len(rate._last) <= log.MAX_KINDS
    assert len(rate._left_out) <= log.MAX_KINDS


def test_a_report_that_fails_costs_its_line_and_not_the_log() -> None:
    near, far = os.pipe()
    broken = True

    def describe(lost: Mapping[Loss, int]) -> str:
        if broken:
            raise ZeroDivisionError
        return f"lost {lost}"

    writer = LogWriter(far, describe)
    writer._lost[Loss.FULL] += 1  # so that there is something to report
    writer.write(b"one\n")
    assert writer.flush(SECONDS), "nothing is written any more"
    broken = False
    writer.write(b"two\n")
    assert writer.flush(SECONDS)
    os.close(far)
    with open(near, "rb") as pipe:
        assert pipe.read().splitlines()[-1] == b"two"
    assert writer.lost()[Loss.FAILED] == 1
