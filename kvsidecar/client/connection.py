"""What belongs to one run of the daemon: a link, and what carries the messages: gRPC, or the fast lane."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import grpc

from kvsidecar.client.lane import Fill, LaneStream, Take, kind_of
from kvsidecar.client.lane_calls import LaneCalls, Then
from kvsidecar.client.link import connect
from kvsidecar.client.messages import CarrierError
from kvsidecar.protocol.paths import attach_path
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


_UNANSWERED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
POST_SECONDS = 1.0
"""After this long gRPC gives a call up that nobody waits for."""


def open_channel(socket: str) -> grpc.Channel:
    """A channel to the daemon's gRPC socket; connects when it is first used."""
    return grpc.insecure_channel(f"unix:{socket}", options=CHANNEL_OPTIONS)


class AttachCarrier(Protocol):
    """One Attach stream. What is put is made into a message by the ``fill`` that the stream was opened with."""

    settled: bool
    """The daemon itself has said that the stream is over: its jobs are, too, and the memory is unmapped."""

    def put(self, *items: Any) -> None:
        """Send these behind what was put before; never waits."""

    def finish(self) -> None:
        """Nothing more is sent. The daemon answers what it owes, unmaps the memory and ends the stream."""

    def cancel(self) -> None:
        """Break the stream off. The daemon, if it lives, sees that and ends the session."""

    def read(self) -> None:
        """Give what the daemon says to ``take``, until it ends the stream in order. Raises CarrierError at any other
        end. For one thread."""

    def read_now(self) -> None:
        """The same for what has arrived, in the caller's thread: who waits for an answer need not wait for another
        thread to be woken. Never waits. Where the carrier has a thread of its own, nothing."""

    def wait_readable(self, seconds: float) -> bool:
        """Wait until there may be something for `read_now`, or somebody else has read it. False, at once: this carrier
        cannot."""


