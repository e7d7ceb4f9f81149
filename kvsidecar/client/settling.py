"""When none of a lost session's copies can touch this rank's memory any more. Never sooner, whatever it costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import grpc

from kvsidecar.client.breaker import Backoff
from kvsidecar.client.connection import Connection
from kvsidecar.client.session import Session
from kvsidecar.v1 import sidecar_pb2 as pb

ASK_SECONDS = 1.0
"""Deadline of one question to a daemon that may be hanging."""

Poll = Callable[[float, Callable[[], bool]], bool]
"""``poll(seconds, until)``: wait for news of the daemon at most that long, until the function says so."""


def settle(
    connection: Connection,
    session: Session,
    *,
    poll: Poll,
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
        going_down: called when the daemon has closed its attach socket, as it does only when it goes down with its
            pool: nothing will be served from there any more. (On the fast lane it is where the stream was.)
        give_up: says that nobody wants to know any more.
        wake: makes `poll` look again; called from other threads.
    """
    process = connection.link.process
    delays = Backoff(0.02, 1.0)
    told = False

    def over() -> bool:
        nonlocal told
        if not told and not connection.fast_lane and connection.link.ended():
            told = True
            going_down()
        return process.gone() or give_up()

    while not over():
        # In the background, so that the end of the process is seen while a daemon that hangs is being asked.
        asking = connection.stub.Status.future(pb.StatusRequest(session=session.id), timeout=ASK_SECONDS)
        asking.add_done_callback(lambda _: wake())
        poll(ASK_SECONDS, partial(_either, over, asking.done))
        if asking.done() and _says_ended(asking, session, process_is_watched=process.fd is not None):
            return True
        asking.cancel()
        poll(delays.next(), over)
    return process.gone()


def _either(one: Callable[[], bool], other: Callable[[], bool]) -> bool:
    return one() or other()


def _says_ended(asking: grpc.Future[pb.StatusReply], session: Session, *, process_is_watched: bool) -> bool:
    try:
        status: pb.StatusReply = asking.result()
    except (grpc.RpcError, grpc.FutureCancelledError):
        return False
    if status.epoch != session.epoch:
        return not process_is_watched
    return status.session_ended and not session.unsettled
