"""Spans of jobs, from a real daemon to a collector in the test."""

from __future__ import annotations

import http.server
import itertools
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collected
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collected_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from kvsidecar.client import Blocks, JobDone, Outcome
from kvsidecar.support import extras
from tests.harness import NAMESPACE, SECONDS, SHARD_BYTES, DaemonProcess, Rank, done, environment, eventually, hashes
from tests.marks import both_protocols

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
OTHER_TRACE = "a" * 32
MALFORMED = (
    "nonsense",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{TRACE.upper()}-{PARENT}-01",
    f"{SAMPLED}-more",
    f"00-{TRACE}-{PARENT}",
    "\N{SNOWMAN}" * 20,
    SAMPLED + "-" + "x" * 10_000,
)


class Collector:
    """Takes OTLP, over HTTP and over gRPC."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self._spans: queue.SimpleQueue[tuple[trace_pb2.Span, dict[str, Any]]] = queue.SimpleQueue()
        collector = self

        class Http(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                collector.take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        class Grpc(collected_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                collector.take(request.SerializeToString())
                return collected.ExportTraceServiceResponse()

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Http)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self._grpc = grpc.server(ThreadPoolExecutor(1))
        collected_grpc.add_TraceServiceServicer_to_server(Grpc(), self._grpc)
        self._ports = {
            "http/protobuf": self._http.server_address[1],
            "grpc": self._grpc.add_insecure_port("127.0.0.1:0"),
        }
        self._grpc.start()

    def variables(self, protocol: str = "http/protobuf", *, delay_ms: int = 50) -> dict[str, str]:
        return variables(self._ports[protocol], protocol, OTEL_BSP_SCHEDULE_DELAY=str(delay_ms))

    def take(self, request: bytes) -> None:
        self.requests.append(request)
        for each in collected.ExportTraceServiceRequest.FromString(request).resource_spans:
            resource = attributes(each.resource)
            for scope in each.scope_spans:
                for span in scope.spans:
                    self._spans.put((span, resource))

    def until(self, name: str) -> tuple[list[trace_pb2.Span], dict[str, Any]]:
        """All spans that came up to this one, and its resource."""
        spans = []
        while True:
            span, resource = self._spans.get(timeout=SECONDS)
            spans.append(span)
            if span.name == name:
                return spans, resource

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._grpc.stop(None)


def variables(port: int, protocol: str = "http/protobuf", **more: str) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "no_proxy": "127.0.0.1",
        **more,
    }


def attributes(of: Any) -> dict[str, Any]:
    def value(each: Any) -> Any:
        kind = each.WhichOneof("value")
        return [value(one) for one in each.array_value.values] if kind == "array_value" else getattr(each, kind)

    return {each.key: value(each.value) for each in of.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@contextmanager
def tracing(directory: Path, *, local: bool = True, **variables: str) -> Iterator[tuple[DaemonProcess, Rank]]:
    with DaemonProcess(directory, "--tracing", "otlp", local=local, **variables) as daemon:
        rank = Rank(daemon.wait_ready(), instance="llama", rank=1, world_size=2)
        yield daemon, rank
        rank.close()


def store(rank: Rank, name: object, traceparent: str | None) -> JobDone:
    return rank.finish(rank.client.store([Blocks(0, hashes(name), [0])], traceparent=traceparent))


@both_protocols
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_job_is_a_span_of_the_engines_trace_with_its_phases_inside(
    short_dir: Path, collector: Collector, protocol: str, local: bool
) -> None:
    before = time.time_ns()
    with tracing(short_dir, **collector.variables(protocol), local=local) as (_, rank):
        stored = done(rank.finish(rank.client.store([Blocks(0, hashes("a", "b"), [3, 5])], traceparent=SAMPLED)))
        spans, resource = collector.until("kvsidecar.store")
        done(rank.finish(rank.client.load([Blocks(0, hashes("a"), [6])], traceparent=SAMPLED)))
        loaded, _ = collector.until("kvsidecar.load")
        after = time.time_ns()

    assert resource["service.name"] == "kvsidecar"
    queued, copied, sealed, whole = spans
    assert [each.name for each in spans] == ["queue", "copy", "seal", "kvsidecar.store"]
    assert [each.name for each in loaded] == ["queue", "copy", "kvsidecar.load"]
    for phases in (spans, loaded):
        assert {each.trace_id.hex() for each in phases} == {TRACE}
        assert phases[-1].parent_span_id.hex() == PARENT
        assert {each.parent_span_id for each in phases[:-1]} == {phases[-1].span_id}
    near = 1_000_000  # ns: the clocks are read one after the other
    times = [
        whole.start_time_unix_nano, queued.start_time_unix_nano, queued.end_time_unix_nano,
        copied.start_time_unix_nano, copied.end_time_unix_nano, sealed.start_time_unix_nano,
        sealed.end_time_unix_nano,
    ]  # fmt: skip
    assert times == sorted(times)
    assert before - near < times[0] <= times[-1] < after + near
    assert whole.end_time_unix_nano == sealed.end_time_unix_nano
    seconds = (copied.end_time_unix_nano - copied.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(stored.copy_seconds, abs=1e-6)
    assert attributes(whole) == {
        "kvsidecar.instance": "llama",
        "kvsidecar.rank": 1,
        "kvsidecar.device": "host",
        "kvsidecar.namespace": str(NAMESPACE),
        "kvsidecar.blocks": 2,
        "kvsidecar.blocks_copied": 2,
        "kvsidecar.blocks_skipped": 0,
        "kvsidecar.bytes": 2 * SHARD_BYTES,
        "kvsidecar.plan": ["runs"],
        "kvsidecar.outcome": "done",
    }
    sent = b"".join(collector.requests)
    assert not any(part in sent for each in hashes("a", "b") for part in (each, each.hex().encode()))


def test_only_jobs_of_sampled_traces_have_spans_and_a_malformed_traceparent_is_counted_and_ignored(
    short_dir: Path, collector: Collector
) -> None:
    with tracing(short_dir, **collector.variables()) as (daemon, rank):
        for number, traceparent in enumerate((None, "", UNSAMPLED, *MALFORMED)):
            done(store(rank, number, traceparent))
        done(store(rank, "last", f"00-{OTHER_TRACE}-{PARENT}-01"))
        spans, _ = collector.until("kvsidecar.store")
        assert {each.trace_id.hex() for each in spans} == {OTHER_TRACE}
        assert daemon.metric("kvsidecar_malformed_traceparents_total") == len(MALFORMED)
        assert daemon.terminate() == 0
    assert len(collector.requests) == 1


def test_the_standard_sampler_variable_has_the_last_word(short_dir: Path, collector: Collector) -> None:
    with tracing(short_dir, OTEL_TRACES_SAMPLER="always_on", **collector.variables()) as (_, rank):
        done(store(rank, "a", None))
        spans, _ = collector.until("kvsidecar.store")
    assert not spans[-1].parent_span_id
    assert {each.trace_id for each in spans} == {spans[-1].trace_id}


def test_what_was_not_copied_has_no_phases_and_says_why(short_dir: Path, collector: Collector) -> None:
    failing = {"KVSIDECAR_FAILPOINTS": "store.before_seal=raise(x)"}
    with tracing(short_dir, **failing, **collector.variables()) as (_, rank):
        rank.finish(rank.client.load([Blocks(0, hashes("nobody"), [1])], traceparent=SAMPLED))
        (declined,), _ = collector.until("kvsidecar.load")
        assert store(rank, "a", SAMPLED).outcome is Outcome.FAILED
        (failed,), _ = collector.until("kvsidecar.store")
    assert attributes(declined)["kvsidecar.outcome"] == "declined"
    assert attributes(declined)["kvsidecar.reason"] == "not_found"
    assert declined.status.code == trace_pb2.Status.STATUS_CODE_UNSET
    assert attributes(failed)["kvsidecar.outcome"] == "failed"
    assert failed.status.code == trace_pb2.Status.STATUS_CODE_ERROR


@pytest.mark.parametrize("answers", [False, True], ids=["refuses", "hangs"])
def test_a_dead_collector_costs_spans_and_nothing_else(short_dir: Path, *, answers: bool) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()  # and nobody ever accepts
        dead = variables(
            listener.getsockname()[1],
            OTEL_EXPORTER_OTLP_TIMEOUT="1",
            OTEL_BSP_SCHEDULE_DELAY="10",
            OTEL_BSP_MAX_QUEUE_SIZE="8",
            OTEL_BSP_MAX_EXPORT_BATCH_SIZE="8",
        )
        with tracing(short_dir, **dead) as (daemon, rank):
            numbers = itertools.count()

            def both_after_a_store() -> bool:
                done(store(rank, next(numbers), SAMPLED))
                fates = ("export_failed", "queue_full")
                return all(daemon.metric(f'kvsidecar_spans_total{{result="{fate}"}}') for fate in fates)

            eventually(both_after_a_store, pause=0.0)
            daemon.wait_log("spans cannot be exported; logged once, kvsidecar_spans_total counts them")
            assert daemon.metric('kvsidecar_spans_total{result="exported"}') == 0
            assert daemon.get("/health")[0] == 200
            assert daemon.terminate() == 0


def test_spans_that_wait_are_exported_at_the_end(short_dir: Path, collector: Collector) -> None:
    with tracing(short_dir, **collector.variables(delay_ms=600_000)) as (daemon, rank):
        done(store(rank, "a", SAMPLED))
        assert not collector.requests
        assert daemon.terminate() == 0
    spans, _ = collector.until("kvsidecar.store")
    assert len(spans) == 4


def test_a_collector_that_hangs_does_not_keep_the_daemon_from_ending(short_dir: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        hung = variables(listener.getsockname()[1], OTEL_EXPORTER_OTLP_TIMEOUT="3600")
        with tracing(short_dir, **hung) as (daemon, rank):
            done(store(rank, "a", SAMPLED))
            assert daemon.terminate() == 0
            assert daemon.wait_log("spans dropped at shutdown: the collector did not accept them in time")["spans"] == 4


def refused(tmp_path: Path, **variables: str) -> str:
    """What a daemon says that does not start because of a setting."""
    command = [sys.executable, "-m", "kvsidecar", "serve", "--tracing", "otlp", "--device", "host"]
    command += ["--pool-size", "1MiB", "--socket", str(tmp_path / "s"), "--http-port", "0"]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(**variables),
        check=False,
    )
    assert ended.returncode == 78, ended.stderr
    return ended.stderr.splitlines()[-1]


def test_without_the_extra_the_start_stops_with_one_sentence(tmp_path: Path) -> None:
    absent = tmp_path / "opentelemetry"
    absent.mkdir()
    (absent / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'opentelemetry'\")\n")
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    said = refused(tmp_path, PYTHONPATH=path)
    assert said == (
        f"kvsidecar: tracing=otlp needs what the extra tracing brings: {extras.install('tracing')} "
        "(No module named 'opentelemetry')"
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "udp"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "3"),
    ],
)
def test_a_variable_that_cannot_be_used_stops_the_start(tmp_path: Path, variable: str, value: str) -> None:
    said = refused(tmp_path, **{variable: value})
    assert said.startswith("kvsidecar: ")
    assert variable in said or "OTEL_BSP_*" in said
