"""Waits for proof that no copy of a lost session can still touch this rank's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvsidecar.client.messages import TransportError
from kvsidecar.client.session import AttachSession
from kvsidecar.client.transport import Transport
from kvsidecar.support.breaker import Backoff
from kvsidecar.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    from kvsidecar.client.supervisor import Supervisor

QUERY_SECONDS = 1.0
"""Time limit of one query to a daemon that may hang."""
LOOKS = 50
"""How often to look at the fence during a query: no event signals that it is quiet."""


def quiesce(transport: Transport, session: AttachSession, end: Supervisor, *, given_up: bool) -> bool:
    """Wait for proof that no copy of this session runs or will run. Returns whether its memory is unmapped, too.

    There are three kinds of proof:

    - The processes of the daemon and of its copiers have ended, so the driver has taken down their channels.
    - The daemon lives and answers that the session has ended: it does so after its copies have completed and its memory
      is unmapped.
    - The fence is shut, and no call is under way behind it. The memory stays mapped. It is shut at once for a daemon
      that was given up, and otherwise when a query is not answered.

    The end of the attach connection proves nothing: a daemon that shuts down closes it while its process lives, and a
    process that dies closes its descriptors one by one, the driver's perhaps last.

    Args:
        session: its stream has ended.
        end: waits, and reports the jobs.
        given_up: this client has given up a daemon that hangs.
    """
    process, fence = transport.connection.process, transport.connection.fence
    delays = Backoff(0.02, 1.0)
    is_fenced = False
    """Whether there is the third proof, which does not suffice for a client that is being closed."""

    def is_over() -> bool:
        nonlocal is_fenced
        if transport.going_down():
            end.going_down()
        if not is_fenced and fence is not None and fence.is_quiet():
            is_fenced = True
            end.fenced()
        return (is_fenced and not end.is_closing) or process.gone() or end.is_too_late()

    if given_up and fence is not None:
        fence.shut()
    while not is_over():
        if has_ended(transport, session, end, is_over):
            return True
        if fence is not None:
            fence.shut()
        _watch(transport, end, is_over, delays.next())
    return process.gone()


def has_ended(transport: Transport, session: AttachSession, end: Supervisor, is_over: Callable[[], bool]) -> bool:
    """Whether the daemon answers that this session has ended. Asked in the background: what makes the answer
    superfluous (``is_over``) is noticed while the daemon hangs."""
    answers: list[pb.StatusReply | TransportError] = []

    def on_answer(answer: pb.StatusReply | TransportError) -> None:
        answers.append(answer)
        end.wake()

    cancel = transport.query(pb.StatusRequest(session=session.id), QUERY_SECONDS, on_answer)
    _watch(transport, end, lambda: bool(answers) or is_over(), QUERY_SECONDS)
    cancel()
    if not answers or isinstance(answer := answers[0], TransportError):
        return False
    return answer.epoch == session.epoch and answer.session_ended


def _watch(transport: Transport, end: Supervisor, is_done: Callable[[], bool], seconds: float) -> None:
    """Wait, and look at a fence that is shut and not quiet yet."""
    fence = transport.connection.fence
    looks = LOOKS if fence is not None and fence.is_shut and not fence.is_quiet() else 1
    any(end.wait_until(is_done, seconds / looks) for _ in range(looks))
