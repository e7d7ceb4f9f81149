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


def unix_listener(socket_files: SocketFiles, front: GrpcFront, tasks: TaskSet, turns: Turns) -> PathListener:
    """Used from the event loop."""

    def accepted(connection: socket.socket, who: Credentials) -> None:
        front.admit(Client(who.uid, {"uid": who.uid}), partial(End, connection))

    # Accepted apart from what is relayed: so much of it may wait that other users would wait to be accepted.
    caused = log.limited("rpc")
    return PathListener(socket_files, socket_files.grpc_path, accepted, tasks, caused, turns, "grpc-accept")
