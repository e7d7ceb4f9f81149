"""The interface of the transports, which carry messages to one run of the daemon and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvsidecar.client.connection import Connection
from kvsidecar.client.messages import TransportError
from kvsidecar.client.send_queue import SendQueue
from kvsidecar.client.waiting import Monitor
from kvsidecar.v1 import sidecar_pb2 as pb

Query = pb.StatusRequest | pb.ReleaseRequest
OnAnswer = Callable[[Any], None]
"""Called with the reply's message, or with the TransportError that says why there is none."""


class DaemonStream(Protocol):
    """One Attach stream. Its owner's thread alternates `wait` and `receive` until the stream has ended, then calls
    `close`."""

    ended: bool
    """Whether nothing more will arrive, and everything that had arrived was received."""
    error: TransportError | None
    """Why it has ended; None before, and if the daemon ended it in order."""
    quiesced: bool
    """Whether the daemon has reported the end of the session: none of its copies runs, and the memory is unmapped."""

    def pump(self) -> None:
        """Send from the send queue as much as the socket takes; the rest follows in the background. Never waits. With
        the lock held."""

    def wait(self) -> None:
        """Wait until there may be something to receive, or the stream has ended. For the owner's thread."""

    def receive(self, *, helping: bool = False) -> list[pb.AttachReply]:
        """What has arrived, in order. Never waits. One thread at a time.

        Args:
            helping: in another thread than the owner's, which then leaves the next answers to that thread.
        """

    def wait_readable(self, seconds: float) -> bool:
        """Wait until there may be something to receive, or another thread has received it. False, at once: this
        transport receives in a thread of its own."""

    def wake_reader(self) -> None:
        """End the owner's `wait`: another thread has received the end."""

    def cancel(self) -> None:
        """Break the stream off. The daemon, if it lives, then ends the session."""

    def close(self) -> None:
        """Stop sending, and end the threads. After the stream has ended."""


class Transport(Protocol):
    """Owns the connection that it is made with. All methods may be called from any thread."""

    connection: Connection
    is_local: bool
    """Whether this connection's messages use the local protocol."""

    def open_stream(self, send_queue: SendQueue, monitor: Monitor) -> DaemonStream:
        """Open the Attach stream; once.

        Args:
            send_queue: what it sends.
            monitor: guards the send queue and the stream's state; notified when the send queue has ended a job.
        """

    def call(self, request: pb.LocalRequest, seconds: float, on_late: OnAnswer | None = None) -> Any:
        """Send the ``lookup``, ``release`` or ``renew``, and wait at most ``seconds`` for the reply.

        Args:
            on_late: like ``on_answer`` of `post`, for an answer that did not arrive in time. Not called if the message
                was not sent whole.

        Raises:
            TransportError: DEADLINE_EXCEEDED, UNAVAILABLE, or the daemon's refusal.
        """

    def post(self, request: pb.LocalRequest, on_answer: OnAnswer | None) -> bool:
        """Send a call without waiting for its answer. Never waits, never raises.

        Args:
            on_answer: called by a later `call` or `collect`, or in a thread of the transport; with UNAVAILABLE if the
                connection is lost first.

        Returns:
            False: it could not be sent, and ``on_answer`` will not be called.
        """

    def post_in_background(self, request: pb.LocalRequest, on_answer: OnAnswer | None) -> bool:
        """Like `post`, for messages of any size, also before the first `call`: it takes longer, and ``on_answer`` is
        called in a thread of the transport."""

    def collect(self, is_done: Callable[[], object] | None = None, seconds: float = 0.0) -> None:
        """Deliver the answers to posted calls that have arrived.

        Args:
            is_done: wait for more until it returns true, at most ``seconds``. Without it this never waits.
        """

    def query(self, request: Query, seconds: float, on_answer: OnAnswer) -> Callable[[], object]:
        """Send a request in the background that needs no token: the daemon may have forgotten this client. Never waits.

        Args:
            on_answer: called once, in any thread; with a TransportError if there is no reply in time.

        Returns:
            A function that cancels the query.
        """

    def going_down(self) -> bool:
        """Whether the daemon has announced, apart from the end of the stream, that it shuts down with its pool."""

    def close(self) -> None:
        """Close the connection. A call that waits ends."""
