from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.daemon.systemd import (
    EXTEND_SECONDS,
    STOP_MARGIN_SECONDS,
    Notifier,
    NotifySocket,
    status_text,
    watchdog_seconds,
)
from kvsidecar.support.units import GiB
from kvsidecar.types import Readiness, State
from tests.service_manager import ServiceManager

PID = 77


class Heard(NotifySocket):
    """A manager in this process."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, ...]] = []

    def send(self, *lines: str, fds: Sequence[int] = ()) -> None:
        assert not fds
        self.messages.append(lines)

    @property
    def lines(self) -> list[str]:
        return [line for message in self.messages for line in message]


class Enough(Exception):
    """Ends the task of the watchdog."""


def answers(*each: str | None) -> Callable[[], str | None]:
    """What the copy workers say, one after the other."""
    left = iter(each)

    def stuck() -> str | None:
        for answer in left:
            return answer
        raise Enough

    return stuck


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(PID)}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(PID + 1)}, None),
        ({"WATCHDOG_PID": str(PID)}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
    ],
)
def test_the_watchdog_is_fed_only_if_the_manager_asks_this_process(
    environ: dict[str, str], seconds: float | None
) -> None:
    assert watchdog_seconds(environ, PID) == seconds


def test_each_chunk_extends_the_start_once_and_nothing_else_does() -> None:
    heard = Heard()
    readiness = DaemonReadiness(4 * GiB)
    readiness.listen(Notifier(heard, None).changed)
    extend = f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1_000_000}"
    readiness.pinning()
    assert extend not in heard.lines, "nothing is pinned yet"
    for pinned in (1, 2, 2, 3, 4):
        readiness.pinning(pinned_bytes=pinned * GiB, bytes_per_second=2 * GiB, eta_seconds=(4 - pinned) / 2)
    assert heard.lines.count(extend) == 4
    readiness.become_ready()
    assert heard.lines.count(extend) == 4
    assert heard.messages[-1] == ("READY=1", "STATUS=ready: 4 GiB pinned")


def test_ready_is_said_once_and_by_nothing_but_the_state_ready() -> None:
    heard = Heard()
    readiness = DaemonReadiness(GiB)
    notifier = Notifier(heard, None)
    notifier.changed(readiness.now)
    readiness.listen(notifier.changed)
    readiness.pinning(pinned_bytes=GiB)
    assert "READY=1" not in heard.lines
    readiness.fail("no more pages")
    assert "READY=1" not in heard.lines
    assert heard.lines[-1] == "STATUS=not ready: no more pages"
    readiness.drain("the daemon is shutting down")
    notifier.stopping(10.0)
    assert "READY=1" not in heard.lines
    stopping = heard.messages[-1]
    assert stopping[:2] == ("STOPPING=1", f"EXTEND_TIMEOUT_USEC={(10 + STOP_MARGIN_SECONDS) * 1_000_000}")
    assert stopping[2].startswith("STATUS=stopping")


def test_the_status_of_a_pin_has_all_that_a_person_waits_for() -> None:
    now = Readiness(State.PINNING, 1024 * GiB, 312 * GiB, 9.75 * GiB, 73.0)
    assert status_text(now) == "pinning: 312 GiB of 1 TiB (30 %), 10.5 GB/s, 1 min 13 s left"


def test_a_reason_of_several_lines_is_one_field() -> None:
    heard = Heard()
    readiness = DaemonReadiness(GiB)
    readiness.listen(Notifier(heard, None).changed)
    readiness.fail("bad\nREADY=1\nWATCHDOG=1")
    assert heard.messages == [("STATUS=not ready: bad READY=1 WATCHDOG=1",)]
    assert not any("\n" in line for line in heard.lines)


async def test_the_watchdog_is_not_fed_before_the_daemon_is_ready() -> None:
    heard = Heard()
    with pytest.raises(Enough):
        await Notifier(heard, 1e-3).watch(answers(None, None))
    assert heard.messages == []


async def test_a_stuck_copy_stops_the_watchdog_and_progress_starts_it_again() -> None:
    heard = Heard()
    notifier = Notifier(heard, 1e-3)
    notifier.changed(Readiness(State.READY, GiB))
    with pytest.raises(Enough):
        await notifier.watch(
            answers(None, "a store is in flight for 61 s", "a store is in flight for 62 s", None, None)
        )
    assert heard.lines[2:] == [
        "WATCHDOG=1",
        "STATUS=stuck: a store is in flight for 61 s",
        "STATUS=ready: 1 GiB pinned",
        "WATCHDOG=1",
        "WATCHDOG=1",
    ]


async def test_nothing_is_fed_where_no_watchdog_is_asked_for() -> None:
    heard = Heard()
    notifier = Notifier(heard, None)
    notifier.changed(Readiness(State.READY, GiB))
    async with asyncio.timeout(30):
        await notifier.watch(lambda: None)
    assert "WATCHDOG=1" not in heard.lines


async def test_a_reload_before_ready_does_not_say_ready() -> None:
    heard = Heard()
    notifier = Notifier(heard, None)

    async def reload() -> str:
        return "settings reloaded"

    await notifier.reloading(reload)
    assert heard.messages == []
    notifier.changed(Readiness(State.READY, GiB))
    await notifier.reloading(reload)
    begin, end = heard.messages[-2:]
    assert begin[0] == "RELOADING=1"
    assert begin[1].startswith("MONOTONIC_USEC=")
    assert end == ("READY=1", "STATUS=ready: 1 GiB pinned (settings reloaded)")


@pytest.mark.parametrize("abstract", [False, True])
def test_messages_arrive_at_a_path_and_at_an_abstract_name(short_dir: Path, abstract: bool) -> None:
    with ServiceManager(short_dir, abstract=abstract) as manager:
        NotifySocket(manager.address).send("READY=1", "STATUS=5 µs")
        assert manager.wait("READY") == {"READY": "1", "STATUS": "5 µs"}


@pytest.mark.parametrize("address", [None, "vsock:2:1234", "", "/nowhere/notify"])
def test_a_manager_that_cannot_be_reached_harms_nothing(address: str | None) -> None:
    NotifySocket(address).send("READY=1")


def test_a_manager_that_does_not_read_never_holds_the_daemon_up(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        path = str(short_dir / "deaf")
        deaf.bind(path)
        to = NotifySocket(path)
        for _ in range(10_000):  # more than any queue of the kernel takes
            to.send("STATUS=hello")