class Connection:
    """Made and closed as a whole.

    Args:
        socket: the daemon's gRPC socket.
        fds: memfds to hand over.
        name: free text for the daemon's log.
        timeout: seconds to wait for the daemon's answer.
        cancel: a descriptor; readable when there is nothing to connect for any more.
        fast_lane: use it if the daemon has one.

    Raises:
        DaemonUnreachable, AttachRefused: as `link.connect`.
    """

    def __init__(
        self, socket: str, *, fds: Sequence[int], name: str, timeout: float, cancel: int, fast_lane: bool
    ) -> None:
        path = attach_path(socket)
        self.link = connect(path, fds=fds, client=name, timeout=timeout, cancel=cancel)
        self._socket = socket
        # Calls have connections of their own: who waits for an answer reads it, and no thread has to hand it over. The
        # second one is made when two threads call at a time: a scheduler's lookup does not wait for another's lease.
        connect_calls = partial(connect, path, fds=(), client=f"{name} (calls)".lstrip())
        self._calls = tuple(LaneCalls(connect_calls) for _ in range(2)) if fast_lane and self.link.fast_lane else ()
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    @property
    def epoch(self) -> int:
        return self.link.epoch

    @property
    def token(self) -> bytes:
        return self.link.token

    @property
    def fast_lane(self) -> bool:
        """Whether the messages go over it."""
        return bool(self._calls)

    @property
    def stub(self) -> pb_grpc.SidecarStub:
        """gRPC, for what the fast lane does not carry."""
        with self._lock:
            if self._channel is None:
                self._channel = open_channel(self._socket)
            return pb_grpc.SidecarStub(self._channel)

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Says who asks, for unary calls of `stub`."""
        return ((TOKEN_METADATA, self.token),)

    def call(self, request: pb.LaneRequest, seconds: float) -> Any:
        """Ask for the ``lookup``, ``release`` or ``renew`` in it, and wait for the answer at most ``seconds``.

        Raises:
            CarrierError: DEADLINE_EXCEEDED, UNAVAILABLE, or why the daemon refuses.
        """
        if self._calls:
            calls = next((each for each in self._calls if not each.busy), self._calls[0])
            return calls.call(request, seconds)
        try:
            ask, message = self._unary(request)
            return ask(message, timeout=seconds, metadata=self.metadata)
        except grpc.RpcError as error:
            refused = _carrier_error(error)
            if refused.code is grpc.StatusCode.CANCELLED:  # by a daemon that goes down, or by `close`
                raise CarrierError(grpc.StatusCode.UNAVAILABLE, refused.text) from error
            raise refused from error
        except ValueError as error:  # "Cannot invoke RPC on closed channel!"
            raise CarrierError(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    def post(self, request: pb.LaneRequest, then: Then | None) -> bool:
        """Send a call whose answer nobody waits for; never waits, never raises.

        Args:
            then: is given the answer: by a later `call` or `collect`, or in a thread of gRPC's. Not at all if the call
                was not sent or not answered.

        Returns:
            False: it could not be sent.
        """
        if self._calls:
            return any(calls.post(request, then) for calls in self._calls)
        with suppress(ValueError):  # "Cannot invoke RPC on closed channel!"
            ask, message = self._unary(request)
            call = ask.future(message, timeout=POST_SECONDS, metadata=self.metadata)
            if then is not None:
                call.add_done_callback(partial(_hand_on, then))
            return True
        return False

    def collect(self) -> None:
        """Hand on the answers to what was posted that have arrived; never waits."""
        for calls in self._calls:
            calls.collect()

    def _unary(self, request: pb.LaneRequest) -> tuple[Any, Any]:
        """gRPC's method for what is in a request, and that."""
        method = kind_of(request)
        return getattr(self.stub, method.capitalize()), getattr(request, method)

    def open_stream(self, fill: Fill, take: Take, lock: threading.RLock) -> AttachCarrier:
        """The Attach stream of this connection; there is one.

        Args:
            fill: makes what is put into a message.
            take: is given what the daemon says, one after the other.
            lock: is held while the carrier's own state changes; ``fill`` may take it.
        """
        if self._calls:
            return LaneStream(self.link, fill, take, lock)
        return GrpcStream(self.stub, fill, take)

    def close(self) -> None:
        for calls in self._calls:
            calls.close()
        with self._lock:
            if self._channel is not None:
                self._channel.close()
        self.link.close()


class GrpcStream(AttachCarrier):
    """An Attach stream of gRPC."""

    def __init__(self, stub: pb_grpc.SidecarStub, fill: Fill, take: Take) -> None:
        self.settled = False
        self._fill = fill
        self._take = take
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._replies = stub.Attach(self._requests())

    def put(self, *items: Any) -> None:
        for item in items:
            self._outgoing.put(item)

    def finish(self) -> None:
        self._outgoing.put(None)

    def cancel(self) -> None:
        self._replies.cancel()

    def read(self) -> None:
        try:
            for reply in self._replies:
                self._take(reply)
            self.settled = True
        except grpc.RpcError as error:
            raise _carrier_error(error) from error
        finally:
            self._outgoing.put(None)  # ends the generator that gRPC iterates: nobody listens to it any more

    def read_now(self) -> None:
        pass

    def wait_readable(self, seconds: float) -> bool:
        return False

    def _requests(self) -> Iterator[pb.AttachRequest]:
        """Iterated in a thread of gRPC; its end half-closes the stream."""
        while (item := self._outgoing.get()) is not None:
            message = pb.AttachRequest()
            if self._fill(item, message):
                yield message


def _hand_on(then: Then, call: Any) -> None:
    if (error := call.exception()) is None:
        then(call.result())
    elif isinstance(error, grpc.RpcError) and error.code() not in _UNANSWERED:
        then(_carrier_error(error))


def _carrier_error(error: grpc.RpcError) -> CarrierError:
    return CarrierError(error.code(), error.details() or error.code().name)
