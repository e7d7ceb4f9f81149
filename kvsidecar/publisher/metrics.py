"""Prometheus metrics of ``kvsidecar publish``, and the reasons for which it refuses routers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import StrEnum
from functools import partial
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvsidecar.core.metric_families import lost_log_lines
from kvsidecar.errors import InvalidRequest, Refusal

ENDPOINTS: Final = ("bind", "replay")
"""The values of the label ``endpoint``: the options that set them."""


GAUGES: Final = {
    "followed_namespaces": "Namespaces whose blocks are announced to routers.",
    "left_out_namespaces": "Namespaces that are not followed because there are too many.",
    "announced_blocks": "Blocks that are announced to routers, or will be.",
    "kept_bytes": "Bytes of the messages that are kept for replays.",
    "known_bytes": "Bytes taken by the blocks whose tokens are remembered.",
}
"""Help texts of the gauges that are read at a scrape, by name without ``kvsidecar_publisher_``."""


class Reason(StrEnum):
    """Why a router is refused, or a part of what it asks for."""

    PROTOCOL = "protocol"
    """A router does not speak unencrypted ZMTP 3."""
    FRAME = "frame"
    """A frame is too long."""
    SUBSCRIPTIONS = "subscriptions"
    """A connection has too many subscriptions, or too many bytes of them."""
    REPLAYS = "replays"
    """A connection asks for too many replays at once."""
    NO_REQUEST = "no_request"
    """A message to the replay endpoint is not a request. It is ignored."""
    CONNECTIONS = "connections"
    """One address or user has too many connections."""
    FULL = "full"
    """The endpoint has too many connections: the address or user with the most loses one."""
    UNREAD = "unread"
    """A router does not read what it is sent."""
    SILENT = "silent"
    """A router does not complete its handshake, or does not answer heartbeats."""
    FAILED = "failed"
    """An unexpected error, which is in the log."""


class RouterRefused(InvalidRequest):
    """The router is disconnected, and the reason counted."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class PublisherMetrics:
    """All metrics of one publisher, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        self._refusals = counter(
            "kvsidecar_publisher_refusals",
            "Refusals to routers, by endpoint (the option that sets it) and reason.",
            ["endpoint", "reason"],
        )
        self._http_refusals = counter(
            "kvsidecar_publisher_http_refusals",
            "HTTP requests and connections that were refused or not completed in time, by reason.",
            ["reason"],
        )
        self.messages = counter("kvsidecar_publisher_messages", "Messages published, with or without subscribers.")
        self.replays = counter(
            "kvsidecar_publisher_replays",
            "Replays that routers requested, by whether the messages were still kept. If not, everything is announced "
            "again.",
            ["result"],
        )
        self.repeats = counter("kvsidecar_publisher_repeats", "Times that everything was announced again.")
        for endpoint, reason in product(ENDPOINTS, Reason):
            self._refusals.labels(endpoint, reason.value)
        for refusal in (Refusal.INVALID_REQUEST, Refusal.LIMIT, Refusal.UNFINISHED):
            self._http_refusals.labels(refusal.value)
        for result in ("kept", "lost"):
            self.replays.labels(result)
        self.registry.register(_LogLines())
        self._connections = Gauge(
            "kvsidecar_publisher_connections", "Routers' connections.", ["endpoint"], registry=self.registry
        )
        for endpoint in ENDPOINTS:
            self._connections.labels(endpoint)
        self._gauges = {
            name: Gauge(f"kvsidecar_publisher_{name}", text, registry=self.registry) for name, text in GAUGES.items()
        }

    def refuse(self, endpoint: str, reason: Reason) -> None:
        self._refusals.labels(endpoint, reason.value).inc()

    def refuse_http(self, reason: Refusal) -> None:
        self._http_refusals.labels(reason.value).inc()

    def read_connections_from(self, endpoint: str, count: Callable[[], float]) -> None:
        """Call ``count`` at every scrape from now on."""
        self._connections.labels(endpoint).set_function(count)

    def read_gauges_from(self, **values: Callable[[], float]) -> None:
        """Call these at every scrape from now on, by the name in `GAUGES`."""
        for name, value in values.items():
            self._gauges[name].set_function(value)

    def rendering(self) -> Generator[None, None, bytes]:
        """The text exposition format, in one step: there are a few dozen series."""
        yield
        return generate_latest(self.registry)


class _LogLines(Collector):
    def collect(self) -> list[Metric]:
        return [lost_log_lines("publisher_log_lines_lost")]
