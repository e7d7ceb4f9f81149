"""When a lost session's copies can no longer touch the memory: every answer a daemon may give, and none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import grpc

from kvsidecar.client.connection import LostDaemon
from kvsidecar.client.messages import TransportError
from kvsidecar.client.quiescing import LOOKS, quiesce
from kvsidecar.support import fence as fences
from kvsidecar.support.fence import Fence
from kvsidecar.types import Direction
from kvsidecar.v1 import sidecar_pb2 as pb

EPOCH, SESSION = 7, 11


def status(epoch: int, *sessions: int) -> pb.StatusReply:
    ranks = [pb.RankStatus(session=session) for session in sessions]
    return pb.StatusReply(epoch=epoch, ranks=ranks, session_ended=SESSION not in sessions)


def asked(
    *answers: pb.StatusReply | None,
    dies_after: int | None = None,
    link_ended: bool = False,
    given_up: bool = False,
    fence: Fence | None = None,
    fenced: Callable[[], object] = lambda: None,
    when_waiting: Callable[[], object] = lambda: None,
    closing_from: int | None = None,
) -> tuple[bool, int]:
    """Whether there was a proof of unmapped memory, and how many questions it took; gives up when there is no answer
    left.

    Args:
        when_waiting: called at each wait.
        closing_from: how often to ask whether the client is being closed until it is.
    """
    looks = count()

    class End:
        """What `quiesce` needs of a supervisor."""

        wake = going_down = staticmethod(lambda: None)
        is_too_late = staticmethod(lambda: not left)

        def wait_until(self, is_done: Callable[[], bool], _: float) -> bool:
            when_waiting()
            return is_done()

        def fenced(self) -> None:
            fenced()

        @property
        def is_closing(self) -> bool:
            return closing_from is not None and next(looks) >= closing_from

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
        connection=SimpleNamespace(process=process, fence=fence), going_down=lambda: link_ended, query=query
    )  # fmt: skip
    session: Any = SimpleNamespace(id=SESSION, epoch=EPOCH)
    end: Any = End()
    return quiesce(transport, session, end, given_up=given_up), questions


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
    process.gone = lambda _seconds: process.ended
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


def test_a_daemon_that_was_given_up_is_fenced_off_without_a_question() -> None:
    fd = fences.create()
    lanes, said = fences.lanes(fd), list[str]()
    assert asked(given_up=True, fence=Fence(fd), fenced=lambda: said.append("quiet")) == (False, 0)
    assert said == ["quiet"]
    assert not lanes[Direction.STORE].enter(), "it is shut for the copier, too"


def test_a_fence_is_shut_when_a_question_is_not_answered_and_not_before() -> None:
    fence = Fence(fences.create())
    hidden = status(EPOCH, SESSION)
    seen: list[int] = []
    assert asked(hidden, None, fence=fence, fenced=lambda: seen.append(1)) == (False, 1)
    assert seen == [1], "after an answer that is none"
    fence = Fence(fences.create())
    assert asked(status(EPOCH), fence=fence) == (True, 1)
    assert not fence.is_shut


def test_a_call_under_way_behind_the_fence_is_waited_for() -> None:
    fd = fences.create()
    lane, fence, said = fences.lanes(fd)[Direction.LOAD], Fence(fd), list[int]()
    assert lane.enter()
    assert asked(None, None, given_up=True, fence=fence, fenced=lambda: said.append(1)) == (False, 2)
    assert not said
    lane.leave()
    assert asked(None, given_up=True, fence=fence, fenced=lambda: said.append(1)) == (False, 0)
    assert said == [1]


def test_who_needs_the_memory_unmapped_waits_on_behind_the_fence() -> None:
    said: list[str] = []
    answers = (None, status(EPOCH, SESSION), status(EPOCH), None)
    fence = Fence(fences.create())
    found = asked(*answers, given_up=True, fence=fence, fenced=lambda: said.append("quiet"), closing_from=0)
    assert found == (True, 3)
    assert said == ["quiet"]


def test_who_is_closed_when_the_fence_has_just_become_quiet_waits_on_as_well() -> None:
    fd = fences.create()
    lane = fences.lanes(fd)[Direction.LOAD]
    assert lane.enter()
    ends = [lane.leave]

    def end_the_call() -> None:
        while ends:
            ends.pop()()

    answers = (None, status(EPOCH), None)
    found = asked(*answers, given_up=True, fence=Fence(fd), when_waiting=end_the_call, closing_from=1)
    assert found == (True, 2)


def test_a_fence_is_looked_at_again_and_again_during_a_question() -> None:
    fd = fences.create()
    lane, fence, looks = fences.lanes(fd)[Direction.STORE], Fence(fd), 0
    assert lane.enter()

    def wait_until(is_done: Callable[[], bool], _: float) -> bool:
        nonlocal looks
        looks += 1
        if looks == LOOKS - 1:
            lane.leave()
        return is_done()

    connection = SimpleNamespace(process=SimpleNamespace(gone=lambda: False), fence=fence)
    silent: Any = SimpleNamespace(connection=connection, going_down=lambda: False, query=lambda *_: lambda: None)
    session: Any = SimpleNamespace(id=SESSION, epoch=EPOCH)
    end: Any = SimpleNamespace(
        wait_until=wait_until, wake=lambda: None, is_too_late=lambda: looks > 2 * LOOKS, going_down=lambda: None,
        fenced=lambda: None, is_closing=False,
    )  # fmt: skip
    quiesce(silent, session, end, given_up=True)
    assert looks <= LOOKS
