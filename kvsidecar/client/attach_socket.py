"""The client's end of the attach socket: says hello, hands over memfds, and holds the connection open."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvsidecar.errors import AttachRefused, DaemonUnreachable
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb

_LENGTH = struct.Struct("<I")


@dataclass(slots=True)
class Link:
    """A live attach-socket connection. While it is open, the token is this process's identity."""

    connection: socket.socket
    token: bytes
    epoch: int

    def close(self) -> None:
        self.connection.close()


def connect(path: str, *, fds: Sequence[int], client: str, timeout: float) -> Link:
    """Connect, and hand over duplicates of ``fds``.

    Raises:
        DaemonUnreachable: nobody listens at ``path``, or it does not answer within ``timeout`` seconds.
        AttachRefused: the daemon does not take this client; the text is the daemon's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.settimeout(timeout)
    try:
        connection.connect(path)
        hello = pb.Hello(protocol=PROTOCOL, num_fds=len(fds), client=client).SerializeToString()
        socket.send_fds(connection, [_LENGTH.pack(len(hello)) + hello], fds)
        (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
        welcome = pb.Welcome.FromString(_receive(connection, length))
    except OSError as error:
        connection.close()
        text = error.strerror or str(error)
        raise DaemonUnreachable(f"no kvsidecar answers at {path} ({text}): is the daemon running?") from error
    except BaseException:
        connection.close()
        raise
    if welcome.error:
        connection.close()
        raise AttachRefused(welcome.error)
    connection.settimeout(None)
    return Link(connection, welcome.token, welcome.epoch)


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        chunk = connection.recv(nbytes - len(data))
        if not chunk:
            raise ConnectionResetError("the daemon closed the connection")
        data += chunk
    return data
