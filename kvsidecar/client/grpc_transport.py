"""gRPC: carries everything, and what the local protocol does not."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

from kvsidecar.client.link import Link
from kvsidecar.client.messages import CarrierError, kind_of
from kvsidecar.client.outbox import Outbox
from kvsidecar.client.transport import AttachStream, Then, Transport
from kvsidecar.client.waiting import Monitor
from kvsidecar.types import TOKEN_METADATA
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc

CHANNEL_OPTIONS = [
    # gRPC shares connections, and how long it waits before it tries a broken one again, between the channels of a
    # process: with the defaults a channel to the new daemon would wait up to two minutes because of the old one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

POST_SECONDS = 1.0
"""After this long gRPC gives a call up that nobody waits for."""


def open_channel(socket: str) -> grpc.Channel:
    """A channel to the daemon's gRPC socket; connects when it is first used."""
    return grpc.insecure_channel(f"unix:{socket}", options=CHANNEL_OPTIONS)


class Channel:
    """A channel to the daemon's gRPC socket, opened when it is first used.

    Args:
        token: says who asks.
    """

    def __init__(self, socket: str, token: bytes) -> None:
        self._socket = socket
        self._metadata = ((TOKEN_METADATA, token),)
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    @property
    def stub(self) -> pb_grpc.SidecarStub:
        with self._lock:
            if self._channel is None:
                self._channel = open_channel(self._socket)
            return pb_grpc.SidecarStub(self._channel)

    def call(self, method: str, request: Any, seconds: float) -> Any:
        """Raises grpc.RpcError; ValueError if the channel is closed."""
        return getattr(self.stub, method)(request, timeout=seconds, metadata=self._metadata)

    def future(self, method: str, request: Any, seconds: float) -> Any:
        """Raises ValueError if the channel is closed."""
        return getattr(self.stub, method).future(request, timeout=seconds, metadata=self._metadata)

    def ask(self, request: pb.StatusRequest | pb.ReleaseRequest, seconds: float, then: Then) -> Callable[[], None]:
        """As `Transport.ask`."""

        def answered(call: Any) -> None:
            error = None if call.cancelled() else call.exception()
            if call.cancelled():
                then(CarrierError(grpc.StatusCode.CANCELLED, "given up"))
            else:
                then(call.result() if error is None else carrier_error(error))

        # Without saying who asks: the daemon may have forgotten us, and everybody may ask these two.
        method = self.stub.Status if isinstance(request, pb.StatusRequest) else self.stub.Release
        question = method.future(request, timeout=seconds)
        question.add_done_callback(answered)

        def give_up() -> None:
            question.cancel()

        return give_up

    def close(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()


class GrpcTransport(Transport):
    """Everything over gRPC; the link says who we are, and whether the daemon lives.

    Args:
        socket: the daemon's gRPC socket.
    """

    is_local = False

    def __init__(self, link: Link, socket: str) -> None:
        self.link = link
        self._channel = Channel(socket, link.token)
        self._answered = threading.Condition()

    def open_stream(self, outbox: Outbox, monitor: Monitor) -> AttachStream:
        return GrpcStream(self._channel.stub, outbox, monitor)

    def call(self, request: pb.LocalRequest, seconds: float) -> Any:
        try:
            return self._channel.call(*_unary(request), seconds)
        except grpc.RpcError as error:
            raise _without_cancelled(error) from error
        except ValueError as error:  # "Cannot invoke RPC on closed channel!"
            raise CarrierError(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    def post(self, request: pb.LocalRequest, then: Then | None) -> bool:
        with suppress(ValueError):  # "Cannot invoke RPC on closed channel!"
            call = self._channel.future(*_unary(request), POST_SECONDS)
            # gRPC cancels a call that nobody holds any more: this keeps it until it is answered.
            call.add_done_callback(partial(self._hand_on, then or _not_wanted))
            return True
        return False

    def _hand_on(self, then: Then, call: Any) -> None:
        """In a thread of gRPC."""
        error = None if call.cancelled() else call.exception()
        if call.cancelled():
            then(CarrierError(grpc.StatusCode.UNAVAILABLE, "the connection was closed"))
        else:
            then(call.result() if error is None else _without_cancelled(error))
        with self._answered:
            self._answered.notify_all()

    def collect(self, is_done: Callable[[], object] | None = None, seconds: float = 0.0) -> None:
        if is_done is not None:
            with self._answered:
                self._answered.wait_for(is_done, max(0.0, seconds))

    def ask(self, request: pb.StatusRequest | pb.ReleaseRequest, seconds: float, then: Then) -> Callable[[], None]:
        return self._channel.ask(request, seconds, then)

    def going_down(self) -> bool:
        return self.link.ended()

    def close(self) -> None:
        self._channel.close()
        self.link.close()


class GrpcStream(AttachStream):
    """An Attach stream of gRPC, which sends in a thread of its own."""

    def __init__(self, stub: pb_grpc.SidecarStub, outbox: Outbox, monitor: Monitor) -> None:
        self.ended = False
        self.error: CarrierError | None = None
        self.quiesced = False
        self._outbox = outbox
        self._monitor = monitor
        self._arrived: deque[pb.AttachReply] = deque()
        self._pumped: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True: look into the outbox. False: end."""
        self._replies = stub.Attach(self._requests())

    def pump(self) -> None:
        self._pumped.put(True)

    def wait(self) -> None:
        try:
            self._arrived.append(next(self._replies))
        except StopIteration:
            self.ended = self.quiesced = True
        except grpc.RpcError as error:
            self.error = carrier_error(error)
            self.ended = True

    def receive(self, *, helping: bool = False) -> list[pb.AttachReply]:
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def wait_readable(self, seconds: float) -> bool:
        return False

    def wake_reader(self) -> None:
        pass  # no other thread receives the end

    def cancel(self) -> None:
        self._replies.cancel()

    def close(self) -> None:
        self._pumped.put(False)

    def _requests(self) -> Iterator[pb.AttachRequest]:
        """Iterated in a thread of gRPC, as far as the daemon takes messages; its end half-closes the stream."""
        while self._pumped.get():
            while True:
                message = pb.AttachRequest()
                with self._monitor.changed:
                    if not self._outbox.waiting:
                        break
                    taken = self._outbox.take(message)
                    self._monitor.changed.notify_all()
                if taken:
                    yield message
                elif self._outbox.is_finished:
                    return


def carrier_error(error: grpc.RpcError) -> CarrierError:
    return CarrierError(error.code(), error.details() or error.code().name)


def _not_wanted(_answer: Any) -> None:
    pass


def _without_cancelled(error: grpc.RpcError) -> CarrierError:
    """A call is cancelled by a daemon that goes down, or by `close`."""
    refused = carrier_error(error)
    gone = refused.code is grpc.StatusCode.CANCELLED
    return CarrierError(grpc.StatusCode.UNAVAILABLE, refused.text) if gone else refused


def _unary(request: pb.LocalRequest) -> tuple[str, Any]:
    """Name of gRPC's method for what is in a request, and that."""
    method = kind_of(request)
    return method.capitalize(), getattr(request, method)
