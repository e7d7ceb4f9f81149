"""A connection to the attach socket, and the processes behind it.

While the connection is open, its token identifies this client.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kvsidecar.client.buffers import Descriptor
from kvsidecar.client.unreachable import unreachable
from kvsidecar.errors import AttachRefused
from kvsidecar.protocol.framing import FrameReader, FrameTooLong, frame
from kvsidecar.support.fence import Fence
from kvsidecar.support.peer import MAX_FDS, close_all, recv_fds, send_fds
from kvsidecar.support.polling import wait_readable
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    from kvsidecar.client.session import AttachSession

_MAX_WELCOME_BYTES = 64 * 1024
_QUEUE_FULL_SECONDS = 0.005
"""Delay between attempts to connect while the listen queue of the daemon's socket is full, and between attempts to send
descriptors while too many are under way."""


class DaemonProcess:
    """Pidfds of the daemon's process and of those that copy for it.

    Args:
        fds: closed by `close`.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)

    def gone(self, seconds: float = 0.0) -> bool:
        """Whether all of them have ended: their threads, their memory, and the driver's files that they had open.

        A pidfd becomes readable after the last thread's exit_files() in the kernel's do_exit(): by then the driver has
        taken down its channels, and no DMA can run. The daemon's own death proves nothing about a copier: the kernel
        kills it then, and that takes time.

        Args:
            seconds: how long to wait for it.
        """
        deadline = time.monotonic() + seconds
        return bool(self.fds) and all(wait_readable(fd, deadline - time.monotonic()) for fd in self.fds)

    def duplicate(self) -> DaemonProcess:
        """Another handle of the same processes, to be closed separately."""
        return DaemonProcess([os.dup(fd) for fd in self.fds])

    def close(self) -> None:
        fds, self.fds = self.fds, ()
        close_all(fds)


class LostDaemon:
    """A daemon that may still have a rank's memory mapped although the session has ended on this side.

    Args:
        process: closed by this object.
        session: the session that ended.
    """

    def __init__(self, process: DaemonProcess, session: AttachSession | None = None) -> None:
        self.session = session
        self._process = process
        self._gone = False

    def __del__(self) -> None:
        self._process.close()

    def gone(self, seconds: float = 0.0) -> bool:
        """Whether the daemon's processes have ended. Waits ``seconds`` for it."""
        if not self._gone and self._process.gone(seconds):
            self._gone = True
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
    fence: Fence | None
    """None if it was not asked for, or the daemon has none."""

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


def connect(
    path: str,
    *,
    fds: Sequence[Descriptor],
    client: str,
    timeout: float,
    cancel: int | None = None,
    fenced: bool = False,
) -> Connection:
    """Connect, and send duplicates of ``fds``.

    Args:
        fenced: ask for a fence.
        timeout: seconds for all of it.
        cancel: a descriptor that becomes readable to give up.

    Raises:
        DaemonUnreachable: nothing listens at ``path``, or it does not answer in time; `SocketDenied` without the
            permission to open it.
        AttachRefused: the daemon refuses this client; the text is the daemon's.
        NotExportable: one of ``fds`` cannot be opened.
    """
    deadline = time.monotonic() + timeout
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    process = DaemonProcess(())
    try:
        _connect(sock, path, deadline, cancel)
        client = client.ljust(len(fds) // MAX_FDS)  # the message must have a byte for each batch of descriptors
        hello = pb.Hello(protocol=PROTOCOL, num_fds=len(fds), client=client, fence=fenced).SerializeToString()
        # A daemon that refuses connections has sent its reason, and closed, before it reads.
        with contextlib.suppress(BrokenPipeError):
            _send(sock, frame(hello), fds, deadline, cancel)
        payload, process.fds = _receive(sock, deadline, cancel)
        welcome = pb.Welcome.FromString(payload)
        if welcome.error:
            raise AttachRefused(welcome.error)
        if not len(process.fds) - welcome.fence == welcome.num_pidfds > 0:
            fence_too = " and a fence" if welcome.fence else ""
            raise ConnectionError(
                f"it announced {welcome.num_pidfds} pidfds{fence_too} and sent {len(process.fds)} descriptors"
            )
        fence = None
        if welcome.fence:
            *pidfds, last = process.fds
            fence = Fence(last)
            process.fds = tuple(pidfds)
            os.close(last)
    except BaseException as error:
        sock.close()
        process.close()
        if isinstance(error, OSError | DecodeError):
            raise unreachable(path, error) from error
        raise
    return Connection(sock, process, welcome.token, welcome.epoch, welcome.local_protocol, fence)


def _connect(sock: socket.socket, path: str, deadline: float, cancel: int | None) -> None:
    """connect(), with retries while the listen queue is full: many engines may start at once."""
    sock.setblocking(False)
    while True:
        try:
            sock.connect(path)
            break
        except BlockingIOError:  # EAGAIN: the queue is full (unix(7)); a blocking connect() would not notice `cancel`
            _pause(deadline, cancel, "its listen queue is full")
    sock.setblocking(True)


def _send(sock: socket.socket, data: bytes, fds: Sequence[Descriptor], deadline: float, cancel: int | None) -> None:
    """Send a message in one piece; with more than `MAX_FDS` descriptors, that many with each of its first bytes."""
    for first in range(0, max(1, len(fds)), MAX_FDS):
        with contextlib.ExitStack() as opened:
            batch = []
            for each in fds[first : first + MAX_FDS]:
                batch.append(each if isinstance(each, int) else each())
                if not isinstance(each, int):
                    opened.callback(os.close, batch[-1])
            piece, data = (data[:1], data[1:]) if first + MAX_FDS < len(fds) else (data, b"")
            while not send_fds(sock, piece, batch):
                _pause(deadline, cancel, "it does not take the descriptors that were sent before")


def _pause(deadline: float, cancel: int | None, why: str) -> None:
    """Wait a moment for the daemon. Raises TimeoutError at the deadline."""
    cancelled = select.poll()
    if cancel is not None:
        cancelled.register(cancel, select.POLLIN)
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(why)
    if cancelled.poll(min(left, _QUEUE_FULL_SECONDS) * 1000):
        raise ConnectionAbortedError("this client is being closed")


def _receive(sock: socket.socket, deadline: float, cancel: int | None) -> tuple[bytes, tuple[int, ...]]:
    """Receive the payload of one frame with its descriptors, and no byte after it."""
    fds: list[int] = []
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
            chunk, more, _ = recv_fds(sock, frames.missing)
            fds += more
            if not chunk:
                raise ConnectionResetError("the daemon closed the connection")
            frames.feed(chunk)
    except BaseException as error:
        close_all(fds)
        if isinstance(error, FrameTooLong):
            raise ConnectionError("the answer is not kvsidecar's: another program listens there") from error
        raise
    return payload, tuple(fds)
