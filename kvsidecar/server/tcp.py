"""gRPC over TCP with mTLS, for other hosts: only lookups, Status, Clear, Pin, Unpin, Drain, CancelDrain and
health.

Attach needs the same host: CUDA IPC and memfds do, and so does the attach socket, which identifies clients and detects
their death. Lookups take no leases, because a lease could not be ended with its client.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from grpc_health.v1 import health

from kvsidecar.core.access import Caller, Identity
from kvsidecar.errors import NotPermitted, UnknownPeer
from kvsidecar.server.grpc_front import GrpcClient, GrpcFront
from kvsidecar.server.grpc_server import InnerServer
from kvsidecar.server.handler import Handler
from kvsidecar.server.service import Context, Service
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.server.tls import Certificates
from kvsidecar.server.tls_front import LIMITS, TlsFront
from kvsidecar.support.addresses import cannot_listen
from kvsidecar.support.turns import Turns
from kvsidecar.v1 import sidecar_pb2 as pb

_OPTIONS = [
    ("grpc.max_concurrent_streams", LIMITS.user.calls),  # a client keeps further calls back
    # Detect peers that are gone: they hold a descriptor.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # Longest use of a certificate that has expired or whose CA was replaced.
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 30_000),
]


def _refused(text: str) -> Any:
    async def call(self: RemoteService, _request: Any, context: Context) -> Any:
        await self._refuse(context, NotPermitted(text))

    return call


class RemoteService(Service):
    """`Service` for other hosts: a certificate identifies the caller. Calls that need the same host are refused.

    Args:
        client_at: see `GrpcFront.client_at`. A client's user is the names in its certificate.
    """

    def __init__(self, handler: Handler, client_at: Callable[[str], GrpcClient | None]) -> None:
        super().__init__(handler)
        self._client_at = client_at

    def _names(self, context: Context) -> tuple[str, ...]:
        if (client := self._client_at(context.peer())) is None:
            raise UnknownPeer("the connection has ended")
        names: tuple[str, ...] = client.user  # type: ignore[assignment]
        return names

    Release = Renew = _refused("over TCP there are no leases")
    Attach = Store = Load = _refused(
        "a rank must attach over the Unix socket of its own host: memory cannot be shared between hosts"
    )

    def _caller(self, request: Any, context: Context, *, for_admins: bool = False) -> Caller:
        if isinstance(request, pb.LookupRequest) and (request.lease_ms or request.token):
            raise NotPermitted(
                "leases are not available over TCP, because they would not end with their client; use lease_ms 0"
            )
        names = self._names(context)
        if not names:
            raise NotPermitted("the certificate has neither a subject alternative name nor a common name")
        who = Identity(certificate=names)
        return Caller(who, self._handler.instances.access.grant(who))

    def _user(self, request: pb.LookupRequest, context: Context) -> Hashable:
        return self._names(context)


class RemoteServer:
    """Serves ``address`` (host:port) with these certificates.

    Args:
        socket_files: where gRPC's own server listens for the front.
    """

    def __init__(
        self,
        address: str,
        certificates: Certificates,
        handler: Handler,
        health_of: health.aio.HealthServicer,
        socket_files: SocketFiles,
        turns: Turns,
    ) -> None:
        self._address = address
        front = GrpcFront(LIMITS, handler.metrics.refuse, handler.tasks, turns)
        self._listener = TlsFront(certificates, front, handler.tasks)
        self._inner = InnerServer(socket_files, front, RemoteService(handler, front.client_at), health_of, _OPTIONS)

    async def start(self) -> int:
        """Bind and serve. Returns the port, chosen by the system if it was 0.

        Raises:
            AddressUnavailable: the address cannot be bound at present.
            ConfigError: the address can never be bound.
            SocketInUse: gRPC's own socket cannot be made.
        """
        await self._inner.start()
        host, _, port = self._address.rpartition(":")
        try:
            return await self._listener.start(host.strip("[]"), int(port))
        except OSError as error:
            raise cannot_listen("gRPC", self._address, "--tcp-listen", error) from error

    async def stop(self, grace: float) -> None:
        """Refuse new calls; running calls may end within ``grace`` seconds."""
        await self._listener.stop_listening()
        await self._inner.stop(grace)
