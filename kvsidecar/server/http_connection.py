"""Connections to the HTTP port, with limits on their number and on waiting for a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvsidecar.errors import Refusal
from kvsidecar.server.aiohttp_server import HttpProcessingError, web
from kvsidecar.support import log

MAX_CONNECTIONS = 128
"""Limit for all clients together, since TCP does not identify them. One more closes the connection that has waited
longest for its client, so that clients which hold connections cannot lock out probes."""
CLIENT_SECONDS = 10.0
"""Time limit for a client to send a whole request, from its connection or the request's first byte, and to read a
response that does not fit the socket's buffer."""
IDLE_SECONDS = 75.0
"""Keep-alive time: a scrape once a minute keeps its connection."""

_log = log.get("http")
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Connections:
    """The open connections of one server.

    Args:
        refuse: counts a refusal.
    """

    def __init__(self, refuse: Callable[[Refusal], None]) -> None:
        self.refuse = refuse
        self._open: dict[HttpConnection, None] = {}
        """In the order in which they connected or last sent a whole request."""

    def add(self, connection: HttpConnection) -> None:
        """Add a connection; closes another one if there are too many."""
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            self.remove(oldest)
            oldest.end(Refusal.LIMIT, f"{MAX_CONNECTIONS} connections are open, and this one has waited longest")
        self._open[connection] = None

    def used(self, connection: HttpConnection) -> None:
        """Record that the connection has sent a whole request."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def remove(self, connection: HttpConnection) -> None:
        self._open.pop(connection, None)


class HttpConnection(web.RequestHandler):
    """aiohttp's connection with time limits, and without stack traces of client errors."""

    __slots__ = ("_connections", "_reading", "_writing")

    def __init__(self, server: web.Server, connections: Connections) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=IDLE_SECONDS, access_log=None)  # type: ignore[arg-type]
        self._connections = connections
        self._reading: asyncio.TimerHandle | None = None
        """Runs while a request is incomplete."""
        self._writing: asyncio.TimerHandle | None = None
        """Runs while the client does not read the response."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._expect_request()
        self._connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        self._reading = self._writing = None
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._expect_request()
        super().data_received(data)

    def request_arrived(self) -> None:
        """Stop the timer of a request that is complete."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._connections.used(self)

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
        """Close the connection and count the reason."""
        _log.debug("connection closed", reason=text)
        self._connections.refuse(reason)
        transport = self.transport
        self.force_close()
        if isinstance(transport, asyncio.Transport):
            transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, HttpProcessingError):
            self._connections.refuse(Refusal.INVALID_REQUEST)
            _log.debug("request refused", status=status, reason=exc.message)
        return super().handle_error(request, status, exc, message)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        if not isinstance(kw.get("exc_info"), HttpProcessingError):  # already logged
            super().log_exception(*args, **kw)

    def _expect_request(self) -> None:
        if self._reading is None:
            self._reading = self._loop.call_later(CLIENT_SECONDS, self._late)

    def _late(self) -> None:
        self._reading = None
        if self.transport is not None:
            self.transport.write(_TOO_LATE)
        self.end(Refusal.UNFINISHED, f"no request was complete within {CLIENT_SECONDS:g} s")


@web.middleware
async def note_arrival(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Tell the connection that a request is complete."""
    if isinstance(request.protocol, HttpConnection):
        request.protocol.request_arrived()
    response: web.StreamResponse = await handler(request)
    return response
