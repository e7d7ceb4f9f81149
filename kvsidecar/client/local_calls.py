"""Calls of the local protocol: lookups, and releases and renewals of leases."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from kvsidecar.client.connection import Connection
from kvsidecar.client.local_stream import RECEIVE_BYTES, ReplyReader, connection_error, error_from
from kvsidecar.client.messages import TransportError, method_of
from kvsidecar.client.transport import OnAnswer
from kvsidecar.client.waiting import wait_for_answer
from kvsidecar.errors import ClientError
from kvsidecar.protocol.framing import frame
from kvsidecar.support.polling import wait_writable
from kvsidecar.v1 import sidecar_pb2 as pb

WHOLE_BYTES = 32 * 1024
"""A Unix socket takes a frame of this size whole or not at all (unix_stream_sendmsg() splits longer ones). A frame that
was sent in part would cost the connection."""
SEND_BUFFER_BYTES = 1 << 20
"""Asked of the kernel, which gives what net.core.wmem_max allows: room for several lookups of long prompts."""


class LocalCalls:
    """Makes one call at a time, on a connection that the first call opens. The caller reads its own answer, and the
    answers to posted calls that arrive before it.

    Args:
        connect: makes the connection; takes ``timeout`` in seconds.
    """

    def __init__(self, connect: Callable[..., Connection]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._replies = ReplyReader()
        self._number = 0
        self._posted: dict[int, tuple[str, OnAnswer]] = {}
        self._answers: deque[tuple[OnAnswer, Any]] = deque()
        """Answers to posted calls, not delivered yet. Delivered without the lock: the receiver may post again."""
        self._delivery = threading.RLock()
        """Held while answers are delivered: a thread that waits for one and gets the lock knows that it was."""
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a call waits for its answer."""
        return self._lock.locked()

    def call(self, request: pb.LocalRequest, seconds: float, on_late: OnAnswer | None = None) -> Any:
        """See `Transport.call`."""
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=max(0.0, seconds)):
            raise TransportError(grpc.StatusCode.DEADLINE_EXCEEDED, "another call waits for its answer")
        try:
            reply = self._exchange(request, deadline)
            if reply is None and on_late is not None:
                self._posted[self._number] = method_of(request), on_late
        except OSError as error:
            self._disconnect()  # what arrives on it next is unknown
            raise connection_error(error) from error
        except ClientError as error:  # of connect()
            raise connection_error(error.__cause__ or error) from error
        finally:
            self._lock.release()
            self._deliver_answers()
        if reply is None:
            late = on_late is not None
            raise TransportError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time", comes_late=late)
        if reply.HasField("error"):
            raise error_from(reply.error)
        return getattr(reply, method_of(request))

    def post(self, request: pb.LocalRequest, on_answer: OnAnswer | None) -> bool:
        """See `Transport.post`. A call is not sent if the socket has no room for all of it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._connection is None or self._closed:
                return False
            data = self._next_frame(request)
            if not _has_room(self._connection.sock, len(data)):
                return False
            if self._connection.sock.send(data, socket.MSG_DONTWAIT) < len(data):
                raise ConnectionError("the daemon does not read")
            if on_answer is not None:
                self._posted[self._number] = method_of(request), on_answer
            return True
        except BlockingIOError:
            return False
        except OSError:
            self._disconnect()
            return False
        finally:
            self._lock.release()
            # Not waiting for another thread that delivers: the receiver of an answer may post here, and two threads
            # would wait for each other.
            self._deliver_answers(wait=False)

    def collect(self, is_done: Callable[[], object] | None = None, seconds: float = 0.0) -> None:
        """See `Transport.collect`."""
        deadline = time.monotonic() + seconds
        while self._posted and self._lock.acquire(timeout=max(0.0, _remaining(deadline))):
            try:
                if self._connection is not None:
                    if is_done is not None:
                        wait_for_answer(self._connection.sock.fileno(), max(0.0, _remaining(deadline)))
                    self._receive(self._connection.sock)
                    while (reply := self._replies.next()) is not None:
                        self._accept_posted(reply)
            except BlockingIOError:
                pass
            except OSError:
                self._disconnect()
            finally:
                self._lock.release()
            self._deliver_answers()
            if is_done is None or is_done() or _remaining(deadline) <= 0:
                return
        self._deliver_answers()  # another thread has read them, and may not have delivered them yet

    def close(self) -> None:
        """Close the connection. A call that waits ends."""
        self._closed = True
        if (connection := self._connection) is not None:
            connection.shut_down()
        with self._lock:
            self._disconnect()
        self._deliver_answers()

    def _exchange(self, request: pb.LocalRequest, deadline: float) -> pb.LocalReply | None:
        """The reply; None if it does not arrive in time. Raises OSError, ClientError: the connection is unusable."""
        if self._closed:
            raise ConnectionError("the connection is closed")
        if self._connection is None:
            self._connection = self._connect(timeout=_remaining(deadline))
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._replies = ReplyReader()
        sock = self._connection.sock
        _send(sock, self._next_frame(request), deadline)
        fd = sock.fileno()
        while True:
            while (reply := self._replies.next()) is not None:
                if reply.call == self._number and reply.WhichOneof("message") is not None:
                    return reply
                self._accept_posted(reply)
            if not wait_for_answer(fd, _remaining(deadline)):
                return None
            self._receive(sock)

    def _next_frame(self, request: pb.LocalRequest) -> bytes:
        self._number += 1
        request.call = self._number
        return frame(request.SerializeToString())

    def _receive(self, sock: socket.socket) -> None:
        data = sock.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionError("the daemon closed it")
        self._replies.feed(data)

    def _accept_posted(self, reply: pb.LocalReply) -> None:
        """Accept a reply to a posted call, or to one that timed out. Ignore others, and kinds that only a newer daemon
        sends."""
        kind = reply.WhichOneof("message")
        if kind is None:
            return
        if not reply.call:
            raise ConnectionError(reply.error.text)
        if (posted := self._posted.get(reply.call)) is not None:
            method, on_answer = posted
            if kind not in (method, "error"):
                raise ConnectionError(f"the daemon answered a {method} with {kind}")
            # Before it is not waited for any more: `collect` looks at both without the lock.
            self._answers.append((on_answer, error_from(reply.error) if kind == "error" else getattr(reply, method)))
            del self._posted[reply.call]

    def _deliver_answers(self, *, wait: bool = True) -> None:
        if not self._delivery.acquire(blocking=wait):
            return
        try:
            while self._answers:
                on_answer, answer = self._answers.popleft()
                on_answer(answer)
        finally:
            self._delivery.release()

    def _disconnect(self) -> None:
        """Close the connection. The caller delivers the answers afterwards, without the lock."""
        lost = TransportError(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
        self._answers += ((on_answer, lost) for _, on_answer in self._posted.values())
        self._posted.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _has_room(sock: socket.socket, nbytes: int) -> bool:
    """Whether the socket takes a frame of this size whole, or not at all. Nobody else sends meanwhile."""
    if nbytes <= WHOLE_BYTES:
        return True
    try:
        (unread,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    except OSError:  # the kernel of a sandbox need not know it
        return False
    # Both count the kernel's own memory, which is up to a fifth more than the frame of 32 KiB or longer.
    return int(unread) + nbytes * 3 // 2 <= sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    """Raises TimeoutError: a part may have been sent."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            if not wait_writable(sock.fileno(), _remaining(deadline)):
                raise TimeoutError("the daemon does not read") from None


def _remaining(deadline: float) -> float:
    return deadline - time.monotonic()
