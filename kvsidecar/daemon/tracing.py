"""OpenTelemetry spans of jobs, joined to the engine's traces by the requests' W3C traceparents.

A job becomes a span ``kvsidecar.store`` or ``kvsidecar.load`` with children ``queue``, ``copy`` and, for a store,
``seal``. They are made when the job is over and its answer is on its way, from times that are taken anyway; a thread of
the SDK exports them. Imported only when tracing is on: it needs the extra ``kvsidecar[tracing]``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
    OTEL_TRACES_SAMPLER,
)
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvsidecar import __version__
from kvsidecar.core.job import Job
from kvsidecar.core.metrics import Metrics, SpanFate
from kvsidecar.core.sessions import RankSession
from kvsidecar.errors import ConfigError
from kvsidecar.support import log
from kvsidecar.support.boot import boot_time
from kvsidecar.types import Direction, Outcome

FLUSH_SECONDS: Final = 2.0
"""The most that a collector which does not answer delays the daemon's end."""
MAX_TRACEPARENT_BYTES: Final = 512
"""A longer traceparent is not parsed: the SDK would log a line for each."""
MAX_SPANS: Final = 4
"""The most spans of one job."""
PROTOCOLS: Final = ("http/protobuf", "grpc")

_log = log.get("tracing")
_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Creates and exports the spans of jobs. The standard ``OTEL_*`` variables configure export and sampling; without
    ``OTEL_TRACES_SAMPLER``, only jobs with a sampled traceparent have spans.

    Args:
        metrics: count the spans by result.

    Raises:
        ConfigError: a variable has an invalid value.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._limit = _positive(OTEL_BSP_MAX_QUEUE_SIZE, 2048)
        self._made = 0
        """Spans made so far that are exported."""
        self._exporter = _CountingExporter(_otlp_exporter(), metrics)
        # The environment's own names win.
        resource = Resource({SERVICE_NAME: "kvsidecar", SERVICE_VERSION: __version__})
        resource = Resource.create().merge(resource).merge(OTELResourceDetector().detect())
        self._parents_decide = not os.environ.get(OTEL_TRACES_SAMPLER)
        sampler = ParentBased(ALWAYS_OFF) if self._parents_decide else None  # None: as the variable says
        self._provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        try:
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter, self._limit))
        except ValueError as error:
            raise ConfigError(f"the variables OTEL_BSP_* are inconsistent: {error}") from error
        self._tracer = self._provider.get_tracer("kvsidecar", __version__)

    def record(self, session: RankSession, job: Job) -> None:
        """Make the spans of a job, if it is sampled. In the event loop; never waits."""
        if self._parents_decide and not job.traceparent:
            return  # most jobs, where few requests are traced; the SDK takes 15 us to decide the same
        context = self._context(job.traceparent)
        if self._parents_decide and not get_current_span(context).get_span_context().trace_flags.sampled:
            return
        result = job.result
        assert result is not None, "a job is recorded when it is over"
        wall = time.time_ns() - int(boot_time() * 1e9)

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + wall

        span = self._tracer.start_span(
            f"kvsidecar.{job.direction.value}", context, SpanKind.SERVER, start_time=at(job.taken)
        )
        if not span.is_recording():
            return
        if self._made + MAX_SPANS - self._exporter.taken > self._limit:
            # Dropped here, not in the SDK's queue, which drops the oldest span of some other job and counts nothing.
            self._metrics.spans.labels(SpanFate.QUEUE_FULL.value).inc()
            return
        registration = session.registration
        groups = session.groups
        kinds = {kind for part in job.parts if part.group in groups for kind in groups[part.group].kinds}
        span.set_attributes(
            {
                "kvsidecar.instance": registration.instance,
                "kvsidecar.rank": registration.rank,
                "kvsidecar.device": registration.device,
                "kvsidecar.namespace": str(registration.namespace),
                "kvsidecar.blocks": job.num_blocks,
                "kvsidecar.blocks_copied": result.copied_blocks,
                "kvsidecar.blocks_skipped": result.skipped_blocks,
                "kvsidecar.bytes": result.nbytes,
                "kvsidecar.plan": sorted(kinds),
                "kvsidecar.outcome": result.outcome.value,
            }
        )
        if result.reason is not None:
            span.set_attribute("kvsidecar.reason", result.reason.value)
        if result.outcome is Outcome.FAILED:
            span.set_status(Status(StatusCode.ERROR, result.error))
        phases: list[tuple[str, float, float]] = []
        if result.copy_ended:
            copied = result.copy_ended + boot_time() - time.monotonic()
            began = copied - result.copy_seconds
            # Waits between the copies are shown before them: the spans say how long, not how often.
            phases = [("queue", began - result.queue_seconds, began), ("copy", began, copied)]
            if job.direction is Direction.STORE:
                phases.append(("seal", copied, job.ended))
        inside = set_span_in_context(span, Context())
        for name, start, end in phases:
            self._end(self._tracer.start_span(name, inside, start_time=at(start)), at(end))
        self._end(span, at(job.ended))

    def _end(self, span: Span, nanoseconds: int) -> None:
        self._made += span.get_span_context().trace_flags.sampled  # the others are not exported
        span.end(nanoseconds)

    def _context(self, traceparent: bytes) -> Context:
        """The context of the client's span; an empty one without a traceparent."""
        context = Context()
        if not traceparent:
            return context
        if len(traceparent) <= MAX_TRACEPARENT_BYTES:
            context = _propagator.extract({"traceparent": traceparent.decode("ascii", "replace")}, context)
        if not get_current_span(context).get_span_context().is_valid:
            self._metrics.malformed_traceparents.inc()
        return context

    async def close(self, timeout: float) -> None:
        """Export the remaining spans, for `FLUSH_SECONDS` at most, or ``timeout`` if that is less."""
        # A daemon thread: an export that hangs must not keep the process from ending.
        thread = threading.Thread(target=self._shut_down, name="tracing-shutdown", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, min(timeout, FLUSH_SECONDS))
        if left := self._made - self._exporter.taken:
            _log.warning("spans dropped at shutdown: the collector did not accept them in time", spans=left)

    def _shut_down(self) -> None:
        try:
            self._provider.shutdown()
        except Exception as error:  # noqa: BLE001 - no thread ends unheard, and an exporter may raise anything
            _log.error("tracing did not shut down cleanly", error=str(error))


