"""The gRPC server on the Unix socket: the service, health and reflection."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvsidecar.core.readiness import DaemonReadiness, Snapshot
from kvsidecar.errors import Refusal, SocketInUse
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
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
"""The most unfinished calls of all clients together; gRPC itself answers more of them with RESOURCE_EXHAUSTED,
uncounted. The lasting calls of one user are counted where they are served."""

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.so_reuseport", 0),
    # With its probes gRPC takes a client that sends faster than it is served for a link of great bandwidth and delay,
    # and reads ahead for it, up to 16 MiB for each stream and more (measured: 37). Without them it reads the message
    # that is asked for, and 64 KiB.
    ("grpc.http2.bdp_probe", 0),
]


_log = log.get("rpc")
_GRPC_LOG = logging.getLogger("grpc._cython.cygrpc")


class ClientsGone(logging.Filter):
    """Removes from gRPC's log the stack traces of clients that disconnect while they are being answered.

    Args:
        refuse: counts a refusal.
    """

    def __init__(self, refuse: Callable[[Refusal], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        if kind is None or not issubclass(kind, grpc.aio.InternalError):
            return True
        self._refuse(Refusal.CLIENT_GONE)
        _log.debug("a client went before its answer", call=record.getMessage())
        return False


class RpcServer:
    """Serves one socket_files. Call ``start`` before pinning: clients attach at once and are notified when ready.

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
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        pb_grpc.add_SidecarServicer_to_server(service, TolerantRegistrar(self._server))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Bind and serve. The socket_files's lock is held.

        Raises:
            SocketInUse: the path cannot be bound.
        """
        old = os.umask(0o177)  # nobody else may connect between bind and chmod
        try:
            self._server.add_insecure_port(f"unix:{self._socket_files.grpc_path}")
        except RuntimeError as error:
            raise SocketInUse(f"{self._socket_files.grpc_path} cannot be bound: {error}") from error
        finally:
            os.umask(old)
        _GRPC_LOG.addFilter(self._clients_gone)
        await self._set_health(self._readiness.now)
        self._readiness.listen(self._readiness_changed)
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """No new RPCs; those running may end within ``grace`` seconds."""
        await self._server.stop(grace)
        _GRPC_LOG.removeFilter(self._clients_gone)

    def _readiness_changed(self, now: Snapshot) -> None:
        self._tasks.spawn(self._set_health(now), name="health")

    async def _set_health(self, now: Snapshot) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING if now.state is State.READY else (
            health_pb2.HealthCheckResponse.NOT_SERVING
        )  # fmt: skip
        for name in ("", SERVICE_NAME):
            await self.health.set(name, serving)
