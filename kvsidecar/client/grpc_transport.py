"""The gRPC transport: carries all messages, and those that the local protocol lacks."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kvsidecar.client.channel_options import CHANNEL_OPTIONS
from kvsidecar.client.connection import Connection
from kvsidecar.client.messages import TransportError, method_of
from kvsidecar.client.send_queue import SendQueue
from kvsidecar.client.transport import DaemonStream, OnAnswer, Query, Transport
from kvsidecar.client.waiting import Monitor
from kvsidecar.protocol.paths import grpc_address
from kvsidecar.types import TOKEN_METADATA
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc

POST_SECONDS = 1.0
"""Time limit of a call whose answer nobody needs. A lookup has none: it may bring a lease, which would be lost with the
answer."""


def open_channel(socket: str) -> grpc.Channel:
    """A channel to the daemon's gRPC socket. It connects with the first call."""
    return grpc.insecure_channel(grpc_address(socket), options=CHANNEL_OPTIONS)


class GrpcTransport(Transport):
    """Sends everything over gRPC, on a channel that the first call opens. The attach connection provides the token, and
    shows whether the daemon is alive.

    Args:
        socket: path of the daemon's gRPC socket.
    """

    is_local = False

    def __init__(self, connection: Connection, socket: str) -> None:
        self.connection = connection
        self._socket = socket
        self._metadata = ((TOKEN_METADATA, connection.token),)
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._made: pb_grpc.SidecarStub | None = None
        self._answered = threading.Condition()

    @property
    def _stub(self) -> pb_grpc.SidecarStub:
        """The stub of the channel. Its calls raise ValueError once the channel is closed."""
        with self._lock:
            if self._made is None:  # made once: it takes longer than to send a lookup
                self._channel = open_channel(self._socket)
                self._made = pb_grpc.SidecarStub(self._channel)
            return self._made

    def open_stream(self, send_queue: SendQueue, monitor: Monitor) -> DaemonStream:
        return GrpcStream(self._stub, send_queue, monitor)

    def call(self, request: pb.LocalRequest, seconds: float, on_late: OnAnswer | None = None) -> Any:
        call = self._begin(request)
        try:
            call.exception(seconds)
        except grpc.FutureTimeoutError:
            if on_late is None:
                call.cancel()
            else:
                call.add_done_callback(lambda call: on_late(_answer_of(call)))
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise TransportError(code, "no answer in time", comes_late=on_late is not None) from None
        except grpc.FutureCancelledError:
            pass
        answer = _answer_of(call)
        if isinstance(answer, TransportError):
            raise answer
        return answer

    def post(self, request: pb.LocalRequest, on_answer: OnAnswer | None) -> bool:
        def answered(answer: Any) -> None:
            if on_answer is not None:
                on_answer(answer)
            with self._answered:
                self._answered.notify_all()

        return self.post_in_background(request, answered)

    def post_in_background(self, request: pb.LocalRequest, on_answer: OnAnswer | None) -> bool:
        try:
            call = self._begin(request)
        except TransportError:
            return False
        # gRPC cancels a call that nobody references any more: the callback keeps this one until it is answered.
        call.add_done_callback(lambda call: None if on_answer is None else on_answer(_answer_of(call)))
        return True

    def _begin(self, request: pb.LocalRequest) -> Any:
        name = method_of(request)
        seconds = None if name == "lookup" else POST_SECONDS
        try:
            method = getattr(self._stub, name.capitalize())
            return method.future(getattr(request, name), timeout=seconds, metadata=self._metadata)
        except ValueError as error:  # "Cannot invoke RPC on closed channel!"
            raise TransportError(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    def collect(self, is_done: Callable[[], object] | None = None, seconds: float = 0.0) -> None:
        if is_done is not None:
            with self._answered:
                self._answered.wait_for(is_done, max(0.0, seconds))

    def query(self, request: Query, seconds: float, on_answer: OnAnswer) -> Callable[[], object]:
        # Without the token: the daemon may have forgotten it, and anyone may make these two calls.
        method = self._stub.Status if isinstance(request, pb.StatusRequest) else self._stub.Release
        future = method.future(request, timeout=seconds)
        future.add_done_callback(lambda call: on_answer(_answer_of(call)))
        return lambda: future.cancel()

    def going_down(self) -> bool:
        return self.connection.ended()

    def close(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
        self.connection.close()


class GrpcStream(DaemonStream):
    """The Attach stream over gRPC, which sends in a thread of its own."""

    def __init__(self, stub: pb_grpc.SidecarStub, send_queue: SendQueue, monitor: Monitor) -> None:
        self.ended = False
        self.error: TransportError | None = None
        self.quiesced = False
        self._send_queue = send_queue
        self._monitor = monitor
        self._received: deque[pb.AttachReply] = deque()
        self._pumped: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True: look at the send queue. False: end."""
        self._replies = stub.Attach(self._requests())

    def pump(self) -> None:
        self._pumped.put(True)

    def wait(self) -> None:
        try:
            self._received.append(next(self._replies))
        except StopIteration:
            self.ended = self.quiesced = True
        except grpc.RpcError as error:
            self.error = _transport_error(error)
            self.ended = True

    def receive(self, *, helping: bool = False) -> list[pb.AttachReply]:
        return [self._received.popleft() for _ in range(len(self._received))]

    def wait_readable(self, seconds: float) -> bool:
        return False

    def wake_reader(self) -> None:
        pass  # only the owner's thread receives the end

    def cancel(self) -> None:
        self._replies.cancel()

    def close(self) -> None:
        self._pumped.put(False)

    def _requests(self) -> Iterator[pb.AttachRequest]:
        """Iterated in a thread of gRPC, at the rate at which the daemon takes messages. Its end half-closes the
        stream."""
        while self._pumped.get():
            while True:
                message = pb.AttachRequest()
                with self._monitor.changed:
                    if not self._send_queue.waiting:
                        break
                    taken = self._send_queue.take(message)
                    self._monitor.changed.notify_all()
                if taken:
                    yield message
                elif self._send_queue.is_finished:
                    return


def _transport_error(error: grpc.RpcError) -> TransportError:
    return TransportError(error.code(), error.details() or error.code().name)


def _answer_of(call: Any) -> Any:
    """The reply of a finished call, or a TransportError."""
    if call.cancelled():
        return TransportError(grpc.StatusCode.UNAVAILABLE, "the call was cancelled")
    if (error := call.exception()) is None:
        return call.result()
    found = _transport_error(error)
    if found.code is grpc.StatusCode.CANCELLED:  # by a daemon that goes down
        found.code = grpc.StatusCode.UNAVAILABLE
    return found
