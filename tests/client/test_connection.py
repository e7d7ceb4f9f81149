"""Connecting to a daemon that is slow to take connections."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvsidecar.client import BreakerState, Client, DaemonUnreachable
from kvsidecar.client.connection import connect
from kvsidecar.protocol.framing import frame
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import NAMESPACE, SECONDS, hashes


@pytest.fixture
def full(short_dir: Path) -> Iterator[SimpleNamespace]:
    """A daemon whose queue of connections is full."""
    path = str(short_dir / "full.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(0)
    waiting = []
    while True:
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        waiting.append(one)
        try:
            one.connect(path)
        except BlockingIOError:
            break
    yield SimpleNamespace(path=path, listener=listener)
    for each in (*waiting, listener):
        each.close()


def test_a_full_queue_of_connections_is_waited_for(full: SimpleNamespace) -> None:
    def serve() -> None:
        while True:
            connection, _ = full.listener.accept()
            if connection.recv(4096):
                payload = pb.Welcome(token=b"t", epoch=3).SerializeToString()
                connection.sendall(frame(payload))
                return

    def close_those_before() -> None:
        for connection in [full.listener.accept()[0]]:
            connection.close()
        serve()

    threading.Timer(0.05, close_those_before).start()
    connection = connect(full.path, fds=(), client="", timeout=SECONDS)
    assert connection.epoch == 3
    connection.close()


def test_a_queue_that_stays_full_is_an_unreachable_daemon(full: SimpleNamespace) -> None:
    with pytest.raises(DaemonUnreachable, match="queue"):
        connect(full.path, fds=(), client="", timeout=0.05)


def test_waiting_for_a_full_queue_can_be_given_up(full: SimpleNamespace) -> None:
    cancel = os.eventfd(1)
    with pytest.raises(DaemonUnreachable, match="being closed"):
        connect(full.path, fds=(), client="", timeout=SECONDS, cancel=cancel)
    os.close(cancel)


def test_a_scheduler_at_a_daemon_that_hangs_in_the_greeting_pays_three_budgets(full: SimpleNamespace) -> None:
    os.symlink(full.path, full.path + ".attach")
    client = Client(full.path, step_budget=0.02, timeout=SECONDS)
    for _ in range(3):
        assert client.lookup(NAMESPACE, {0: hashes("a")}).reason == "daemon_lost"
    assert client.breaker_state is not BreakerState.CLOSED
    assert client.lookup(NAMESPACE, {0: hashes("a")}, timeout=SECONDS).reason == "daemon_lost"
    client.close()
