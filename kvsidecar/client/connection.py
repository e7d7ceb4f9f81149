"""A connection to the attach socket, and the process at its other end.

While the connection is open, its token identifies this client.
"""

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
"""Between attempts to connect while the listen queue of the daemon's socket is full."""


class DaemonProcess:
    """A pidfd of the process that listens at the other end of a Unix socket.

    The kernel names the process that called listen(), so this needs a daemon that binds its socket itself.

    Args:
        sock: a connected Unix stream socket on which the daemon has not answered yet: its later answer proves that the
            pid was not yet another process's.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.pid = peer.credentials(sock).pid
        """In this process's PID namespace; 0 if the daemon is in another one."""
        # If the daemon has died in between, connecting fails next, and says so.
        self.fd = peer.pidfd(sock)
        """None: the kernel can neither open the peer's pidfd (before 6.5) nor name it in this PID namespace."""

    def gone(self) -> bool:
        """Whether the process has ended: its threads, its memory, and the driver's files that it had open.

        False if that cannot be known. A pidfd becomes readable after the last thread's exit_files() in the kernel's
        do_exit(): by then the driver has taken down its channels, and no DMA can run.
        """
        if self.fd is None:
            return False
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def duplicate(self) -> DaemonProcess:
        """Another handle of the same process, to be closed separately."""
        other = copy(self)
        other.fd = None if self.fd is None else os.dup(self.fd)
        return other

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class LostDaemon:
    """A daemon that may still have a rank's memory mapped when its client is closed.

    Args:
        process: closed by this object.
        epoch: of that daemon run.
    """

    def __init__(self, process: DaemonProcess, epoch: int) -> None:
        self._process = process
        self._epoch = epoch
        self._gone = False

    def __del__(self) -> None:
        self._process.close()

    def gone(self, successor: int) -> bool:
        """Whether its process has ended. If it cannot be watched, another daemon at the socket proves it.

        Args:
            successor: epoch of the daemon at the socket now; 0 if unknown.
        """
        if not self._gone:
            unwatched = self._process.fd is None
            self._gone = successor not in (0, self._epoch) if unwatched else self._process.gone()
            if self._gone:
                self._process.close()
        return self._gone


@dataclass(slots=True)
class Connection:
    """An open connection to the attach socket."""

    sock: socket.socket
    process: DaemonProcess
    token: bytes
    epoch: int
    local_protocol: bool
    """Whether the daemon accepts the local protocol on it."""

    def ended(self) -> bool:
        """Whether the daemon has closed its end, and everything before that was read. Never waits."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def shut_down(self) -> None:
        """Shut the socket down in both directions: a thread that waits for the daemon continues."""
        with contextlib.suppress(OSError):  # it has ended already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()
        self.process.close()


def connect(path: str, *, fds: Sequence[int], client: str, timeout: float, cancel: int | None = None) -> Connection:
    """Connect, and send duplicates of ``fds``.

    Args:
        timeout: seconds for all of it.
        cancel: a descriptor that becomes readable to give up.

    Raises:
        DaemonUnreachable: nothing listens at ``path``, or it does not answer in time; `SocketDenied` without the
            permission to open it.
        AttachRefused: the daemon refuses this client; the text is the daemon's.
    """
    deadline = time.monotonic() + timeout
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    process: DaemonProcess | None = None
    try:
        _connect(sock, path, deadline, cancel)
        process = DaemonProcess(sock)
        hello = pb.Hello(protocol=PROTOCOL, num_fds=len(fds), client=client).SerializeToString()
        # A daemon that refuses connections has sent its reason, and closed, before it reads.
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(sock, [frame(hello)], fds)
        welcome = pb.Welcome.FromString(_receive(sock, deadline, cancel))
        if welcome.error:
            raise AttachRefused(welcome.error)
    except BaseException as error:
        sock.close()
        if process is not None:
            process.close()
        if isinstance(error, OSError | DecodeError):
            raise unreachable(path, error) from error
        raise
    return Connection(sock, process, welcome.token, welcome.epoch, welcome.local_protocol)


def _connect(sock: socket.socket, path: str, deadline: float, cancel: int | None) -> None:
    """connect(), with retries while the listen queue is full: many engines may start at once."""
    sock.setblocking(False)
    cancelled = select.poll()
    if cancel is not None:
        cancelled.register(cancel, select.POLLIN)
    while True:
        try:
            sock.connect(path)
            break
        except BlockingIOError:  # EAGAIN: the queue is full (unix(7)); a blocking connect() would not notice `cancel`
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("its listen queue is full") from None
            if cancelled.poll(min(left, _QUEUE_FULL_SECONDS) * 1000):
                raise ConnectionAbortedError("this client is being closed") from None
    sock.setblocking(True)


def _receive(sock: socket.socket, deadline: float, cancel: int | None) -> bytes:
    """Receive the payload of one frame, and no byte after it."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if cancel is not None:
        poll.register(cancel, select.POLLIN)
    frames = FrameReader(_MAX_WELCOME_BYTES)
    try:
        while (payload := frames.next()) is None:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if cancel in ready:
                raise ConnectionAbortedError("this client is being closed")
            if not ready:
                raise TimeoutError("it accepts connections but does not answer")
            chunk = sock.recv(frames.missing)
            if not chunk:
                raise ConnectionResetError("the daemon closed the connection")
            frames.feed(chunk)
    except FrameTooLong as error:
        raise ConnectionError("the answer is not kvsidecar's: another program listens there") from error
    return payload
