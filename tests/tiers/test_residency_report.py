"""What a tier's process tells of what it has: everything, in an order whose last word is right."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvsidecar.cache import change_log
from kvsidecar.cache.change_log import Outlet
from kvsidecar.tiers import residency_report
from kvsidecar.tiers.backend import ShardSpace
from kvsidecar.tiers.residency_report import ResidencyReporter
from kvsidecar.types import Namespace, Residency
from tests.tiers import memory_backend

SPACE = ShardSpace(Namespace("m", "bf16", "LBNHC", 16, 1, 1, "sha256"), 0, 0, 1, 4096)


class Gone(ConnectionError):
    """The daemon."""


class ScriptedEngine:
    """Has pieces, and lets the test say what changes."""

    def __init__(self, *pieces: bytes) -> None:
        self.there = pieces
        self.outlet: Outlet | None = None

    def watch(self, space: ShardSpace, outlet: Outlet | None) -> None:
        assert space == SPACE
        self.outlet = outlet

    def pieces(self, space: ShardSpace) -> Iterator[bytes]:
        assert space == SPACE
        yield from self.there


class Daemon:
    """Hears everything in this thread, until it has gone."""

    def __init__(self, backend: object, most: int = 100) -> None:
        self.heard: list[tuple[int, Residency, bytes]] = []
        self.pauses: list[int] = []
        self.most = most
        self.teller = ResidencyReporter(backend, self._hear, lambda _: self.pauses.append(len(self.heard)))

    def _hear(self, number: int, what: Residency, hashes: bytes) -> None:
        self.heard.append((number, what, hashes))
        if len(self.heard) >= self.most:
            raise Gone

    def listen(self, messages: int) -> list[tuple[Residency, bytes]]:
        """Returns when so many more messages have come."""
        before = len(self.heard)
        self.most = before + messages
        self.teller.run()
        return [(what, hashes) for _, what, hashes in self.heard[before:]]


def test_what_is_there_is_told_and_then_what_changes() -> None:
    backend = ScriptedEngine(b"aa", b"", b"bb")
    daemon = Daemon(backend)
    daemon.teller.watch(3, SPACE)
    assert daemon.listen(3) == [(Residency.STORED, b"aa"), (Residency.STORED, b"bb"), (Residency.COMPLETE, b"")]
    assert backend.outlet is not None
    backend.outlet(Residency.STORED, 0, b"cc")
    backend.outlet(Residency.REMOVED, 0, b"aa")
    backend.outlet(Residency.CLEARED, 0, b"")
    assert daemon.listen(3) == [(Residency.STORED, b"cc"), (Residency.REMOVED, b"aa"), (Residency.CLEARED, b"")]
    assert {number for number, *_ in daemon.heard} == {3}


def test_a_change_is_told_behind_the_pieces_before_it_and_before_those_after_it() -> None:
    backend = ScriptedEngine()

    def pieces(_space: ShardSpace) -> Iterator[bytes]:
        yield b"aa"
        assert backend.outlet is not None
        backend.outlet(Residency.REMOVED, 0, b"aa")
        yield b"bb"

    backend.pieces = pieces  # type: ignore[method-assign,assignment]
    daemon = Daemon(backend)
    daemon.teller.watch(1, SPACE)
    heard = daemon.listen(4)
    assert heard.index((Residency.STORED, b"aa")) < heard.index((Residency.REMOVED, b"aa"))
    assert heard[-1] == (Residency.COMPLETE, b"")


def test_a_space_that_is_watched_again_is_told_from_the_beginning() -> None:
    daemon = Daemon(ScriptedEngine(b"aa", b"bb"))
    daemon.teller.watch(1, SPACE)
    assert daemon.listen(1) == [(Residency.STORED, b"aa")]
    daemon.teller.watch(1, SPACE)
    assert daemon.listen(3) == [(Residency.STORED, b"aa"), (Residency.STORED, b"bb"), (Residency.COMPLETE, b"")]


def test_nothing_is_told_of_a_space_that_is_watched_no_more() -> None:
    backend = ScriptedEngine(b"aa")
    daemon = Daemon(backend)
    daemon.teller.watch(1, SPACE)
    daemon.listen(2)
    outlet = backend.outlet
    assert outlet is not None
    daemon.teller.unwatch(1)
    assert backend.outlet is None
    outlet(Residency.STORED, 0, b"late")
    daemon.teller.watch(2, SPACE)
    assert daemon.listen(2) == [(Residency.STORED, b"aa"), (Residency.COMPLETE, b"")]


def test_more_changes_than_are_kept_are_told_as_a_new_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "MAX_LOG_BYTES", 1000)
    backend = ScriptedEngine(b"aa")
    daemon = Daemon(backend)
    daemon.teller.watch(1, SPACE)
    daemon.listen(2)
    assert backend.outlet is not None
    for number in range(1000):
        backend.outlet(Residency.STORED, 0, bytes([number % 256]) * 8)
        assert daemon.teller._log.nbytes <= 1000
    assert daemon.listen(3) == [(Residency.CLEARED, b""), (Residency.STORED, b"aa"), (Residency.COMPLETE, b"")]


def test_a_long_list_leaves_the_daemon_time() -> None:
    daemon = Daemon(ScriptedEngine(*[b"aa"] * 3 * residency_report.PIECES))
    daemon.teller.watch(1, SPACE)
    daemon.listen(3 * residency_report.PIECES + 1)
    assert daemon.pauses == [residency_report.PIECES, 2 * residency_report.PIECES, 3 * residency_report.PIECES]


def test_an_engine_that_does_not_know_what_it_has_tells_nothing() -> None:
    daemon = Daemon(memory_backend.open_backend())
    daemon.teller.watch(1, SPACE)
    assert daemon.listen(1) == [(Residency.COMPLETE, b"")]


def test_a_change_wakes_the_thread() -> None:
    backend = ScriptedEngine()
    daemon = Daemon(backend, most=2)
    daemon.teller.watch(1, SPACE)
    thread = threading.Thread(target=daemon.teller.run)
    thread.start()
    assert backend.outlet is not None
    backend.outlet(Residency.STORED, 0, b"aa")
    thread.join(60)
    assert not thread.is_alive()
    assert len(daemon.heard) == 2
    assert set(daemon.heard) == {(1, Residency.STORED, b"aa"), (1, Residency.COMPLETE, b"")}
