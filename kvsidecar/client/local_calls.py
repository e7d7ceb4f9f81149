"""Calls of the local protocol: lookups, leases and their ends."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from kvsidecar.client.link import Link
from kvsidecar.client.local_stream import RECEIVE_BYTES, Replies, error_of, no_answer
from kvsidecar.client.messages import CarrierError, kind_of
from kvsidecar.client.transport import Then
from kvsidecar.client.waiting import wait_for_answer, wait_writable
from kvsidecar.errors import ClientError
from kvsidecar.protocol.framing import frame
from kvsidecar.v1 import sidecar_pb2 as pb

MAX_POST_BYTES = 32 * 1024
"""A Unix socket takes a frame of this size whole or not at all (unix_stream_sendmsg() splits longer ones), and to
leave a part of one behind is to lose the connection."""


class LocalCalls:
    """Calls on a connection of their own, which is made by the first. One at a time; the caller reads its own answer,
    and with it those to what was posted before.

    Args:
        connect: makes a link; takes ``timeout`` in seconds.
    """

    def __init__(self, connect: Callable[..., Link]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._arrived = Replies()
        self._number = 0
        self._posted: dict[int, tuple[str, Then]] = {}
        self._answers: deque[tuple[Then, Any]] = deque()
        """To what was posted, that have arrived. Handed on without the lock: who gets one may post again."""
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a call waits for its answer."""
        return self._lock.locked()

    def call(self, request: pb.LocalRequest, seconds: float) -> Any:
        """As `Transport.call`."""
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=max(0.0, seconds)):
            raise CarrierError(grpc.StatusCode.DEADLINE_EXCEEDED, "another call waits for its answer")
        try:
            reply = self._exchange(request, deadline)
        except OSError as error:
            self._drop()  # nobody knows what comes next on it
            raise no_answer(error) from error
        except ClientError as error:  # of connect()
            raise no_answer(error.__cause__ or error) from error
        finally:
            self._lock.release()
            self._hand_on()
        if reply is None:
            raise CarrierError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")
        if reply.HasField("error"):
            raise error_of(reply.error)
        return getattr(reply, kind_of(request))

    def post(self, request: pb.LocalRequest, then: Then | None) -> bool:
        """As `Transport.post`. What is longer than `MAX_POST_BYTES` is not sent."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._link is None or self._closed:
                return False
            data = self._next_frame(request)
            if len(data) > MAX_POST_BYTES:
                return False
            if self._link.connection.send(data, socket.MSG_DONTWAIT) < len(data):
                raise ConnectionError("the daemon does not read")
            if then is not None:
                self._posted[self._number] = kind_of(request), then
            return True
        except BlockingIOError:
            return False
        except OSError:
            self._drop()
            return False
        finally:
            self._lock.release()
            self._hand_on()

    def collect(self, is_done: Callable[[], object] | None = None, seconds: float = 0.0) -> None:
        """As `Transport.collect`."""
        deadline = time.monotonic() + seconds
        while self._posted and self._lock.acquire(timeout=max(0.0, _left(deadline))):
            try:
                if self._link is not None:
                    if is_done is not None:
                        wait_for_answer(self._link.connection.fileno(), max(0.0, _left(deadline)))
                    self._receive(self._link.connection)
                    while (reply := self._arrived.next()) is not None:
                        self._take_posted(reply)
            except BlockingIOError:
                pass
            except OSError:
                self._drop()
            finally:
                self._lock.release()
            self._hand_on()
            if is_done is None or is_done() or _left(deadline) <= 0:
                return

    def close(self) -> None:
        """A call that waits ends."""
        self._closed = True
        if (link := self._link) is not None:
            link.shut_down()
        with self._lock:
            self._drop()
        self._hand_on()

    def _exchange(self, request: pb.LocalRequest, deadline: float) -> pb.LocalReply | None:
        """The answer; None if it does not come in time. Raises OSError, ClientError: the connection is of no use."""
        if self._closed:
            raise ConnectionError("the connection is closed")
        if self._link is None:
            self._link = self._connect(timeout=_left(deadline))
            self._arrived = Replies()
        connection = self._link.connection
        _send(connection, self._next_frame(request), deadline)
        fd = connection.fileno()
        while True:
            while (reply := self._arrived.next()) is not None:
                if reply.call == self._number and reply.WhichOneof("message") is not None:
                    return reply
                self._take_posted(reply)
            if not wait_for_answer(fd, _left(deadline)):
                return None
            self._receive(connection)

    def _next_frame(self, request: pb.LocalRequest) -> bytes:
        self._number += 1
        request.call = self._number
        return frame(request.SerializeToString())

    def _receive(self, connection: socket.socket) -> None:
        data = connection.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionError("the daemon closed it")
        self._arrived.feed(data)

    def _take_posted(self, reply: pb.LocalReply) -> None:
        """Or the late answer to a call that was given up, which nobody wants any more, or what is of a kind that only a
        newer daemon's client knows."""
        kind = reply.WhichOneof("message")
        if kind is None:
            return
        if not reply.call:
            raise ConnectionError(reply.error.text)
        if (posted := self._posted.pop(reply.call, None)) is not None:
            method, then = posted
            if kind not in (method, "error"):
                raise ConnectionError(f"the daemon answered a {method} with {kind}")
            self._answers.append((then, error_of(reply.error) if kind == "error" else getattr(reply, method)))

    def _hand_on(self) -> None:
        while self._answers:
            try:
                then, answer = self._answers.popleft()
            except IndexError:  # another thread has taken the last one in between
                return
            then(answer)

    def _drop(self) -> None:
        """Give the connection up. Whoever calls hands on the answers afterwards, without the lock."""
        lost = CarrierError(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
        self._answers += ((then, lost) for _, then in self._posted.values())
        self._posted.clear()
        if self._link is not None:
            self._link.close()
            self._link = None


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    """Raises TimeoutError: a part of it may have gone."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[connection.send(rest, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            if not wait_writable(connection.fileno(), _left(deadline)):
                raise TimeoutError("the daemon does not read") from None


def _left(deadline: float) -> float:
    return deadline - time.monotonic()
