"""What a real publisher counts, and serves on its port."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest

from kvsidecar.publisher import zmtp
from kvsidecar.publisher.endpoint import MAX_CONNECTIONS_EACH, MAX_SUBSCRIPTION_BYTES, MAX_SUBSCRIPTIONS
from kvsidecar.publisher.metrics import ENDPOINTS, Reason
from kvsidecar.publisher.publisher import MAX_REPLAYS
from tests.harness import DaemonProcess, eventually
from tests.marks import processes
from tests.publisher.process import Engine, PublisherProcess, replay, subscribe, wait_for

METRICS = ("--metrics", "127.0.0.1:0")
HELLO = zmtp.GREETING + zmtp.ready(b"DEALER")
REQUEST = b"".join(zmtp.message([b"", bytes(8)]))


@pytest.fixture
def publisher(short_dir: Path) -> Iterator[PublisherProcess]:
    """Of no daemon."""
    with PublisherProcess(short_dir, f"{short_dir}/kvs.sock", *METRICS) as each:
        each.wait_log("metrics are served")
        yield each


def send(publisher: PublisherProcess, endpoint: str, data: bytes) -> None:
    """Until the publisher closes the connection, as it has what it needs by then."""
    path = publisher.path if endpoint == "bind" else publisher.replay.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.settimeout(60)
        sock.connect(path)
        sock.sendall(data)
        while sock.recv(4096):
            pass


def topics(count: int, width: int = 8) -> bytes:
    return b"".join(zmtp.command(b"SUBSCRIBE", b"%0*d" % (width, number)) for number in range(count))


LONG = b"\x02" + (1 << 40).to_bytes(8, "big")


@processes
@pytest.mark.parametrize(
    ("endpoint", "reason", "data"),
    [
        ("bind", Reason.PROTOCOL, b"GET / HTTP/1.1\r\n\r\n" * 10),
        ("replay", Reason.PROTOCOL, zmtp.GREETING.replace(b"NULL", b"PLAIN")),
        ("bind", Reason.FRAME, HELLO + LONG),
        ("replay", Reason.FRAME, HELLO + LONG),
        ("bind", Reason.SUBSCRIPTIONS, HELLO + topics(MAX_SUBSCRIPTIONS + 1)),
        ("bind", Reason.SUBSCRIPTIONS, HELLO + topics(MAX_SUBSCRIPTION_BYTES // 200 + 1, 200)),
        ("replay", Reason.REPLAYS, HELLO + REQUEST * (MAX_REPLAYS + 1)),
        ("replay", Reason.SILENT, zmtp.GREETING),  # 10 s
    ],
    ids=lambda each: "data" if isinstance(each, bytes) else str(each),
)
def test_a_router_that_goes_beyond_a_bound_is_disconnected_counted_and_logged(
    publisher: PublisherProcess, endpoint: str, reason: Reason, data: bytes
) -> None:
    assert publisher.refused(endpoint, reason.value) == 0
    send(publisher, endpoint, data)
    assert publisher.refused(endpoint, reason.value) == 1
    assert sum(publisher.refused(*each) for each in product(ENDPOINTS, Reason)) == 1
    publisher.wait_log(f"router refused: {reason.value}")


@processes
def test_connections_beyond_the_bound_of_one_user_are_counted(publisher: PublisherProcess) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS_EACH + 3):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(publisher.path)
        eventually(lambda: publisher.refused("bind", "connections") == 3)
        assert publisher.metric('kvsidecar_publisher_connections{endpoint="bind"}') == MAX_CONNECTIONS_EACH
    eventually(lambda: publisher.metric('kvsidecar_publisher_connections{endpoint="bind"}') == 0)
    assert publisher.metric('kvsidecar_publisher_connections{endpoint="replay"}') == 0


@processes
def test_many_refusals_are_few_lines(publisher: PublisherProcess) -> None:
    assert publisher.metric("kvsidecar_publisher_messages_total") == 0
    began = time.monotonic()
    for _ in range(300):
        send(publisher, "bind", HELLO + LONG)
    assert publisher.refused("bind", "frame") == 300
    assert publisher.log.count("router refused: frame") < min(300, time.monotonic() - began + 2), "each is logged"


@processes
def test_what_is_published_is_counted(short_dir: Path) -> None:
    with DaemonProcess(short_dir, "--pool-size", "1MiB") as daemon:
        engine = Engine(daemon.wait_ready())
        with PublisherProcess(short_dir, daemon.socket, *METRICS) as publisher, subscribe(publisher) as router:
            wait_for(router, engine.store(1))

            def value(name: str) -> float:
                return publisher.metric(f"kvsidecar_publisher_{name}")

            assert value("followed_namespaces") == 1
            assert value("left_out_namespaces") == 0
            assert value("announced_blocks") == 4
            assert value("messages_total") >= 1
            assert value("known_bytes") > 0
            assert value("kept_bytes") > 0
            assert replay(publisher.replay, 0)
            assert replay(publisher.replay, 1 << 40) == []
            assert value('replays_total{result="kept"}') == value('replays_total{result="lost"}') == 1
            again: Callable[[], bool] = lambda: value("repeats_total") >= 1  # noqa: E731
            eventually(again)
            assert publisher.metric("process_resident_memory_bytes") > 0
        engine.rank.close()


@processes
def test_its_port_serves_nothing_else_and_counts_what_it_refuses(publisher: PublisherProcess) -> None:
    publisher.metric("kvsidecar_publisher_messages_total")
    url = next(word for word in publisher.log.replace('"', " ").split() if word.endswith("/metrics")).split("=")[-1]
    for path in ("/", "/status", "/metrics/x"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url.replace("/metrics", path), timeout=60)
        refused.value.close()
        assert refused.value.code == 404
        assert refused.value.headers["X-Content-Type-Options"] == "nosniff"
    assert publisher.metric('kvsidecar_publisher_http_refusals_total{reason="invalid_request"}') == 3


@processes
def test_without_the_option_there_is_no_port_and_an_address_in_use_may_be_free_later(short_dir: Path) -> None:
    with PublisherProcess(short_dir, f"{short_dir}/kvs.sock") as plain:
        plain.wait_log("publishing")
        assert "metrics are served" not in plain.log
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            (directory := short_dir / "other").mkdir()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with PublisherProcess(directory, f"{short_dir}/kvs.sock", "--metrics", address) as second:
                assert second.process.wait(60) == 75
                assert f"HTTP cannot listen on {address}" in second.log
                assert "Traceback" not in second.log
