"""What routers hear of a real daemon from a real ``kvsidecar publish``, whoever of the three comes, goes or dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq

from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.publisher.publisher import names_of
from kvsidecar.publisher.run import NICE
from kvsidecar.support import child_process
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.docs.pages import fences
from tests.harness import NAMESPACE, NUM_BLOCKS, SECONDS, DaemonProcess, Rank, eventually
from tests.marks import lent_daemon
from tests.publisher.process import TOPIC, Engine, PublisherProcess, replay, subscribe, wait_for
from tests.router import View

pytestmark = lent_daemon


def test_a_router_hears_what_engines_store_and_the_daemon_evicts(short_dir: Path, daemon: DaemonProcess) -> None:
    engine = Engine(daemon)
    with PublisherProcess(short_dir, daemon.socket, "--ownership", "kvsidecar") as publisher:
        with subscribe(publisher) as router:
            first = engine.store(1)
            wait_for(router, first)
            assert router.topics == {TOPIC}
            assert sorted(router.cpu().values())[0] == (1000, 1001, 1002, 1003)
            number = 2
            while not router.removed("CPU"):
                last = engine.store(number, NUM_BLOCKS)
                eventually(lambda stored=last: stored <= set(router.cpu()))  # type: ignore[misc]
                number += 1
            router.check()

            # The engine goes; what it has stored stays, also for a router that comes now.
            engine.rank.close()
            with subscribe(publisher) as late:
                eventually(lambda: set(late.cpu()) == set(router.cpu()), lambda: f"{len(late.cpu())} blocks")
            with daemon.client() as client:
                client.clear(NAMESPACE)
            wait_for(router, set())
        assert publisher.terminate() == 0


def test_the_daemon_dies_and_comes_back_with_its_blocks(short_dir: Path, pool_dir: Path) -> None:
    kept = ("--pool-size", "1MiB", "--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *kept) as daemon:
        engine = Engine(daemon.wait_ready())
        with PublisherProcess(short_dir, daemon.socket) as publisher, subscribe(publisher) as router:
            blocks = engine.store(1)
            wait_for(router, blocks)
            daemon.process.kill()
            daemon.process.wait(SECONDS)
            wait_for(router, set())
            with DaemonProcess(short_dir, *kept) as again:
                again.wait_ready()
                wait_for(router, blocks)  # its tokens are those that the publisher has heard of
                eventually(lambda: engine.rank.client.attached)
                wait_for(router, blocks | engine.store(2))
                engine.rank.close()


def test_a_new_publisher_begins_by_clearing_what_the_last_one_has_said(short_dir: Path, daemon: DaemonProcess) -> None:
    engine = Engine(daemon)
    with PublisherProcess(short_dir, daemon.socket) as publisher, subscribe(publisher) as router:
        first = engine.store(1)
        wait_for(router, first)
        publisher.process.kill()
        publisher.process.wait(SECONDS)
        with daemon.client() as client:
            client.clear(NAMESPACE)
        second = engine.store(2)
        with PublisherProcess(short_dir, daemon.socket):
            wait_for(router, second)
    engine.rank.close()


def test_a_router_agrees_with_lookups_after_clears_and_stores_of_the_same_blocks(
    short_dir: Path, pool_dir: Path, tmp_path: Path
) -> None:
    """Within one telling, by hash, with the disk behind the pool, and over the deaths of daemon and publisher."""
    disk = tmp_path / "disk"
    disk.mkdir()
    kept = ["--pool-size", "1MiB", "--pool-dir", str(pool_dir)]
    kept += ("--disk-dir", str(disk), "--disk-size", "64MiB", "--disk-admission", "all")
    with DaemonProcess(short_dir, *kept) as first, PublisherProcess(short_dir, first.socket) as publisher:
        engine = Engine(first.wait_ready())
        with subscribe(publisher) as router:
            with first.client() as client:
                wait_for(router, blocks := engine.store(1))
                for _ in range(16):
                    client.clear(NAMESPACE)
                    engine.store(1)
                wait_for(router, blocks)
            with first.client() as client:
                client.clear(NAMESPACE)
            wait_for(router, set())
            eventually(lambda: not router.disk())
            blocks = engine.store(3)
            wait_for(router, blocks)
            first.process.kill()
            first.process.wait(SECONDS)
            wait_for(router, set())
            with DaemonProcess(short_dir, *kept) as again:
                again.wait_ready()
                wait_for(router, blocks)
                eventually(lambda: engine.rank.client.attached)
                with again.client() as client:
                    client.clear(NAMESPACE)
                wait_for(router, blocks := engine.store(4))
                publisher.process.kill()
                publisher.process.wait(SECONDS)
                with PublisherProcess(short_dir, again.socket):
                    wait_for(router, blocks)
                    with again.client() as client:
                        client.clear(NAMESPACE)
                    wait_for(router, set())
                    eventually(lambda: not router.disk())
                engine.rank.close()


def test_what_a_router_has_missed_is_replayed(short_dir: Path, daemon: DaemonProcess) -> None:
    engine = Engine(daemon)
    with PublisherProcess(short_dir, daemon.socket) as publisher, subscribe(publisher) as router:
        wait_for(router, engine.store(1))
        messages = replay(publisher.replay, 0)
        assert [number for _, number, _ in messages] == list(range(len(messages)))
        assert {topic for topic, _, _ in messages} == {TOPIC.encode()}
        view = View()
        for _, _, payload in messages:
            for event in msgspec.msgpack.decode(payload)[1]:
                view.take(event)
        assert view.of("CPU") == router.cpu()
        assert replay(publisher.replay, len(messages) - 1)[0] == messages[-1]

        # What is not there any more is said to everybody again.
        batches = router.batches
        assert replay(publisher.replay, 1 << 40) == []
        publisher.wait_log("everything is announced again")
        eventually(lambda: router.batches > batches)
        wait_for(router, engine.store(1))
    engine.rank.close()


def test_hostile_messages_to_its_sockets_change_nothing(short_dir: Path, daemon: DaemonProcess) -> None:
    engine = Engine(daemon)
    with PublisherProcess(short_dir, daemon.socket) as publisher, subscribe(publisher) as router:
        wait_for(router, engine.store(1))
        context = zmq.Context()
        for kind, endpoint in ((zmq.DEALER, publisher.replay), (zmq.XSUB, f"ipc://{publisher.path}")):
            socket = context.socket(kind)
            socket.connect(endpoint)
            for frames in ([b"x"], [b"", b"x"], [b"", b"", b"", b""], [b"", bytes(9)], [b"\x02" + bytes(1 << 20)]):
                socket.send_multipart(frames)
            socket.close(1000)
        context.term()
        publisher.wait_log("router refused: no_request")
        wait_for(router, engine.store(2) | engine.store(1))
        assert replay(publisher.replay, 0)
    engine.rank.close()


def test_a_namespace_that_ends_and_one_of_another_model(short_dir: Path, daemon: DaemonProcess) -> None:
    other = replace(NAMESPACE, model="other/model")
    with PublisherProcess(short_dir, daemon.socket, "--model", "m", "--model", "*/model") as publisher:
        engine, second = Rank(daemon, namespace=other), Rank(daemon, namespace=replace(NAMESPACE, model="x"))
        publisher.wait_log("kv@n1@other/model")
        second.store("a")
        engine.close()
        publisher.wait_log("namespace gone")
        assert "kv@n1@x" not in publisher.log
        second.close()


def test_the_topic_has_the_name_that_requests_give_the_model(short_dir: Path, daemon: DaemonProcess) -> None:
    """From when an engine says it: until then it is that of the weights."""
    served = "kv@n1@org/chat"
    with PublisherProcess(short_dir, daemon.socket, "--model", "org/*", "--model", "m") as publisher:
        nameless = Engine(daemon)
        with subscribe(publisher) as router, subscribe(publisher, served) as of_model:
            blocks = nameless.store(1)
            wait_for(router, blocks)
            assert router.topics == {TOPIC}
            engine = Engine(daemon, served_name="org/chat")
            wait_for(of_model, blocks)
            assert of_model.topics == {served}
            with subscribe(publisher, TOPIC) as of_weights:
                wait_for(of_model, blocks | engine.store(2))
                wait_for(of_weights, set())
        nameless.rank.close()
        engine.rank.close()


def test_a_name_that_no_engine_has_said_to_the_next_daemon_stays() -> None:
    def reply(*names: str) -> pb.StatusReply:
        wire = namespace_to_wire(NAMESPACE)
        return pb.StatusReply(
            namespaces=[pb.NamespaceStatus(namespace=wire, served_name=name) for name in names[:1]],
            ranks=[pb.RankStatus(namespace=wire, served_name=name) for name in names[1:]],
        )

    assert names_of(reply("chat"), {}) == names_of(reply("", "chat"), {}) == {NAMESPACE: "chat"}
    assert names_of(reply("chat", "other"), {NAMESPACE: "old"}) == {NAMESPACE: "chat"}
    assert names_of(reply("", ""), {NAMESPACE: "chat"}) == {NAMESPACE: "chat"}
    assert names_of(reply(""), {}) == {NAMESPACE: NAMESPACE.model}


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--bind", "tcp://nowhere"], 78, "--bind tcp://nowhere"),
        (["--bind", "ipc:///nonexistent/directory/x"], 78, "--bind ipc:///nonexistent/directory/x: No such file"),
        (["--topic", "{pod}"], 78, "--topic '{pod}'"),
        (["--model"], 2, "--model"),
    ],
)
def test_a_bad_option_ends_it_with_one_sentence(options: list[str], code: int, text: str) -> None:
    command = [sys.executable, "-m", "kvsidecar", "publish", *options]
    result = subprocess.run(
        command, env=child_process.environment(), timeout=SECONDS, check=False, capture_output=True, text=True
    )
    assert (result.returncode, text in result.stderr) == (code, True), result.stderr
    assert "Traceback" not in result.stderr


def test_an_address_that_is_in_use_may_be_free_later(short_dir: Path) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    command = [sys.executable, "-m", "kvsidecar", "publish", "--bind", f"tcp://127.0.0.1:{port}"]
    try:
        result = subprocess.run(
            command, env=child_process.environment(), timeout=SECONDS, check=False, capture_output=True, text=True
        )
    finally:
        socket.close(0)
        context.term()
    assert result.returncode == 75, result.stderr
    assert "in use" in result.stderr


def test_it_waits_for_a_daemon_and_ends_at_once_without_one(short_dir: Path) -> None:
    with PublisherProcess(short_dir, f"{short_dir}/none.sock") as publisher:
        publisher.wait_log("has not reported its namespaces")
        publisher.process.send_signal(signal.SIGINT)
        assert publisher.process.wait(SECONDS) == 0


def test_the_publisher_is_nice(short_dir: Path) -> None:
    with PublisherProcess(short_dir, f"{short_dir}/kvs.sock") as publisher:
        publisher.wait_log("publishing")
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, publisher.process.pid) == max(NICE, own)
        assert publisher.terminate() == 0


(PROGRAM,) = fences("docs/routers.md", "python")


def test_the_program_of_the_page_shows_events(short_dir: Path) -> None:
    with (
        DaemonProcess(short_dir, "--pool-size", "1MiB").wait_ready() as daemon,
        PublisherProcess(short_dir, daemon.socket) as publisher,
    ):
        assert isinstance(daemon, DaemonProcess)
        output = short_dir / "output"
        program = PROGRAM.replace("tcp://127.0.0.1:5557", f"ipc://{publisher.path}")
        with output.open("wb") as file:
            reader = child_process.start([sys.executable, "-u", "-c", program], stdout=file, stderr=file)
        try:
            engine = Engine(daemon)
            engine.store(1)
            eventually(lambda: f" {TOPIC} BlockStored CPU 4\n" in output.read_text(), output.read_text)
            engine.rank.close()
        finally:
            reader.kill()
            reader.wait(SECONDS)
