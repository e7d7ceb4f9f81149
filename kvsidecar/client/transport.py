"""What carries the client's messages to one run of the daemon, and back: the interface that its carriers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvsidecar.client.link import Link
from kvsidecar.client.messages import CarrierError
from kvsidecar.client.outbox import Outbox
from kvsidecar.client.waiting import Monitor
from kvsidecar.v1 import sidecar_pb2 as pb

Then = Callable[[Any], None]
"""Is given an answer: the reply's message, or the CarrierError that says why there is none."""


class AttachStream(Protocol):
    """One Attach stream. Its owner's thread alternates `wait` and `receive` until it has ended, then closes it."""

    ended: bool
    """Nothing more will arrive; what had arrived before was received."""
    error: CarrierError | None
    """Why it has ended; None if the daemon ended it in order, and before."""
    quiesced: bool
    """The daemon itself has said that the session is over: no copy of it runs, and the memory is unmapped."""

    def pump(self) -> None:
        """Send what waits in the outbox, as far as that goes; the rest follows by itself. Never waits. With the lock
        held."""

    def wait(self) -> None:
        """Wait until there may be something to receive, or the stream has ended. For the owner's thread."""

    def receive(self, *, helping: bool = False) -> list[pb.AttachReply]:
        """What has arrived, in order. Never waits. One thread at a time.

        Args:
            helping: in another thread than the owner's, which leaves the next answers to it.
        """

    def wait_readable(self, seconds: float) -> bool:
        """Wait until there may be something to receive, or another thread has received it. False, at once: this carrier
        cannot, since it has a thread of its own."""

    def wake_reader(self) -> None:
        """The end was received by another thread: end the owner's `wait`."""

    def cancel(self) -> None:
        """Break the stream off. The daemon, if it lives, sees that and ends the session."""

    def close(self) -> None:
        """Send nothing more, and end the threads. After the end."""


class Transport(Protocol):
    """Made with a link, which is its own from then on. All methods may be called from any thread."""

    link: Link
    is_local: bool
    """Whether its messages go over the local protocol."""

    def open_stream(self, outbox: Outbox, monitor: Monitor) -> AttachStream:
        """The Attach stream of this connection; there is one.

        Args:
            outbox: what it sends.
            monitor: guards the outbox and the stream's own state; notified when the outbox has ended a job.
        """

    def call(self, request: pb.LocalRequest, seconds: float) -> Any:
        """Ask for the ``lookup``, ``release`` or ``renew`` in it, and wait for the answer at most ``seconds``.

        Raises:
            CarrierError: DEADLINE_EXCEEDED, UNAVAILABLE, or why the daemon refuses.
        """

    def post(self, request: pb.LocalRequest, then: Then | None) -> bool:
        """Send a call whose answer nobody waits for here; never waits, never raises.

        Args:
            then: is given the answer: by a later `call` or `collect`, or in a thread of the carrier's; UNAVAILABLE if
                the connection is lost before.

        Returns:
            False: it could not be sent, and ``then`` will not be called.
        """

    def collect(self, is_done: Callable[[], object] | None = None, seconds: float = 0.0) -> None:
        """Hand on the answers to what was posted that have arrived.

        Args:
            is_done: wait for more until it says so, at most ``seconds``. Without it this never waits.
        """

    def ask(self, request: pb.StatusRequest | pb.ReleaseRequest, seconds: float, then: Then) -> Callable[[], None]:
        """Ask in the background what everybody may ask, whether or not the daemon still knows us; never waits.

        Args:
            then: is given the answer, or the CarrierError if there is none in time, once, in any thread.

        Returns:
            Gives the question up, unless it was answered.
        """

    def going_down(self) -> bool:
        """Whether the daemon has told, apart from the end of the stream, that it goes down with its pool."""

    def close(self) -> None:
        """A call that waits ends; so does the link."""
