"""Serves the publisher's ``/metrics``."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST

from kvsidecar.publisher.metrics import PublisherMetrics
from kvsidecar.server.aiohttp_server import web
from kvsidecar.server.http_server import HttpServer
from kvsidecar.server.renderings import Rendering
from kvsidecar.support import log
from kvsidecar.support.addresses import at
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.tasks import TaskSet

_log = log.get("publish")


class MetricsServer:
    """``start`` and ``stop`` are to be called from the event loop."""

    def __init__(self, metrics: PublisherMetrics) -> None:
        tasks = TaskSet(lambda name, error: _log.error("a task failed", task=name, error=repr(error)))
        self._text = Rendering(metrics.rendering, tasks, LoopTime())
        application = web.Application()
        application.router.add_get("/metrics", self._scrape)
        self._server = HttpServer(application, metrics.refuse_http, tasks)

    async def start(self, address: tuple[str, int]) -> None:
        """Raises AddressUnavailable, ConfigError: the address cannot be bound, now or ever."""
        host, port = address
        port = await self._server.start(host, port, "--metrics")
        _log.info("metrics are served", url=f"http://{at(host, port)}/metrics")

    async def stop(self) -> None:
        await self._server.stop()

    async def _scrape(self, _request: web.Request) -> web.Response:
        return web.Response(body=await self._text.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})
