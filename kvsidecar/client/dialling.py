"""Makes a connection to the daemon, and chooses what carries its messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvsidecar.client.grpc_transport import GrpcTransport
from kvsidecar.client.link import connect
from kvsidecar.client.local_transport import LocalTransport
from kvsidecar.client.transport import Transport
from kvsidecar.protocol.paths import attach_path


def dial(
    socket: str, *, fds: Sequence[int], name: str, timeout: float, cancel: int | None = None, local: bool
) -> Transport:
    """Connect.

    Args:
        socket: the daemon's gRPC socket.
        fds: memfds to hand over.
        name: free text for the daemon's log.
        timeout: seconds to wait for the daemon's answer.
        cancel: a descriptor; readable when there is nothing to connect for any more.
        local: use the local protocol if the daemon offers it.

    Raises:
        DaemonUnreachable, AttachRefused: as `link.connect`.
    """
    path = attach_path(socket)
    link = connect(path, fds=fds, client=name, timeout=timeout, cancel=cancel)
    if local and link.local_protocol:
        return LocalTransport(link, socket, partial(connect, path, fds=(), client=f"{name} (calls)".lstrip()))
    return GrpcTransport(link, socket)
