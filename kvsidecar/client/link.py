"""A connection to the attach socket, and the process at its other end. While it is open, its token is who we are."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kvsidecar.client.unreachable import unreachable
from kvsidecar.errors import AttachRefused
from kvsidecar.protocol.framing import FrameReader, FrameTooLong, frame
from kvsidecar.support import peer
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb

_MAX_WELCOME_BYTES = 64 * 1024
_QUEUE_FULL_SECONDS = 0.005
"""Between attempts to connect while the daemon's queue of connections is full."""


class DaemonProcess:
    """A pidfd of the process that listens at the other end of a Unix socket.

    The kernel names the process that called listen(), so this needs a daemon that binds its socket itself.

    Args:
        connection: a connected Unix stream socket. To be called before the daemon is known to have answered on it: an
            answer that comes afterwards proves that the number was not another process's by then.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.pid = peer.credentials(connection).pid
        """In this process's PID namespace; 0 if the daemon lives in another one."""
        # A daemon that has died in between: connecting fails next, and says so.
        self.fd = peer.pidfd(connection)
        """None: the kernel can neither open the peer's pidfd (before 6.5) nor name it in this PID namespace."""

    def gone(self) -> bool:
        """Whether the process has ended: all of its threads, its memory, and the driver's files it had open.

        False if that cannot be known. A pidfd is readable once the last thread has passed exit_files() (the kernel's
        do_exit() closes them, then tells who waits): the driver has taken down its channels, and no DMA can run.
        """
        if self.fd is None:
            return False
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def duplicate(self) -> DaemonProcess:
        """Another one of the same process, to be closed apart."""
        other = copy(self)
        other.fd = None if self.fd is None else os.dup(self.fd)
        return other

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class LostDaemon:
    """A daemon that was given up before it had let go of a rank's memory.

    Args:
        process: owned from now on.
        epoch: of that run of the daemon.
    """

    def __init__(self, process: DaemonProcess, epoch: int) -> None:
        self._process = process
        self._epoch = epoch
        self._gone = False

    def __del__(self) -> None:
        self._process.close()  # nobody wants to know any more

    def gone(self, successor: int) -> bool:
        """Whether its process has ended. Where that cannot be watched, another daemon at the socket is the proof.

        Args:
            successor: epoch of the daemon that has the socket now; 0 if none is known.
        """
        if not self._gone:
            unwatched = self._process.fd is None
            self._gone = successor not in (0, self._epoch) if unwatched else self._process.gone()
            if self._gone:
                self._process.close()
        return self._gone


@dataclass(slots=True)
class Link:
    """A live attach-socket connection."""

    connection: socket.socket
    process: DaemonProcess
    token: bytes
    epoch: int
    local_protocol: bool
    """Whether the daemon takes frames on it."""

    def ended(self) -> bool:
        """Whether the daemon has closed its end, and all that it said before has been read. Never waits."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def shut_down(self) -> None:
        """Say and hear nothing more: a thread that waits for the daemon goes on."""
        with contextlib.suppress(OSError):  # it is broken already
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.connection.close()
        self.process.close()


def connect(path: str, *, fds: Sequence[int], client: str, timeout: float, cancel: int | None = None) -> Link:
    """Connect, and hand over duplicates of ``fds``.

    Args:
        timeout: seconds for all of it.
        cancel: a descriptor; when it becomes readable there is nothing to connect for any more.

    Raises:
        DaemonUnreachable: nobody listens at ``path``, or it does not answer in time; `SocketDenied` if it may not be
            opened.
        AttachRefused: the daemon does not take this client; the text is the daemon's.
    """
    deadline = time.monotonic() + timeout
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    process: DaemonProcess | None = None
    try:
        _connect(connection, path, deadline, cancel)
        process = DaemonProcess(connection)
        hello = pb.Hello(protocol=PROTOCOL, num_fds=len(fds), client=client).SerializeToString()
        # A daemon that turns clients away has said why, and closed, before it reads anything.
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(connection, [frame(hello)], fds)
        welcome = pb.Welcome.FromString(_receive(connection, deadline, cancel))
        if welcome.error:
            raise AttachRefused(welcome.error)
    except BaseException as error:
        connection.close()
        if process is not None:
            process.close()
        if isinstance(error, OSError | DecodeError):
            raise unreachable(path, error) from error
        raise
    return Link(connection, process, welcome.token, welcome.epoch, welcome.local_protocol)


def _connect(connection: socket.socket, path: str, deadline: float, cancel: int | None) -> None:
    """connect(), also to a daemon that is slow to take connections from its queue: many engines start at once."""
    connection.setblocking(False)
    cancelled = select.poll()
    if cancel is not None:
        cancelled.register(cancel, select.POLLIN)
    while True:
        try:
            connection.connect(path)
            break
        except BlockingIOError:  # EAGAIN of a full queue (unix(7)); a blocking connect() would not notice `cancel`
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("its queue of connections is full") from None
            if cancelled.poll(min(left, _QUEUE_FULL_SECONDS) * 1000):
                raise ConnectionAbortedError("this client is being closed") from None
    connection.setblocking(True)


def _receive(connection: socket.socket, deadline: float, cancel: int | None) -> bytes:
    """The payload of one frame, and nothing of what comes behind it."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if cancel is not None:
        poll.register(cancel, select.POLLIN)
    frames = FrameReader(_MAX_WELCOME_BYTES)
    try:
        while (payload := frames.next()) is None:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if cancel in ready:
                raise ConnectionAbortedError("this client is being closed")
            if not ready:
                raise TimeoutError("it takes connections but does not answer")
            chunk = connection.recv(frames.missing)
            if not chunk:
                raise ConnectionResetError("the daemon closed the connection")
            frames.feed(chunk)
    except FrameTooLong as error:
        raise ConnectionError("who answers is no kvsidecar") from error
    return payload
