"""What belongs to one run of the daemon: an attach-socket link and a gRPC channel."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from kvsidecar.client import attach_socket
from kvsidecar.paths import attach_path
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc

_OPTIONS = [
    # gRPC shares connections, and how long it waits before it tries a broken one again, between the channels of a
    # process: with the defaults a channel to the new daemon would wait up to two minutes because of the old one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


def open_channel(socket: str) -> grpc.Channel:
    """A channel to the daemon's gRPC socket; connects when it is first used."""
    return grpc.insecure_channel(f"unix:{socket}", options=_OPTIONS)


class Connection:
    """A link and a channel, made and closed together.

    Args:
        socket: the daemon's gRPC socket.
        fds: memfds to hand over.
        name: free text for the daemon's log.
        timeout: seconds to wait for the daemon's answer.
        cancel: a descriptor; readable when there is nothing to connect for any more.

    Raises:
        DaemonUnreachable, AttachRefused: as `attach_socket.connect`.
    """

    def __init__(self, socket: str, *, fds: Sequence[int], name: str, timeout: float, cancel: int) -> None:
        self.link = attach_socket.connect(attach_path(socket), fds=fds, client=name, timeout=timeout, cancel=cancel)
        self.channel = open_channel(socket)
        self.stub = pb_grpc.SidecarStub(self.channel)

    @property
    def epoch(self) -> int:
        return self.link.epoch

    @property
    def token(self) -> bytes:
        return self.link.token

    def close(self) -> None:
        self.channel.close()
        self.link.close()
