"""The client's end of the attach socket: says hello, hands over memfds, and holds the connection open."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kvsidecar.client.daemon_process import DaemonProcess
from kvsidecar.errors import AttachRefused, DaemonUnreachable
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb

_LENGTH = struct.Struct("<I")
_MAX_WELCOME_BYTES = 64 * 1024


@dataclass(slots=True)
class Link:
    """A live attach-socket connection. While it is open, the token is this process's identity."""

    connection: socket.socket
    process: DaemonProcess
    token: bytes
    epoch: int

    def ended(self) -> bool:
        """Whether the daemon has closed its end, which it does only when it goes down. Never waits."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.connection.close()
        self.process.close()


def connect(path: str, *, fds: Sequence[int], client: str, timeout: float, cancel: int | None = None) -> Link:
    """Connect, and hand over duplicates of ``fds``.

    Args:
        timeout: seconds for all of it.
        cancel: a descriptor; when it becomes readable there is nothing to connect for any more.

    Raises:
        DaemonUnreachable: nobody listens at ``path``, or it does not answer in time.
        AttachRefused: the daemon does not take this client; the text is the daemon's.
    """
    deadline = time.monotonic() + timeout
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.settimeout(timeout)  # of a connect() to a full queue: a hung daemon takes nobody from it
    process: DaemonProcess | None = None
    try:
        connection.connect(path)
        process = DaemonProcess(connection)
        hello = pb.Hello(protocol=PROTOCOL, num_fds=len(fds), client=client).SerializeToString()
        socket.send_fds(connection, [_LENGTH.pack(len(hello)) + hello], fds)
        (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline, cancel))
        if length > _MAX_WELCOME_BYTES:
            raise ConnectionError("who answers is no kvsidecar")
        welcome = pb.Welcome.FromString(_receive(connection, length, deadline, cancel))
        if welcome.error:
            raise AttachRefused(welcome.error)
    except BaseException as error:
        connection.close()
        if process is not None:
            process.close()
        if isinstance(error, OSError | DecodeError):
            text = getattr(error, "strerror", None) or str(error)
            raise DaemonUnreachable(f"no kvsidecar answers at {path} ({text}): is the daemon running?") from error
        raise
    connection.settimeout(None)
    return Link(connection, process, welcome.token, welcome.epoch)


def _receive(connection: socket.socket, nbytes: int, deadline: float, cancel: int | None) -> bytes:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if cancel is not None:
        poll.register(cancel, select.POLLIN)
    data = b""
    while len(data) < nbytes:
        ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if cancel in ready:
            raise ConnectionAbortedError("this client is being closed")
        if not ready:
            raise TimeoutError("it takes connections but does not answer")
        chunk = connection.recv(nbytes - len(data))
        if not chunk:
            raise ConnectionResetError("the daemon closed the connection")
        data += chunk
    return data