class _CountingExporter(SpanExporter):
    """Counts the spans by fate, and logs once that a collector does not accept them. Used by the SDK's thread."""

    def __init__(self, exporter: SpanExporter, metrics: Metrics) -> None:
        self._exporter = exporter
        self._fates = {fate: metrics.spans.labels(fate.value) for fate in SpanFate}
        self._failing = False
        self.taken = 0
        """Spans that were exported or have failed."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.taken += len(spans)
            failed = result is not SpanExportResult.SUCCESS
            self._fates[SpanFate.EXPORT_FAILED if failed else SpanFate.EXPORTED].inc(len(spans))
            if failed is not self._failing:
                self._failing = failed
                # The SDK has logged the reason, and would log it again for every batch.
                logging.getLogger("opentelemetry").setLevel(logging.CRITICAL if failed else logging.NOTSET)
                if failed:
                    _log.warning("spans cannot be exported; logged once, kvsidecar_spans_total counts them")
                else:
                    _log.warning("spans are exported again")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _otlp_exporter() -> SpanExporter:
    name = next(
        (each for each in (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL) if os.environ.get(each)), ""
    )
    protocol = os.environ.get(name, PROTOCOLS[0])
    if protocol not in PROTOCOLS:
        raise ConfigError(f"{name}={protocol!r} must be {' or '.join(PROTOCOLS)}")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http()


def _positive(variable: str, default: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{variable}={text!r} must be a whole number above 0")
    return int(text)
