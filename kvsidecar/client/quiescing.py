"""When none of a lost session's copies can touch this rank's memory any more. Never sooner, whatever it costs."""

from __future__ import annotations

from collections.abc import Callable

from kvsidecar.client.breaker import Backoff
from kvsidecar.client.messages import CarrierError
from kvsidecar.client.session import Session
from kvsidecar.client.transport import Transport
from kvsidecar.v1 import sidecar_pb2 as pb

ASK_SECONDS = 1.0
"""Deadline of one question to a daemon that may be hanging."""

WaitUntil = Callable[[Callable[[], bool], float], bool]
"""``wait_until(is_done, seconds)``: wait for news of the daemon at most that long, until the function says so."""


def quiesce(
    transport: Transport,
    session: Session,
    *,
    wait_until: WaitUntil,
    going_down: Callable[[], None],
    give_up: Callable[[], bool],
    wake: Callable[[], None],
) -> bool:
    """Wait for a proof that no copy of this session runs or will run. True: there is one.

    There are two. The daemon's process has ended, so the driver has taken down its channels. Or the daemon lives on and
    says that the session has ended, which it does after its copies are over and its memory is unmapped; not if it has
    said before that it does not know whether they are.
    Where the process cannot be watched (`DaemonProcess.fd` is None) another epoch counts as the first: a daemon starts
    only with the lock of the one before it, which the kernel releases when that process ends.
    The end of the attach connection is no proof: a daemon that goes down closes it while its process lives, and a
    process that dies closes its descriptors one after the other, the driver's perhaps last.

    Args:
        session: its stream has ended.
        going_down: called when the daemon has told that it goes down with its pool: nothing will be served from there
            any more.
        give_up: says that nobody wants to know any more.
        wake: makes ``wait_until`` look again; called from other threads.
    """
    process = transport.link.process
    delays = Backoff(0.02, 1.0)
    told = False

    def is_over() -> bool:
        nonlocal told
        if not told and transport.going_down():
            told = True
            going_down()
        return process.gone() or give_up()

    def wait_for(answered: Callable[[], bool]) -> None:
        wait_until(lambda: answered() or is_over(), ASK_SECONDS)

    while not is_over():
        if _says_ended(transport, session, wait_for, wake):
            return True
        wait_until(is_over, delays.next())
    return process.gone()


def _says_ended(
    transport: Transport, session: Session, wait_for: Callable[[Callable[[], bool]], None], wake: Callable[[], None]
) -> bool:
    """Ask the daemon. In the background, so that the end of its process is seen while it hangs."""
    answers: list[pb.StatusReply | CarrierError] = []

    def answered(answer: pb.StatusReply | CarrierError) -> None:
        answers.append(answer)
        wake()

    give_up = transport.ask(pb.StatusRequest(session=session.id), ASK_SECONDS, answered)
    wait_for(lambda: bool(answers))
    give_up()
    if not answers or isinstance(answer := answers[0], CarrierError):
        return False
    if answer.epoch != session.epoch:
        return transport.link.process.fd is None
    return answer.session_ended and not session.copy_may_run
