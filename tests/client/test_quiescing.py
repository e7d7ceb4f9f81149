"""When a lost session's copies can no longer touch the memory: every answer a daemon may give, and none."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvsidecar.client.connection import LostDaemon
from kvsidecar.client.messages import TransportError
from kvsidecar.client.quiescing import quiesce
from kvsidecar.v1 import sidecar_pb2 as pb

EPOCH, SESSION = 7, 11


def status(epoch: int, *sessions: int) -> pb.StatusReply:
    ranks = [pb.RankStatus(session=session) for session in sessions]
    return pb.StatusReply(epoch=epoch, ranks=ranks, session_ended=SESSION not in sessions)


def asked(
    *answers: pb.StatusReply | None,
    dies_after: int | None = None,
    watched: bool = True,
    link_ended: bool = False,
    unsettled: bool = False,
) -> tuple[bool, int]:
    """Whether there was a proof, and how many questions it took; gives up when there is no answer left."""
    left = list(answers)
    questions = 0

    def query(_request: Any, _seconds: float, then: Callable[[Any], None]) -> Callable[[], None]:
        nonlocal questions
        questions += 1
        answer = left.pop(0)
        then(TransportError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer") if answer is None else answer)
        return lambda: None

    process = SimpleNamespace(fd=3 if watched else None, gone=lambda: dies_after == questions)
    transport: Any = SimpleNamespace(
        connection=SimpleNamespace(process=process), going_down=lambda: link_ended, query=query
    )  # fmt: skip
    session: Any = SimpleNamespace(id=SESSION, epoch=EPOCH, copy_may_run=unsettled)
    proven = quiesce(
        transport, session, wait_until=lambda is_done, _: is_done(), going_down=lambda: None,
        give_up=lambda: not left, wake=lambda: None,
    )  # fmt: skip
    return proven, questions


def test_the_end_of_the_process_is_a_proof() -> None:
    assert asked(None, dies_after=0) == (True, 0)
    assert asked(None, None, None, dies_after=2) == (True, 2)


def test_a_daemon_that_does_not_show_the_session_has_not_said_that_it_ended() -> None:
    hidden = pb.StatusReply(epoch=EPOCH, partial=True)
    assert asked(hidden, hidden) == (False, 2)


def test_a_session_that_the_daemon_no_longer_lists_has_ended() -> None:
    assert asked(status(EPOCH, SESSION, 12), status(EPOCH, SESSION), status(EPOCH, 12), None) == (True, 3)


def test_a_daemon_that_did_not_know_what_its_copies_do_proves_nothing_by_saying_that_the_session_has_ended() -> None:
    ended = status(EPOCH)
    assert asked(ended, ended, unsettled=True) == (False, 2)
    assert asked(ended, ended, unsettled=True, dies_after=1) == (True, 1)
    assert asked(ended, status(EPOCH + 1), None, unsettled=True, watched=False) == (True, 2)


@pytest.mark.parametrize("watched", [True, False])
def test_a_daemon_that_was_given_up_is_gone_when_its_process_is_or_else_when_there_is_another(watched: bool) -> None:
    process = SimpleNamespace(fd=3 if watched else None, ended=False, closed=0)
    process.gone = lambda: process.ended
    process.close = lambda: setattr(process, "closed", process.closed + 1)
    lost = LostDaemon(process, EPOCH)  # type: ignore[arg-type]
    assert not lost.gone(0)
    assert not lost.gone(EPOCH)
    assert lost.gone(EPOCH + 1) is not watched
    process.ended = True
    assert lost.gone(0)
    assert lost.gone(0)
    assert process.closed == 1


def test_no_answer_proves_nothing() -> None:
    assert asked(None, None, None) == (False, 3)


def test_a_closed_attach_socket_proves_nothing() -> None:
    assert asked(None, None, link_ended=True) == (False, 2)


@pytest.mark.parametrize("watched", [True, False])
def test_another_epoch_is_a_proof_only_where_the_process_cannot_be_watched(watched: bool) -> None:
    proven, _ = asked(status(EPOCH + 1), None, watched=watched)
    assert proven is not watched


def test_the_end_of_a_process_is_seen_and_not_before() -> None:
    import socket
    import subprocess
    import sys

    from kvsidecar.client.connection import DaemonProcess

    script = (
        "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.listen(); c, _ = s.accept(); "
        "c.send(b'x'); c.close(); s.close(); print('closed', flush=True); sys.stdin.read()"
    )
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as connection:
        listener.bind("")
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(listener.fileno())], pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        while True:
            try:
                connection.connect(listener.getsockname())
                break
            except ConnectionRefusedError:
                pass  # it does not listen yet
        process = DaemonProcess(connection)
        assert connection.recv(1) == b"x"
        assert (process.pid, process.fd is not None) == (child.pid, True)
        assert child.stdout.readline() == b"closed\n"
        assert connection.recv(1) == b""
        assert not process.gone(), "its sockets are closed, and it lives"
        child.communicate()
        assert process.gone()
        fd = process.fd
        process.close()
        assert fd is not None
        with pytest.raises(OSError):
            os.fstat(fd)
