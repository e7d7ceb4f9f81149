"""gRPC over TCP with mTLS, for other hosts: only lookups, Status, Clear, Pin, Unpin, Drain, CancelDrain and
health.

Attach needs the same host: CUDA IPC and memfds do, and so does the attach socket, which identifies clients and detects
their death. Lookups take no leases, because a lease could not be ended with its client.
"""

from __future__ import annotations

import errno
from collections.abc import Hashable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from kvsidecar.core.access import Caller, Identity
from kvsidecar.errors import NotPermitted
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.server.decoding import TolerantRegistrar
from kvsidecar.server.handler import Handler
from kvsidecar.server.service import Context, Service
from kvsidecar.server.tls import Certificates
from kvsidecar.support.addresses import bind_error, cannot_listen
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc

MAX_CALLS = 256
"""Limit of unfinished calls of all remote clients. gRPC answers further calls with RESOURCE_EXHAUSTED."""

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8192),
    # Of a connection; further calls wait in their client. No gate stands here, and 2 MiB of headers are kept for each.
    ("grpc.max_concurrent_streams", 16),
    ("grpc.http2.bdp_probe", 0),  # as for the Unix socket
    ("grpc.so_reuseport", 0),
    # Detect peers that are gone: they hold a descriptor.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # Longest use of a certificate that has expired or whose CA was replaced.
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 30_000),
]


def names_of(properties: Any) -> tuple[str, ...]:
    """The names in a client's certificate: its subject alternative names, or else the common name (RFC 6125).

    Args:
        properties: gRPC's auth context.
    """
    found = properties.get("x509_subject_alternative_name") or properties.get("x509_common_name") or ()
    return tuple(name.decode(errors="replace") for name in found)


def _refused(text: str) -> Any:
    async def call(self: RemoteService, _request: Any, context: Context) -> Any:
        await self._refuse(context, NotPermitted(text))

    return call


class RemoteService(Service):
    """`Service` for other hosts: a certificate identifies the caller. Calls that need the same host are refused."""

    Release = Renew = _refused("over TCP there are no leases")
    Attach = _refused("a rank must attach over the Unix socket of its own host: memory cannot be shared between hosts")

    def _caller(self, request: Any, context: Context, *, for_admins: bool = False) -> Caller:
        if isinstance(request, pb.LookupRequest) and (request.lease_ms or request.token):
            raise NotPermitted(
                "leases are not available over TCP, because nothing would end them with their client; use lease_ms 0"
            )
        names = names_of(context.auth_context())
        if not names:
            raise NotPermitted("the certificate has neither a subject alternative name nor a common name")
        who = Identity(certificate=names)
        return Caller(who, self._handler.access.grant(who))

    def _user(self, request: pb.LookupRequest, context: Context) -> Hashable:
        return names_of(context.auth_context())


class RemoteServer:
    """Serves ``address`` (host:port) with these certificates."""

    def __init__(
        self, address: str, certificates: Certificates, handler: Handler, health_of: health.aio.HealthServicer
    ) -> None:
        self._address = address
        self._certificates = certificates
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        pb_grpc.add_SidecarServicer_to_server(RemoteService(handler), TolerantRegistrar(self._server))
        health_pb2_grpc.add_HealthServicer_to_server(health_of, self._server)

    async def start(self) -> int:
        """Bind and serve. Returns the port, chosen by the system if it was 0.

        Raises:
            AddressUnavailable: the address cannot be bound at present.
            ConfigError: the address can never be bound.
        """
        try:
            port = self._server.add_secure_port(self._address, self._certificates.credentials())
        except RuntimeError as error:
            host, _, number = self._address.rpartition(":")
            # gRPC gives no reason. If a bind succeeds here, the reason has passed.
            why = bind_error(host.strip("[]"), int(number)) or OSError(errno.EADDRINUSE, "")
            raise cannot_listen("gRPC", self._address, "tcp_listen", why) from error
        await self._server.start()
        return port

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)
