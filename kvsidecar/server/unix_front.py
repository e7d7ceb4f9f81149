"""Accepts on the gRPC socket, and knows each client by its user, as the kernel says it (SO_PEERCRED)."""

from __future__ import annotations

import socket
from functools import partial

from kvsidecar.server.grpc_front import Client, End, GrpcFront
from kvsidecar.server.path_listener import PathListener
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.support import log
from kvsidecar.support.peer import Credentials
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.turns import Turns


class UnixFront:
    """Used from the event loop."""

    def __init__(self, socket_files: SocketFiles, front: GrpcFront, tasks: TaskSet, turns: Turns) -> None:
        self._front = front
        # Accepted apart from what is relayed: so much of it may wait that other users would wait to be accepted.
        self._listener = PathListener(
            socket_files, socket_files.grpc_path, self._accepted, tasks, log.limited("rpc"), turns, "grpc-accept"
        )

    def listen(self) -> None:
        """See `PathListener.start`."""
        self._listener.start()

    def stop_listening(self) -> None:
        """Take no more connections; those that there are go on."""
        self._listener.stop()

    def _accepted(self, connection: socket.socket, who: Credentials) -> None:
        uid = who.uid
        self._front.admit(Client(uid, {"uid": uid}), partial(End, connection))
