"""When a lost session's copies can no longer touch the memory: every answer a daemon may give, and none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc

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
    link_ended: bool = False,
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

    process = SimpleNamespace(gone=lambda: dies_after == questions)
    transport: Any = SimpleNamespace(
        connection=SimpleNamespace(process=process), going_down=lambda: link_ended, query=query
    )  # fmt: skip
    session: Any = SimpleNamespace(id=SESSION, epoch=EPOCH)
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


def test_a_daemon_that_was_given_up_is_gone_when_its_processes_are() -> None:
    process = SimpleNamespace(ended=False, closed=0)
    process.gone = lambda: process.ended
    process.close = lambda: setattr(process, "closed", process.closed + 1)
    lost = LostDaemon(process)  # type: ignore[arg-type]
    assert not lost.gone()
    process.ended = True
    assert lost.gone()
    assert lost.gone()
    assert process.closed == 1


def test_no_answer_proves_nothing() -> None:
    assert asked(None, None, None) == (False, 3)


def test_a_closed_attach_socket_proves_nothing() -> None:
    assert asked(None, None, link_ended=True) == (False, 2)


def test_another_epoch_proves_nothing() -> None:
    assert asked(status(EPOCH + 1), None) == (False, 2)
