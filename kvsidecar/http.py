"""The probes: /health, /ready, /metrics, /status on one small TCP port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from kvsidecar.addresses import cannot_listen
from kvsidecar.http_connection import Connections, HttpConnection, note_arrival
from kvsidecar.metrics import Metrics
from kvsidecar.readiness import Readiness


class Probes:
    """An HTTP server on the daemon's own event loop: if the loop hangs, so does /health, which is the point.

    Args:
        stuck: why the process cannot go on, or None if it can. Never because of a slow pin or an engine's fault: a
            restart costs the whole cache.
        status: the JSON of /status.
    """

    def __init__(
        self,
        *,
        readiness: Readiness,
        metrics: Metrics,
        stuck: Callable[[], str | None],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._readiness = readiness
        self._metrics = metrics
        self._stuck = stuck
        self._status = status
        application = web.Application(middlewares=[note_arrival])
        application.router.add_get("/health", self._health)
        application.router.add_get("/ready", self._ready)
        application.router.add_get("/metrics", self._scrape)
        application.router.add_get("/status", self._show_status)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)
        self._connections = Connections(metrics.refuse)
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port, chosen by the system if ``port`` is 0.

        Raises:
            AddressUnavailable, ConfigError: the address cannot be bound, now or ever.
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: HttpConnection(server, self._connections), host, port
            )
        except OSError as error:
            raise cannot_listen("HTTP", f"{host}:{port}", "http_host and http_port", error) from error
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        stuck = self._stuck()
        return _json({"alive": stuck is None, "reason": stuck or ""}, 200 if stuck is None else 503)

    async def _ready(self, _request: web.Request) -> web.Response:
        now = self._readiness.now
        body = {
            "ready": self._readiness.ready,
            "state": now.state.value,
            "pool_bytes": now.pool_bytes,
            "pinned_bytes": now.pinned_bytes,
            "pin_bytes_per_second": round(now.pin_bytes_per_second),
            "eta_seconds": None if now.eta_seconds is None else round(now.eta_seconds, 3),
            "reason": now.reason,
        }
        return _json(body, 200 if self._readiness.ready else 503)

    async def _scrape(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _show_status(self, _request: web.Request) -> web.Response:
        return _json(self._status(), 200)


def _json(body: dict[str, Any], status: int) -> web.Response:
    return web.Response(text=json.dumps(body) + "\n", status=status, content_type="application/json")
