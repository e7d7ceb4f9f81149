"""Connections to the HTTP port, with limits on their number and on waiting for a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from kvsidecar.errors import Refusal
from kvsidecar.server.aiohttp_server import HttpProcessingError, web
from kvsidecar.server.tcp_turns import TcpTurns
from kvsidecar.support import log
from kvsidecar.support.addresses import is_meant

MAX_CONNECTIONS = 128
"""Limit for all clients together, since TCP does not identify them. One more closes the connection that has waited
longest for its client, so that clients which hold connections cannot lock out probes."""
CLIENT_SECONDS = 10.0
"""Time limit for a client to send a whole request, from its connection or the request's first byte, and to read what
does not fit the socket's buffer, whether or not the connection is to be closed behind it."""
IDLE_SECONDS = 75.0
"""Keep-alive time: a scrape once a minute keeps its connection."""

NOSNIFF = {"X-Content-Type-Options": "nosniff"}
"""Headers of every response: no browser may take a client's text in it for something that it runs."""

_caused = log.limited("http")
_TOO_LATE = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
)


class Connections:
    """The open connections of one server."""

    def __init__(self, refuse: Callable[[Refusal], None], turns: TcpTurns) -> None:
        self.refuse = refuse
        self.turns = turns
        self._open: dict[HttpConnection, None] = {}
        """Connections with a descriptor, in the order in which they connected or last sent a whole request."""

    def add(self, connection: HttpConnection) -> None:
        """Add a connection; ends another one if there are too many."""
        if len(self._open) >= MAX_CONNECTIONS:
            # Who waits for its turn does not wait for its client.
            oldest = next((each for each in self._open if not (each.waits or each.ended)), next(iter(self._open)))
            oldest.end(Refusal.LIMIT, f"{MAX_CONNECTIONS} connections are open, and this one has waited longest")
        self._open[connection] = None

    def used(self, connection: HttpConnection) -> None:
        """Record that the connection has sent a whole request."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def remove(self, connection: HttpConnection) -> None:
        """Remove a closed connection."""
        self._open.pop(connection, None)


class HttpConnection(web.RequestHandler):
    """aiohttp's connection with time limits, in turns with others, and without stack traces of client errors."""

    __slots__ = ("_carrier", "_connections", "_paid", "_reading", "_unread", "_writing", "ended", "waits")

    def __init__(self, server: web.Server, connections: Connections) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=IDLE_SECONDS,
            access_log=None,  # type: ignore[arg-type]
            # No request has a body here: none is waited for, none decompressed.
            lingering_time=0,
            auto_decompress=False,
        )
        self._connections = connections
        self._carrier: asyncio.Transport
        """The transport, also when aiohttp has closed and forgotten it: it waits for the client to read."""
        self.ended = False
        """It was aborted, and is closed in the next iteration of the event loop."""
        self._unread: list[bytes] = []
        """What was received and waits for its turn. Nothing more is read meanwhile."""
        self.waits = False
        """It waits for a turn."""
        self._paid = False
        """The next request has had its turn with its bytes."""
        self._reading: asyncio.TimerHandle | None = None
        """Runs while a request is incomplete."""
        self._writing: asyncio.TimerHandle | None = None
        """Runs while something that was sent has no room in the socket's buffer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._carrier = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._carrier.set_write_buffer_limits(high=0)
        self._expect_request()
        self._connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        self._reading = self._writing = None
        self._unread.clear()
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not data:  # aiohttp's own, for what it has already
            super().data_received(data)
            return
        assert self.transport is not None
        self._expect_request()
        self._unread.append(data)
        self.transport.pause_reading()
        if len(self._unread) == 1:
            self.waits = True
            self._connections.turns.take(self._read)

    def _read(self) -> None:
        """Take what was received, in its turn."""
        data = b"".join(self._unread)
        self._unread.clear()
        self.waits = False
        if self.transport is None:
            return
        self._paid = True
        self.transport.resume_reading()  # before aiohttp, which may pause it again
        super().data_received(data)

    async def request_arrived(self) -> None:
        """A request is complete: stop its timer, and wait for its turn."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if not self._paid:
            self.waits = True
            await self._connections.turns.wait()
            self.waits = False
        self._paid = False
        self._connections.used(self)

    def refused(self, status: int, text: str) -> None:
        """Count a request that was refused."""
        self._connections.refuse(Refusal.INVALID_REQUEST)
        _caused.debug("request refused", status=status, reason=text)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            text = f"a response was not read within {CLIENT_SECONDS:g} s"
            self._writing = self._loop.call_later(CLIENT_SECONDS, self.end, Refusal.UNFINISHED, text)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def end(self, reason: Refusal, text: str) -> None:
        """Abort the connection, which has not ended yet or ends for two reasons at once, and count the reason."""
        if self.ended:
            return
        self.ended = True
        _caused.debug("connection closed", reason=text)
        self._connections.refuse(reason)
        self.force_close()
        self._carrier.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, HttpProcessingError):
            self.refused(status, exc.message)
        response = super().handle_error(request, status, exc, message)
        response.headers.update(NOSNIFF)
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        if not isinstance(error := kw.get("exc_info"), HttpProcessingError):  # already logged
            _caused.error("a request failed unexpectedly", what=str(args[0]), error=str(error), exc_info=error)

    def _expect_request(self) -> None:
        if self._reading is None:
            self._reading = self._loop.call_later(CLIENT_SECONDS, self._late)

    def _late(self) -> None:
        self._reading = None
        if self.transport is not None:
            self.transport.write(_TOO_LATE)
        self.end(Refusal.UNFINISHED, f"no request was complete within {CLIENT_SECONDS:g} s")


@web.middleware
async def take_turn(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Tell the connection that a request is complete, and answer in its turn."""
    connection = request.protocol
    assert isinstance(connection, HttpConnection)
    await connection.request_arrived()
    address = None if connection.transport is None else connection.transport.get_extra_info("sockname")
    if address and not is_meant(request.headers.get("Host"), address[0]):
        return web.Response(status=421, text="this is not the host that the request names\n")
    if request.body_exists:
        response: web.StreamResponse = web.Response(status=400, text="requests here have no body\n")
        response.force_close()
        return response
    response = await handler(request)
    return response  # noqa: RET504 - the handler has no type of its own


async def before_response(request: web.Request, response: web.StreamResponse) -> None:
    """Called for each response before its head is sent: counts those that refuse."""
    response.headers.update(NOSNIFF)
    connection = request.protocol
    if 400 <= response.status < 500 and isinstance(connection, HttpConnection):
        connection.refused(response.status, response.reason or "")
