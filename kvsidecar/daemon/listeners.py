"""All that clients connect to: the gRPC socket, the attach socket beside it, and TCP for other hosts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvsidecar.daemon.lifecycle import Lifecycle
from kvsidecar.daemon.settings import Settings
from kvsidecar.server.arrivals import Arrivals
from kvsidecar.server.attach_socket import AttachSocket
from kvsidecar.server.grpc_server import RpcServer
from kvsidecar.server.handler import Handler
from kvsidecar.server.local_protocol import LocalConnection, unread_replies
from kvsidecar.server.partial_messages import PartialMessages
from kvsidecar.server.socket_watch import SocketWatch

if TYPE_CHECKING:
    from kvsidecar.server.tcp import RemoteServer

GRACE_SECONDS = 0.2
"""A call that is being answered at a stop has this long."""


class Listeners:
    """Started and stopped together. Sockets that somebody removes are made again.

    Args:
        pidfds: returns the copiers' pidfds by process id: each client is sent them when it connects.

    Raises:
        ConfigError: the certificates for TCP cannot be used.
    """

    def __init__(
        self, settings: Settings, handler: Handler, life: Lifecycle, pidfds: Callable[[], dict[int, int]]
    ) -> None:
        files, arrivals = life.endpoint, Arrivals()
        self._attach = AttachSocket(
            files,
            epoch=handler.epoch,
            instances=handler.instances,
            on_gone=handler.peer_gone,
            local_connection=(
                partial(LocalConnection, handler, PartialMessages(), unread_replies())
                if settings.local_protocol
                else None
            ),
            refuse=handler.metrics.refuse,
            tasks=handler.tasks,
            turns=life.turns,
            arrivals=arrivals,
            pidfds=pidfds,
        )
        self._rpc = RpcServer(files, handler, life.turns, arrivals)
        self._watch = SocketWatch(
            files,
            {files.grpc_path: self._rpc.start_again, files.attach_path: self._attach.start},
            handler.readiness,
            handler.tasks,
        )
        self._remote = self._remote_server(settings, handler, life)

    def _remote_server(self, settings: Settings, handler: Handler, life: Lifecycle) -> RemoteServer | None:
        """The server for other hosts; None if TCP is off."""
        if settings.tcp_listen is None:
            return None
        from kvsidecar.server.tcp import RemoteServer
        from kvsidecar.server.tls import Certificates, TlsFiles

        certificates = Certificates(TlsFiles(*settings.tls_files), settings.called)
        return RemoteServer(settings.tcp_listen, certificates, handler, self._rpc.health, life.endpoint, life.turns)

    async def start(self) -> int | None:
        """Returns the TCP port; None if TCP is off.

        Raises:
            AddressUnavailable, ConfigError, SocketInUse: one of them cannot listen.
        """
        await self._rpc.start()
        self._attach.start()
        port = None if self._remote is None else await self._remote.start()
        self._watch.start()
        return port

    async def stop(self) -> None:
        if self._remote is not None:
            await self._remote.stop(GRACE_SECONDS)
        await self._watch.stop()
        await self._rpc.stop(GRACE_SECONDS)
        await self._attach.stop()
