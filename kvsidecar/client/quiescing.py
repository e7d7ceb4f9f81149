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

WaitUntil = Callable[[Callable[[], bool], float], bool]
"""``wait_until(is_done, seconds)``: wait until the function returns True, checking after every event."""


def quiesce(
    transport: Transport,
    session: Session,
    *,
    wait_until: WaitUntil,
    going_down: Callable[[], None],
    give_up: Callable[[], bool],
    wake: Callable[[], None],
) -> bool:
    """Wait for proof that no copy of this session runs or will run. Returns whether there is one.

    There are two kinds of proof:

    - The processes of the daemon and of its copiers have ended, so the driver has taken down their channels.
    - The daemon lives and answers that the session has ended: it does so after its copies have completed and its memory
      is unmapped.

    The end of the attach connection proves nothing: a daemon that goes down closes it while its process lives, and a
    process that dies closes its descriptors one by one, the driver's perhaps last.

    Args:
        session: its stream has ended.
        going_down: called once, if the daemon announces that it goes down with its pool, which is never served again.
        give_up: whether to stop waiting.
        wake: makes ``wait_until`` check again; called from other threads.
    """
    process = transport.connection.process
    delays = Backoff(0.02, 1.0)
    reported = False

    def is_over() -> bool:
        nonlocal reported
        if not reported and transport.going_down():
            reported = True
            going_down()
        return process.gone() or give_up()

    def session_has_ended() -> bool:
        """Query the daemon, in the background: the end of its process is noticed while it hangs."""
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

    while not is_over():
        if session_has_ended():
            return True
        wait_until(is_over, delays.next())
    return process.gone()
