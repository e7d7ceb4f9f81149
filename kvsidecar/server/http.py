"""The HTTP server for /health, /ready, /metrics, /status, and a page to look at.

It answers before the rest of the daemon is imported, so this module imports little of it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.errors import Refusal
from kvsidecar.server.aiohttp_server import web
from kvsidecar.server.http_connection import CLIENT_SECONDS, HttpConnection
from kvsidecar.server.http_server import HttpServer
from kvsidecar.server.renderings import CROWD_SECONDS, Rendering, Steps
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.tasks import TaskSet

if TYPE_CHECKING:
    from kvsidecar.core.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the responses come from."""

    metrics: Metrics
    stuck: Callable[[], str | None]
    """Why the process is stuck, or None. Never because of a slow pin or an engine's fault: a restart loses the whole
    cache."""
    status: Callable[[], Steps]
    """The JSON of /status."""
    tiers: Callable[[], Mapping[str, str]]
    """Why each slower tier is off, by its name; empty while it is on."""


PAGE = Path(__file__).with_name("page")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
SHARED = f"max-age={CROWD_SECONDS:.0f}"
"""``Cache-Control`` with which the page asks for /status: however many people look at it, it is rendered once a
second."""
PIECE_BYTES = 64 * 1024
"""A longer response is sent in pieces of this size, so that no more is kept for a client that does not read."""


class Probes:
    """An HTTP server on the daemon's own event loop, so that /health hangs if the loop does."""

    def __init__(
        self,
        readiness: DaemonReadiness,
        tasks: TaskSet,
        *,
        page: bool = False,
        loop_time: LoopTime | None = None,
    ) -> None:
        self._time = LoopTime() if loop_time is None else loop_time
        self._readiness = readiness
        self._sources: Sources | None = None
        """None until the daemon is built."""
        self._metrics: Rendering | None = None
        self._status: Rendering | None = None
        self._tasks = tasks
        self._refused: Counter[Refusal] = Counter()
        """Refusals before there were metrics to count them."""
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/ready", self._ready)
        application.router.add_get("/metrics", self._scrape)
        application.router.add_get("/status", self._show_status)
        if page:
            for path, name, kind in (
                ("/", "index.html", "text/html"),
                ("/page.css", "page.css", "text/css"),
                ("/page.js", "page.js", "text/javascript"),
            ):
                application.router.add_get(path, _file(name, kind))
        self._server = HttpServer(application, self._refuse, tasks)

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port, chosen by the system if ``port`` is 0.

        Raises:
            AddressUnavailable, ConfigError: the address cannot be bound, now or ever.
        """
        return await self._server.start(host, port, "--http-host and --http-port")

    def answer_from(self, sources: Sources) -> None:
        """Answer from these sources from now on."""
        self._sources = sources
        self._metrics = Rendering(sources.metrics.rendering, self._tasks, self._time)
        self._status = Rendering(sources.status, self._tasks, self._time)
        for reason, count in self._refused.items():
            sources.metrics.refuse(reason, count)
        self._refused.clear()

    async def stop(self) -> None:
        await self._server.stop()

    async def _health(self, _request: web.Request) -> web.Response:
        stuck = None if self._sources is None else self._sources.stuck()
        return _json({"alive": stuck is None, "reason": stuck or ""}, 200 if stuck is None else 503)

    async def _ready(self, _request: web.Request) -> web.Response:
        now, found = self._readiness.now, self._readiness.warm_start
        body: dict[str, Any] = {
            "ready": self._readiness.ready,
            "state": now.state.value,
            "pool_bytes": now.pool_bytes,
            "pinned_bytes": now.pinned_bytes,
            "pin_bytes_per_second": round(now.pin_bytes_per_second),
            "eta_seconds": None if now.eta_seconds is None else round(now.eta_seconds, 3),
            "reason": now.reason,
            "serves_kept": now.serves_kept,
            "carrier": found.carrier,
            "cold_start_reason": found.cold_reason,
            "kept_blocks": found.kept_blocks,
            "dropped_blocks": found.dropped_blocks,
        }
        if self._sources is not None and (tiers := self._sources.tiers()):
            body["tiers"] = {name: f"off: {off}" if off else "on" for name, off in tiers.items()}
        return _json(body, 200 if self._readiness.ready else 503)

    async def _scrape(self, request: web.Request) -> web.StreamResponse:
        if self._sources is None or self._metrics is None:
            return web.Response(text=self._readiness.now.reason + "\n", status=503)
        return await _answer(request, await self._metrics.text(), self._sources.metrics.content_type)

    async def _show_status(self, request: web.Request) -> web.StreamResponse:
        if self._status is None:
            return _json({"reason": self._readiness.now.reason}, 503)
        shared = request.headers.get("Cache-Control") == SHARED
        return await _answer(request, await self._status.text(shared=shared), "application/json; charset=utf-8")

    def _refuse(self, reason: Refusal) -> None:
        if self._sources is None:
            self._refused[reason] += 1
        else:
            self._sources.metrics.refuse(reason)


def _file(name: str, kind: str) -> Callable[[web.Request], Coroutine[Any, Any, web.Response]]:
    """Answers with a file of the page, as it is now: a later one may be of another version."""
    text = (PAGE / name).read_text()

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text=text, content_type=kind, headers=PAGE_HEADERS)

    return answer


async def _answer(request: web.Request, text: bytes, kind: str) -> web.StreamResponse:
    """Answers with a text that others are answered with too."""
    headers = {"Content-Type": kind}
    if len(text) <= PIECE_BYTES:
        return web.Response(body=text, headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_length = len(text)
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    try:
        # For all of it: a slow reader keeps the text, and there is another one each second.
        async with asyncio.timeout(CLIENT_SECONDS):
            for start in range(0, len(text), PIECE_BYTES):
                await response.write(text[start : start + PIECE_BYTES])
                await asyncio.sleep(0)
    except TimeoutError:
        assert isinstance(request.protocol, HttpConnection)
        request.protocol.end(Refusal.UNFINISHED, f"a response was not read within {CLIENT_SECONDS:g} s")
    return response


def _json(body: dict[str, Any], status: int) -> web.Response:
    return web.Response(text=json.dumps(body) + "\n", status=status, content_type="application/json")
