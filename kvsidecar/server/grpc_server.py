"""The gRPC server on the Unix socket: the service, health and reflection."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvsidecar.core.readiness import DaemonReadiness, Snapshot
from kvsidecar.errors import Refusal, SocketInUse
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.protocol.paths import grpc_address
from kvsidecar.server.decoding import TolerantRegistrar
from kvsidecar.server.service import Service
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.support import log
from kvsidecar.support.tasks import TaskSet
from kvsidecar.types import State
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Sidecar"].full_name

MAX_CALLS = 4096
"""Limit of unfinished calls of all clients. gRPC answers further calls with RESOURCE_EXHAUSTED, without counting them.
Long-lived calls have limits per user where they are served."""

MAX_KINDS = 64
"""Limit of the kinds of records that are told apart: gRPC has few."""

LAST_CALL_SECONDS = 1e6
"""The longest that calls go on whose socket was removed: ranks are attached for days."""

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.so_reuseport", 0),
    # With these probes, gRPC mistakes a client that sends faster than it is served for a link with a large
    # bandwidth-delay product and reads ahead, nominally up to 16 MiB per stream (measured: 37). Without them it reads
    # the requested message and 64 KiB.
    ("grpc.http2.bdp_probe", 0),
]


_caused = log.limited("rpc")
"""For lines that clients cause."""
_GRPC_LOG = logging.getLogger("grpc._cython.cygrpc")


class ClientsGone(logging.Filter):
    """Replaces the stack trace in gRPC's log for a client that disconnects before its reply, or sends what does not
    parse to a service of gRPC's own, by a counted refusal. Of the others it passes one in a second.

    Args:
        refuse: counts a refusal.
    """

    def __init__(self, refuse: Callable[[Refusal], None]) -> None:
        super().__init__()
        self._refuse = refuse
        self._passed: dict[str, float] = {}
        """When each kind of record was passed, by its text without the arguments."""

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
        if record.created - self._passed.get(str(record.msg), 0.0) < log.LIMITED_SECONDS:
            return False
        if len(self._passed) >= MAX_KINDS:
            self._passed.clear()
        self._passed[str(record.msg)] = record.created
        return True


class RpcServer:
    """Serves gRPC on the Unix socket. `start` it before pinning: clients can attach, and are notified when ready.

    Args:
        refuse: counts a refusal.
    """

    def __init__(
        self,
        socket_files: SocketFiles,
        service: Service,
        readiness: DaemonReadiness,
        tasks: TaskSet,
        refuse: Callable[[Refusal], None],
    ) -> None:
        self._socket_files = socket_files
        self._readiness = readiness
        self._tasks = tasks
        self.health = health.aio.HealthServicer()
        self._clients_gone = ClientsGone(refuse)
        self._service = service
        self._server = self._new_server()
        self._former: set[grpc.aio.Server] = set()
        """Those whose socket was removed, until their calls have ended."""

    def _new_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        pb_grpc.add_SidecarServicer_to_server(self._service, TolerantRegistrar(server))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    async def start(self) -> None:
        """Bind and serve. The caller holds the lock of the socket files.

        Raises:
            SocketInUse: the path cannot be bound.
        """
        self._bind(self._server)
        _GRPC_LOG.addFilter(self._clients_gone)
        await self._set_health(self._readiness.now)
        self._readiness.listen(self._readiness_changed)
        await self._server.start()

    async def start_again(self) -> None:
        """The socket was removed: bind another one. A server that has been started takes no other address, so this is
        another server; the former one's calls go on, and its clients make new ones over the new socket.

        Raises:
            SocketInUse: the path cannot be bound.
        """
        server = self._new_server()
        self._bind(server)
        former, self._server = self._server, server
        await server.start()
        self._former.add(former)
        self._tasks.spawn(self._end(former), name="former-rpc-server")

    async def _end(self, former: grpc.aio.Server) -> None:
        await former.stop(LAST_CALL_SECONDS)
        self._former.discard(former)

    def _bind(self, server: grpc.aio.Server) -> None:
        files = self._socket_files
        old = os.umask(0o177)  # no other user may connect between bind and chmod
        try:
            server.add_insecure_port(grpc_address(files.place(files.grpc_path)))
        except RuntimeError as error:
            raise SocketInUse(f"{files.grpc_path} cannot be bound: {error}") from error
        finally:
            os.umask(old)
        files.publish(files.grpc_path)

    async def stop(self, grace: float) -> None:
        """Refuse new calls; running calls may end within ``grace`` seconds."""
        self._socket_files.withdraw(self._socket_files.grpc_path)
        await asyncio.gather(*(server.stop(grace) for server in (self._server, *self._former)))
        _GRPC_LOG.removeFilter(self._clients_gone)

    def _readiness_changed(self, now: Snapshot) -> None:
        self._tasks.spawn(self._set_health(now), name="health")

    async def _set_health(self, now: Snapshot) -> None:
        response = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self.health.set(name, response.SERVING if now.state is State.READY else response.NOT_SERVING)
