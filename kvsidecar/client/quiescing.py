"""Waits for proof that no copy of a lost session can still touch this rank's memory."""

from __future__ import annotations

from collections.abc import Callable

from kvsidecar.client.messages import TransportError
from kvsidecar.client.session import Session
from kvsidecar.client.transport import Transport
from kvsidecar.support.breaker import Backoff
from kvsidecar.v1 import sidecar_pb2 as pb

QUERY_SECONDS = 1.0
"""Time limit of one query to a daemon that may hang."""
LOOKS = 50
"""How often to look at the fence during a query: no event tells that it is quiet."""

WaitUntil = Callable[[Callable[[], bool], float], bool]
"""``wait_until(is_done, seconds)``: wait until the function returns True, checking after every event."""


def quiesce(
    transport: Transport,
    session: Session,
    *,
    given_up: bool,
    wait_until: WaitUntil,
    going_down: Callable[[], None],
    fenced: Callable[[], bool],
    give_up: Callable[[], bool],
    wake: Callable[[], None],
) -> bool:
    """Wait for proof that no copy of this session runs or will run. Returns whether its memory is unmapped, too.

    There are three kinds of proof:

    - The processes of the daemon and of its copiers have ended, so the driver has taken down their channels.
    - The daemon lives and answers that the session has ended: it does so after its copies have completed and its memory
      is unmapped.
    - The fence is shut, and no call is under way behind it. The memory stays mapped. It is shut at once for a daemon
      that was given up, and otherwise when a query is not answered.

    The end of the attach connection proves nothing: a daemon that goes down closes it while its process lives, and a
    process that dies closes its descriptors one by one, the driver's perhaps last.

    Args:
        session: its stream has ended.
        given_up: this client has given up a daemon that hangs.
        going_down: called once, if the daemon announces that it goes down with its pool, which is never served again.
        fenced: called once, with the third proof. Returns whether to go on and wait until the memory is unmapped.
        give_up: whether to stop waiting.
        wake: makes ``wait_until`` check again; called from other threads.
    """
    process, fence = transport.connection.process, transport.connection.fence
    delays = Backoff(0.02, 1.0)
    reported = quiet = enough = False

    def is_over() -> bool:
        nonlocal reported, quiet, enough
        if not reported and transport.going_down():
            reported = True
            going_down()
        if not quiet and fence is not None and fence.is_quiet():
            quiet = True
            enough = not fenced()
        return enough or process.gone() or give_up()

    def watch(is_done: Callable[[], bool], seconds: float) -> bool:
        if quiet or fence is None or not fence.is_shut:
            return wait_until(is_done, seconds)
        return any(wait_until(is_done, seconds / LOOKS) for _ in range(LOOKS))

    if given_up and fence is not None:
        fence.shut()
    while not is_over():
        if has_ended(transport, session, wait_until=watch, is_over=is_over, wake=wake):
            return True
        if fence is not None:
            fence.shut()
        watch(is_over, delays.next())
    return process.gone()


def has_ended(
    transport: Transport,
    session: Session,
    *,
    wait_until: WaitUntil,
    is_over: Callable[[], bool],
    wake: Callable[[], None],
) -> bool:
    """Whether the daemon answers that this session has ended. Asked in the background: what makes the answer
    superfluous (``is_over``) is noticed while the daemon hangs."""
    answers: list[pb.StatusReply | TransportError] = []

    def on_answer(answer: pb.StatusReply | TransportError) -> None:
        answers.append(answer)
        wake()

    cancel = transport.query(pb.StatusRequest(session=session.id), QUERY_SECONDS, on_answer)
    wait_until(lambda: bool(answers) or is_over(), QUERY_SECONDS)
    cancel()
    if not answers or isinstance(answer := answers[0], TransportError):
        return False
    return answer.epoch == session.epoch and answer.session_ended
