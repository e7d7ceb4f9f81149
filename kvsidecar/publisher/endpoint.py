"""One endpoint that routers connect to: bounds what each may ask for, and lets none that does not read delay another.

Nothing waits in memory for one router: each has a place in the sequence, which all share (`Sequence`), and a router
that falls behind what is kept has lost it. Connections are distinguished by address, and on a socket in the file system
by user.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvsidecar.errors import AddressUnavailable, ConfigError
from kvsidecar.publisher import zmtp
from kvsidecar.publisher.metrics import PublisherMetrics, Reason, RouterRefused
from kvsidecar.support import log
from kvsidecar.support import peer as peers
from kvsidecar.support.accepting import accept
from kvsidecar.support.addresses import at

_caused = log.limited("publish")
"""Rate-limited logger for what routers cause."""

MAX_CONNECTIONS = 256
"""Most connections to one endpoint. Beyond it, the address or user with the most loses one."""
MAX_CONNECTIONS_EACH = 64
"""Most connections from one address or user."""
MAX_SUBSCRIPTIONS = 64
"""Most topics that one connection subscribes to."""
MAX_SUBSCRIPTION_BYTES = 4096
"""Most bytes of the topics that one connection subscribes to."""
GREETING_SECONDS = 10.0
"""Time limit of the handshake."""
SILENCE_SECONDS = 30.0
"""A router that sends nothing, or reads nothing, for this long is disconnected."""
READ_BYTES = 4096

_EACH = Reason.CONNECTIONS, f"one address or user has more than {MAX_CONNECTIONS_EACH} connections"
_FULL = Reason.FULL, f"there are more than {MAX_CONNECTIONS} connections: whoever has most loses one"


class RouterConnection:
    """The accepted connection of one router."""

    def __init__(self, sock: socket.socket, who: object) -> None:
        self.sock, self.who = sock, who
        self.reader = zmtp.ZmtpReader()
        self.subscriptions: Counter[bytes] = Counter()
        self._subscription_bytes = 0
        self.lock = asyncio.Lock()
        """Held while a message is sent, so that a heartbeat is not sent within it."""
        self.task: asyncio.Task[None] | None = None

    def subscribe(self, topic: bytes) -> None:
        """Raises RouterRefused: it has too many."""
        if topic in self.subscriptions:
            self.subscriptions[topic] = min(self.subscriptions[topic] + 1, 1 << 30)
            return
        self._subscription_bytes += len(topic)
        if len(self.subscriptions) >= MAX_SUBSCRIPTIONS or self._subscription_bytes > MAX_SUBSCRIPTION_BYTES:
            raise RouterRefused(
                Reason.SUBSCRIPTIONS,
                f"more than {MAX_SUBSCRIPTIONS} subscriptions or {MAX_SUBSCRIPTION_BYTES} bytes of them",
            )
        self.subscriptions[topic] = 1

    def unsubscribe(self, topic: bytes) -> None:
        if topic in self.subscriptions:
            self.subscriptions[topic] -= 1
            if not self.subscriptions[topic]:
                del self.subscriptions[topic]
                self._subscription_bytes -= len(topic)

    def wants(self, topic: bytes) -> bool:
        return any(topic.startswith(each) for each in self.subscriptions)

    async def send(self, pieces: list[bytes], seconds: float) -> None:
        """
        Raises:
            RouterRefused: the router does not read.
            OSError: the router has disconnected.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds), self.lock:
                for each in pieces:
                    await loop.sock_sendall(self.sock, each)
        except TimeoutError:
            raise RouterRefused(Reason.UNREAD, f"it has not taken a message within {seconds:g} s") from None
        await asyncio.sleep(0)  # `sock_sendall` does not wait while there is room: others have their turn here


Handler = Callable[[RouterConnection], Awaitable[None]]
"""Serves one connection after its handshake, and returns when it is over."""


