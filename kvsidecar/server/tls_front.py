"""Accepts on the TCP port: ends TLS, and knows each client by the names in its certificate.

Handshakes run in a thread: anybody who reaches the port can make the daemon sign, which takes up to milliseconds that
the event loop does not have.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from kvsidecar.errors import KVSidecarError, LimitExceeded, Refusal
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.server.grpc_front import CONNECTION_BYTES, Bounds, GrpcClient, GrpcFront, Limits, new_name
from kvsidecar.server.handshakes import MAX_ALL_HANDSHAKES, Handshake, Handshakes
from kvsidecar.server.tcp_listener import SocketOptions, TcpListener
from kvsidecar.server.tcp_turns import TcpTurns
from kvsidecar.server.tls import Certificates
from kvsidecar.server.tls_end import RECORD_BYTES, TlsConnection, TlsEnd
from kvsidecar.support import log
from kvsidecar.support.tasks import TaskSet

MAX_HANDSHAKE_BYTES = 32 * 1024
"""Limit of a client's bytes in a handshake: mostly its certificates, which its connection keeps."""
HANDSHAKE_BYTES = 384 * 1024
"""The most memory of a handshake (measured: 250 KiB, with the largest certificate that passes)."""
TLS_BYTES = 320 * 1024
"""The most memory that TLS adds to a connection: 220 KiB with the largest certificate that passes (measured), and bytes
read and not passed on, sealed and open."""
LIMITS = Limits(
    Bounds(connections=128, calls=256, messages_bytes=8 * MAX_MESSAGE_BYTES),
    Bounds(connections=256, calls=512, messages_bytes=16 * MAX_MESSAGE_BYTES),
    connection_bytes=CONNECTION_BYTES + TLS_BYTES,
)
"""Limits of clients over TCP: of those with the same names in their certificates, and of all together."""
USER_BYTES = LIMITS.user.memory(LIMITS.connection_bytes)  # 168 MiB
"""The most memory that clients with the same names take."""
ALL_BYTES = LIMITS.everyone.memory(LIMITS.connection_bytes) + MAX_ALL_HANDSHAKES * HANDSHAKE_BYTES  # 432 MiB
"""The most memory that gRPC over TCP takes, whatever reaches the port. The kernel's buffers are not included."""
_SOCKET = SocketOptions(receive_bytes=128 * 1024, send_bytes=128 * 1024, both_families=True)
_SHOWN_NAMES, _SHOWN_LENGTH = 4, 200
"""The most of a certificate's names that a line of the log shows."""


_caused = log.limited("rpc")


class TlsFront:
    """Used from the event loop.

    Args:
        front: serves the connections whose handshake is complete, and counts the others.
    """

    def __init__(self, certificates: Certificates, front: GrpcFront, tasks: TaskSet) -> None:
        self._certificates, self._front, self._tasks = certificates, front, tasks
        self._handshakes = Handshakes()
        self._under_way: dict[Handshake, asyncio.Task[bool]] = {}
        self._thread = ThreadPoolExecutor(1, "handshakes")
        self._listener = TcpListener(self._accepted, _SOCKET, TcpTurns(), tasks, _caused)
        self._seconds: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Bind and accept. Returns the port. Raises OSError."""
        port = await self._listener.start(host, port)
        self._seconds = self._tasks.keep(self._each_second, name="handshake-seconds")
        return port

    async def stop_listening(self) -> None:
        """Take no more connections, and give up the handshakes; present connections continue."""
        await self._listener.close()
        if self._seconds is not None:
            self._seconds.cancel()
        for task in tuple(self._under_way.values()):
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _accepted(self, connection: socket.socket, address: Any) -> None:
        handshake, beyond = self._handshakes.begin(address[0])
        if beyond is not None:
            self._give_up(*beyond)
        task = self._tasks.spawn(self._serve(connection, handshake), name="handshake")
        self._under_way[handshake] = task

        def ended(task: asyncio.Task[bool]) -> None:  # one that was cancelled before its first step never runs
            self._forget(handshake)
            if task.cancelled() or task.exception() is not None or not task.result():
                connection.close()

        task.add_done_callback(ended)

    async def _each_second(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for handshake, why in self._handshakes.second():
                self._give_up(handshake, why)

    def _give_up(self, handshake: Handshake, why: KVSidecarError) -> None:
        self._front.refused({"address": handshake.address}, why)
        self._under_way[handshake].cancel()

    def _forget(self, handshake: Handshake) -> None:
        self._handshakes.end(handshake)
        self._under_way.pop(handshake, None)

    async def _serve(self, connection: socket.socket, handshake: Handshake) -> bool:
        """Returns whether the connection has become the front's."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = await self._shake(connection)
        except KVSidecarError as error:
            self._front.refused({"address": handshake.address}, error)
            return False
        except OSError as error:
            self._front.refuse(Refusal.CLIENT_GONE)
            _caused.debug("a TLS handshake was ended by its client", address=handshake.address, error=str(error))
            return False
        if tls is None:
            return False
        self._forget(handshake)
        client = GrpcClient(tls.names, {"certificate": _shown(tls.names)}, new_name())
        self._front.admit(client, partial(TlsEnd, connection, tls))
        return True

    async def _shake(self, connection: socket.socket) -> TlsConnection | None:
        """Returns None if the client has sent nothing, as a probe of the port does.

        Raises:
            KVSidecarError: it is refused, and knows it by TLS.
            OSError: the client has gone.
        """
        loop = asyncio.get_running_loop()
        tls = await loop.run_in_executor(self._thread, lambda: TlsConnection(self._certificates.context()))
        received = 0
        while data := await loop.sock_recv(connection, RECORD_BYTES):
            if received > MAX_HANDSHAKE_BYTES:
                raise LimitExceeded(f"a TLS handshake of more than {MAX_HANDSHAKE_BYTES} bytes")
            received += len(data)
            step = await loop.run_in_executor(self._thread, tls.shake, data)
            await loop.sock_sendall(connection, step.to_send)
            if step.refused is not None:
                raise step.refused
            if step.complete:
                return tls
        if received:
            raise ConnectionResetError("it has closed the connection")
        return None


def _shown(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN_NAMES])[:_SHOWN_LENGTH]
