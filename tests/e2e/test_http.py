"""The HTTP port: whom it answers with which figures, and what each answer forbids."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.unfinished import http as connected
from tests.e2e.unfinished import until_closed
from tests.harness import SECONDS, DaemonProcess, Rank, done, eventually
from tests.marks import lent_daemon

pytestmark = lent_daemon

GETS = ("/health", "/ready", "/metrics", "/status", "/", "/page.css", "/page.js", "/nowhere")
REFUSED = (
    b"GET /health HTTP/1.1\r\nbad\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 8\r\n\r\nnot gzip",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nExpect: nothing\r\nConnection: close\r\n\r\n",
    b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"G\x01T / HTTP/1.1\r\n\r\n",
)


@contextmanager
def keeping(daemon: DaemonProcess) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(daemon.http.removeprefix("http://"), timeout=SECONDS)
    yield connection
    connection.close()


def test_every_answer_forbids_to_guess_its_type(daemon: DaemonProcess) -> None:
    with keeping(daemon) as connection:
        for path in GETS:
            for method in ("GET", "HEAD"):
                connection.request(method, path)
                reply = connection.getresponse()
                assert reply.headers.get_all("X-Content-Type-Options") == ["nosniff"], path
                assert bool(reply.read()) == (method == "GET")
    for request in REFUSED:
        with connected(daemon, request) as raw:
            assert until_closed(raw).lower().count(b"\r\nx-content-type-options: nosniff\r\n") == 1, request
    with connected(daemon, b"GET /hea") as raw:
        late = until_closed(raw)
        assert b" 408 " in late
        assert b"nosniff" in late


@pytest.mark.parametrize("request_", REFUSED, ids=lambda request: repr(request[:40]))
def test_what_is_refused_is_counted_and_said_without_a_trace(daemon: DaemonProcess, request_: bytes) -> None:
    with connected(daemon, request_) as raw:
        assert until_closed(raw).split()[1] in (b"400", b"405", b"417")
    assert daemon.refused("invalid_request") == 1
    assert daemon.terminate() == 0
    said = daemon.read_log()
    assert {line["level"] for line in said if line["event"] == "request refused"} <= {"debug"}
    assert not [line for line in said if line.get("level") == "error" or line["event"] == "stderr"]


def test_metrics_give_a_model_the_name_of_its_latest_engine(daemon: DaemonProcess) -> None:
    first = Rank(daemon, served_name="chat")
    model = first.namespace.model

    def named(name: str) -> bool:
        return f'kvsidecar_model_info{{model="{model}",served_name="{name}"}} 1.0\n' in daemon.get("/metrics")[1]

    assert named("chat"), "before its first copy"
    Rank(daemon, instance="second", served_name="chat-2")
    assert named("chat-2")
    assert not named("chat")


def test_the_first_prompts_of_an_engine_are_counted_under_its_model(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    rank.client.report_prompts_nowait(rank.namespace, needed_tokens=64, loaded_tokens=16)
    eventually(lambda: daemon.metric("kvsidecar_prompt_tokens_needed_total") == 64)
    of_model = f'kvsidecar_model_prompt_tokens_needed_total{{model="{rank.namespace.model}"}}'
    assert daemon.metric(of_model) == 64


def test_who_asks_alone_sees_what_has_just_happened(daemon: DaemonProcess) -> None:
    """However often: nobody else asks at the same time."""
    rank = Rank(daemon)
    with keeping(daemon) as connection:
        for number in range(1, 30):
            done(rank.store("a", number))
            connection.request("GET", "/metrics")
            stored = [
                line
                for line in connection.getresponse().read().decode().splitlines()
                if line.startswith('kvsidecar_jobs_total{direction="store",outcome="done"}')
            ]
            assert [float(line.split()[-1]) for line in stored] == [number]
            connection.request("GET", "/status")
            assert json.loads(connection.getresponse().read())["jobs"]["stores_done"] == number
    rank.close()


def test_the_page_shares_a_rendering_and_takes_no_fresh_one_from_others(daemon: DaemonProcess) -> None:
    with keeping(daemon) as connection:

        def uptime(**headers: str) -> float:
            connection.request("GET", "/status", headers=headers)
            return float(json.loads(connection.getresponse().read())["uptime_seconds"])

        asked_as = {"Cache-Control": "max-age=1"}
        eventually(lambda: uptime(**asked_as) == uptime(**asked_as), "they share one")
        assert uptime(**asked_as) < uptime() < uptime()


def test_pipelined_requests_are_answered_in_order(daemon: DaemonProcess) -> None:
    many = 500
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(daemon) as raw:
        raw.sendall(one * many + b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = until_closed(raw)
    assert answers.count(b" 200 OK\r\n") == many
    assert answers.count(b" 404 Not Found\r\n") == 1
    assert answers.index(b" 404 ") > answers.rindex(b" 200 OK")
