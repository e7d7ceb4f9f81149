"""A child's own side of what `kvsidecar.support.supervised_child` starts: it dies with the daemon, and answers it.

Requests and answers are JSON, one in a line, over the socket that the child inherits. Each request has one answer, and
may carry file descriptors. The child ends when the daemon closes the socket, and at the latest when the daemon dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from kvsidecar.errors import KVSidecarError
from kvsidecar.support import failpoints, log
from kvsidecar.support.peer import close_all, recv_fds

MAX_MESSAGE_BYTES: Final = 32 << 20
"""More than the largest registration that the daemon takes, with its handles as text."""
READ_BYTES: Final = 1 << 18
EXIT_FAILED: Final = 1
MOST_DESCRIPTORS: Final = (1 << 31) - 1

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
prctl = ctypes.CDLL(None).prctl

Message = dict[str, Any]
Answers = Mapping[str, Callable[[Message, Sequence[int]], Message]]
"""Handlers by the operation that a request names. Each gets the request and its descriptors, which are closed after
it."""


def run(noun: str, serve: Callable[[Control], None]) -> NoReturn:
    """The whole of a child, which is started with the number of its socket: ``serve`` the daemon, and end.

    Args:
        noun: what its log calls it.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's, or the service manager's: the daemon decides
    failpoints.configure_from_environment()
    connection = int(sys.argv[1])
    for first, last in ((3, connection), (connection + 1, MOST_DESCRIPTORS)):
        os.closerange(first, last)  # what a library in C, or the daemon's parent, has left inheritable
    # If the daemon died before the first prctl, its end of the socket is closed, and `serve` returns.
    try:
        serve(Control(socket.socket(fileno=connection)))
    except ConnectionError:
        pass  # the daemon has gone
    except BaseException:  # noqa: BLE001 - no end unheard
        log.get(noun).exception(f"the {noun} ends")
    log.flush()
    os._exit(EXIT_FAILED)  # nothing is waited for


def pack(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def unpack(received: bytearray) -> Message | None:
    """The message that was received; None: there is more to come. Raises ValueError: it is too long."""
    if received.endswith(b"\n"):  # nobody says more before the answer
        message: Message = json.loads(received)
        return message
    if len(received) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of a child is longer than {MAX_MESSAGE_BYTES} bytes")
    return None


class Control:
    """The child's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._kept: Sequence[int] = ()
        self._answers: Answers = {"bound": lambda request, _: {}, "keep": self._keep, "log": _set_log}

    def receive(self) -> tuple[Message, list[int]] | None:
        """Wait for the next message. Its descriptors are the caller's. None: the daemon has gone."""
        received, fds = bytearray(), list[int]()
        while (message := unpack(received)) is None:
            data, more, _ = recv_fds(self.connection, READ_BYTES)
            fds += more
            if not data:
                return None
            received += data
        return message, fds

    def answer(self, answers: Answers) -> Message | None:
        """Wait for one request, and answer it. Returns the answer; None: the daemon has gone."""
        if (received := self.receive()) is None:
            return None
        request, fds = received
        try:
            reply = {**self._answers, **answers}[request["do"]](request, fds)
        except (KVSidecarError, OSError, failpoints.FailpointError) as error:
            reply = {"error": type(error).__name__, "text": str(error)}
        finally:
            close_all(fds)
        self.connection.sendall(pack(reply))
        return reply

    def _keep(self, _: Message, fds: Sequence[int]) -> Message:
        self._kept = [os.dup(fd) for fd in fds]  # until the end of this process
        return {}


def _set_log(request: Message, _: Sequence[int]) -> Message:
    log.configure(log_format=request["log_format"], level=request["log_level"])
    return {}
