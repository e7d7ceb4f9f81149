"""gRPC's own servers behind their fronts, and the one for the Unix socket: the service, health and reflection."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvsidecar.errors import Refusal
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.protocol.paths import grpc_address
from kvsidecar.server.arrivals import Arrivals
from kvsidecar.server.decoding import TolerantRegistrar
from kvsidecar.server.grpc_front import LIMITS, MAX_ALL_CALLS, End, GrpcClient, GrpcFront, OpenedConnection, new_name
from kvsidecar.server.handler import Handler
from kvsidecar.server.path_listener import PathListener
from kvsidecar.server.service import Service
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.server.stream_clients import StreamClients
from kvsidecar.support import log
from kvsidecar.support.peer import Credentials
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.turns import Turns
from kvsidecar.types import Readiness, State
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Sidecar"].full_name
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"

STREAMS_PER_CONNECTION = 512
"""Open calls of one connection. A client keeps further calls back until others have ended."""

OPTIONS = [  # of each of gRPC's servers behind a front
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8192),
    # Beyond these gRPC cancels calls at random that it has not handed over yet, whoever's they are.
    ("grpc.server.max_pending_requests", 2 * MAX_ALL_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_ALL_CALLS),
    ("grpc.so_reuseport", 0),
    # With these probes, gRPC mistakes a client that sends faster than it is served for a link with a large
    # bandwidth-delay product and reads ahead, nominally up to 16 MiB per stream (measured: 37). Without them it reads
    # the requested message and 64 KiB.
    ("grpc.http2.bdp_probe", 0),
]


_caused = log.limited("rpc")
_GRPC_LOG = logging.getLogger("grpc._cython.cygrpc")


class ClientsGone(logging.Filter):
    """Replaces the stack trace in gRPC's log for a client that disconnects before its reply, or sends what does not
    parse to a service of gRPC's own, by a counted refusal. Of the others it passes one in a second.
    """

    def __init__(self, refuse: Callable[[Refusal], None]) -> None:
        super().__init__()
        self._refuse = refuse
        self._rate = log.Rate()
        """Limits records by their text without its arguments."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        if kind is not None and issubclass(kind, grpc.aio.InternalError):
            self._refuse(Refusal.CLIENT_GONE)
            _caused.debug("a client disconnected before its reply", call=record.getMessage())
            return False
        if kind is not None and issubclass(kind, DecodeError):
            self._refuse(Refusal.INVALID_REQUEST)
            _caused.debug("a message does not parse", call=record.getMessage())
            return False
        return self._rate.passes(str(record.msg)) is not None


class InnerServer:
    """One of gRPC's own servers, at a socket without a path: only its front connects to it."""

    def __init__(
        self,
        socket_files: SocketFiles,
        front: GrpcFront,
        service: Service,
        health_of: health.aio.HealthServicer,
        options: Sequence[tuple[str, int]],
    ) -> None:
        self._socket_files, self._front = socket_files, front
        self.server = grpc.aio.server(options=[*OPTIONS, *options])
        pb_grpc.add_SidecarServicer_to_server(service, TolerantRegistrar(self.server))
        health_pb2_grpc.add_HealthServicer_to_server(health_of, self.server)
        self._file: int | None = None
        """Descriptor of the socket's file."""

    async def start(self) -> None:
        """Serve the front. Raises SocketInUse."""
        self._file = self._socket_files.bind_hidden(lambda path: self.server.add_insecure_port(grpc_address(path)))
        await self.server.start()
        self._front.start(f"/proc/self/fd/{self._file}")

    async def stop(self, grace: float) -> None:
        """Refuse new calls; running calls may end within ``grace`` seconds."""
        await self.server.stop(grace)
        self._front.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def unix_listener(socket_files: SocketFiles, front: GrpcFront, tasks: TaskSet, turns: Turns) -> PathListener:
    """Accepts on the gRPC socket for the front, which knows each client by its user (SO_PEERCRED)."""

    def accepted(connection: socket.socket, who: Credentials) -> None:
        opened = OpenedConnection(connection, who, time.clock_gettime(time.CLOCK_BOOTTIME))
        front.admit(GrpcClient(who.uid, {"uid": who.uid}, new_name(), opened), partial(End, connection))

    # Accepted apart from what is relayed: so much of it may wait that other users would wait to be accepted.
    return PathListener(socket_files, socket_files.grpc_path, accepted, tasks, _caused, turns, "grpc-accept")


def _add_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Serve reflection under the names of both of its versions, whose messages are the same on the wire. The package
    knows the older one alone; newer clients ask for the other first, and some for no other."""
    handlers = {
        "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
            reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
    }
    for name in (reflection.SERVICE_NAME, REFLECTION_V1):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


class RpcServer:
    """Serves gRPC on the Unix socket. `start` it before pinning: clients can attach, and are notified when ready.

    Args:
        arrivals: counts clients that attach without a connection to the attach socket.
    """

    def __init__(self, socket_files: SocketFiles, handler: Handler, turns: Turns, arrivals: Arrivals) -> None:
        self._readiness, self._tasks, refuse = handler.readiness, handler.tasks, handler.metrics.refuse
        self.health = health.aio.HealthServicer()
        self._clients_gone = ClientsGone(refuse)
        front = GrpcFront(LIMITS, refuse, self._tasks, turns)
        streams = ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION)
        service = Service(handler, StreamClients(handler, arrivals, turns, front.client_at))
        self._inner = InnerServer(socket_files, front, service, self.health, [streams])
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        _add_reflection(self._inner.server, names)
        self._listener = unix_listener(socket_files, front, self._tasks, turns)
        self.start_again = self._listener.start
        """Listens at another socket, because this one was removed. Connected clients notice nothing."""

    async def start(self) -> None:
        """Bind and serve. The caller holds the lock of the socket files. Raises SocketInUse."""
        _GRPC_LOG.addFilter(self._clients_gone)
        await self._set_health(self._readiness.now)
        self._readiness.listen(self._readiness_changed)
        await self._inner.start()
        self._listener.start()

    async def stop(self, grace: float) -> None:
        """Refuse new calls; running calls may end within ``grace`` seconds."""
        self._listener.stop()
        await self._inner.stop(grace)
        _GRPC_LOG.removeFilter(self._clients_gone)

    def _readiness_changed(self, now: Readiness) -> None:
        self._tasks.spawn(self._set_health(now), name="health")

    async def _set_health(self, now: Readiness) -> None:
        response = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self.health.set(name, response.SERVING if now.state is State.READY else response.NOT_SERVING)