class Endpoint:
    """Bound in the constructor; `run` serves, until it is cancelled; then `close`.

    Args:
        option: the command-line option that sets it, for messages.
        socket_type: the type of ZeroMQ socket that routers see.

    Raises:
        AddressUnavailable: the address is in use or does not exist here.
        ConfigError: the address is invalid.
    """

    def __init__(
        self, option: str, endpoint: str, socket_type: bytes, handler: Handler, metrics: PublisherMetrics
    ) -> None:
        self._option, self._socket_type, self._handler, self._metrics = option, socket_type, handler, metrics
        self._connections: dict[RouterConnection, None] = {}
        self._path: str | None = None
        try:
            self._sock = self._listen(endpoint)
        except OSError as error:
            text = f"--{option} {endpoint}: {error.strerror or error}"
            if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise AddressUnavailable(text) from error
            raise ConfigError(text) from error
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"--{option} {endpoint}: {error}") from error
        self._sock.setblocking(False)
        metrics.read_connections_from(option, self.__len__)

    def _listen(self, endpoint: str) -> socket.socket:
        scheme, _, rest = endpoint.partition("://")
        if scheme == "ipc":
            sock = socket.socket(socket.AF_UNIX)
            address: object = "\0" + rest[1:] if rest.startswith("@") else rest
            with suppress(FileNotFoundError):  # of a publisher that was killed
                if not rest.startswith("@") and stat.S_ISSOCK(os.stat(rest).st_mode):
                    Path(rest).unlink()
        else:
            host, found, port = rest.rpartition(":")
            if not found or not host or not (port.isdigit() or port == "*"):
                raise ValueError("it is not tcp://ADDRESS:PORT")
            host = "0.0.0.0" if host == "*" else host.strip("[]")
            number = 0 if port == "*" else int(port)
            family, kind, _, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)  # type: ignore[arg-type]
            sock.listen(128)
        except BaseException:
            sock.close()
            raise
        if scheme == "ipc" and not rest.startswith("@"):
            self._path, self._inode = rest, os.stat(rest).st_ino
        return sock

    @property
    def address(self) -> str:
        """The address at which it is bound."""
        if self._sock.family == socket.AF_UNIX:
            return f"ipc://{self._path}" if self._path else f"ipc://@{self._sock.getsockname()[1:].decode()}"
        host, port = self._sock.getsockname()[:2]
        return f"tcp://{at(host, port)}"

    def __len__(self) -> int:
        return len(self._connections)

    async def run(self) -> None:
        try:
            while True:
                sock, address = await accept(self._sock, _caused)
                try:
                    self._admit(sock, address)
                except OSError:  # it has gone
                    sock.close()
        finally:
            tasks = [each.task for each in self._connections if each.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _admit(self, sock: socket.socket, address: object) -> None:
        if sock.family == socket.AF_UNIX:
            who: object = peers.credentials(sock).uid
        else:
            who = address[0]  # type: ignore[index]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = RouterConnection(sock, who)
        counts = Counter(each.who for each in self._connections)
        counts[who] += 1
        most = max(counts, key=counts.__getitem__)
        full = len(self._connections) >= MAX_CONNECTIONS
        if counts[who] > MAX_CONNECTIONS_EACH or (full and counts[who] >= counts[most]):
            sock.close()
            self.refuse(*_EACH if counts[who] > MAX_CONNECTIONS_EACH else _FULL)
            return
        if full:
            oldest = next(each for each in self._connections if each.who == most)
            del self._connections[oldest]
            if oldest.task is not None:
                oldest.task.cancel()
            self.refuse(*_FULL)
        self._connections[connection] = None
        connection.task = asyncio.get_running_loop().create_task(self._serve(connection))

    def refuse(self, reason: Reason, text: str) -> None:
        """Count it, and log it, each reason at most once a second."""
        self._metrics.refuse(self._option, reason)
        _caused.warning(f"router refused: {reason.value}", endpoint=self._option, error=text)

    async def _serve(self, connection: RouterConnection) -> None:
        try:
            await connection.send([zmtp.GREETING, zmtp.ready(self._socket_type)], GREETING_SECONDS)
            await self._handler(connection)
        except RouterRefused as error:
            self.refuse(error.reason, str(error))
        except OSError:  # it has gone
            pass
        except Exception as error:  # noqa: BLE001 - it costs this router its connection
            self.refuse(Reason.FAILED, repr(error))
        finally:
            self._connections.pop(connection, None)
            connection.sock.close()

    def close(self) -> None:
        """May be called more than once."""
        self._sock.close()
        if self._path is not None:
            with suppress(OSError):
                if os.stat(self._path).st_ino == self._inode:  # else another publisher's
                    Path(self._path).unlink()
            self._path = None


async def frames(connection: RouterConnection, on_frame: Callable[[zmtp.Frame], None]) -> None:
    """Read frames until the router disconnects. Answers its heartbeats, and sends some if its version supports them.

    Raises:
        RouterRefused: see `zmtp.ZmtpReader`; or the router is silent.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    is_ready, quiet = False, 0
    while True:
        try:
            seconds = SILENCE_SECONDS / 3 if is_ready else max(0.0, begun + GREETING_SECONDS - loop.time())
            async with asyncio.timeout(seconds):
                data = await loop.sock_recv(connection.sock, READ_BYTES)
        except TimeoutError:
            if not is_ready or quiet == 2:
                text = "answers no heartbeat" if is_ready else "does not complete its handshake"
                raise RouterRefused(Reason.SILENT, f"it {text}") from None
            # Otherwise its version has no heartbeats, or a message is still being sent to it.
            if connection.reader.minor and not connection.lock.locked():
                quiet += 1
                await connection.send([zmtp.command(b"PING", b"\0\0")], SILENCE_SECONDS)
            continue
        if not data:
            return
        quiet = 0
        for frame in connection.reader.feed(data):
            name, rest = zmtp.split_command(frame.body) if frame.is_command else (b"", b"")
            if name == b"READY":
                is_ready = True
            elif name == b"PING":
                await connection.send([zmtp.command(b"PONG", rest[2:18])], SILENCE_SECONDS)
            elif name == b"ERROR":
                return
            elif is_ready and name != b"PONG":
                on_frame(frame)
        await asyncio.sleep(0)


async def both(reading: Coroutine[Any, Any, None], writing: Coroutine[Any, Any, None]) -> None:
    """Run both until one ends, and cancel the other. Raises what the first one raised."""
    tasks = [asyncio.ensure_future(reading), asyncio.ensure_future(writing)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for each in done:
        each.result()
