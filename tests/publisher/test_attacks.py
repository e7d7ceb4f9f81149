"""What a tenant and a router can do to the publisher of all others: its memory, and the time of honest routers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvsidecar.publisher.endpoint import MAX_CONNECTIONS_EACH, MAX_SUBSCRIPTION_BYTES, READ_BYTES
from kvsidecar.publisher.publisher import MAX_KNOWN_BYTES, REPLAY_SECONDS
from kvsidecar.publisher.sequence import MAX_KEPT_BYTES
from kvsidecar.support import child_process
from tests.harness import SECONDS, DaemonProcess, eventually
from tests.marks import processes
from tests.publisher.process import Engine, PublisherProcess, replay, subscribe, wait_for

ATTACK_SECONDS = 6.0
SLACK_BYTES = 64 << 20
"""For what is under way, and for what the allocator keeps."""
REMEMBERED_BYTES = 72 << 20
"""Of what engines have noted, before it is forgotten: less than one group may have."""
GIVEN_BACK_SLACK = 40 << 20
"""What the publisher may keep when it has forgotten that, beside the messages that it keeps for replays."""
UNREAD_BYTES = 1 << 20
"""More than the kernel takes for a router that does not read."""
CONNECTION_BYTES = 1 << 20
"""Of one connection: what it has sent, its subscriptions, and a message that it does not take."""
assert MAX_SUBSCRIPTION_BYTES + READ_BYTES < CONNECTION_BYTES


def rss(pid: int) -> int:
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmRSS")]
    return int(line.split()[1]) << 10


def replay_bytes(publisher: PublisherProcess) -> int:
    return sum(len(payload) for _, _, payload in replay(publisher.replay, 1))


def attack(directory: Path, name: str, *kinds: str, seconds: float = ATTACK_SECONDS) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"benchmarks.attacks.{name}", str(directory), str(seconds), *kinds]
    return child_process.start(command, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, int]:
    text, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    did: dict[str, int] = json.loads(text.splitlines()[-1])
    return did


@processes
@pytest.mark.parametrize(
    ("kind", "did", "most"),
    [
        ("notes", "noted_blocks", MAX_KNOWN_BYTES + MAX_KEPT_BYTES),
        ("frames", "frame_bytes", 0),
        ("subscriptions", "subscriptions", 0),
        ("unread", "unread_replays", MAX_CONNECTIONS_EACH * CONNECTION_BYTES),
    ],
)
def test_no_attack_takes_more_memory_than_is_allowed(short_dir: Path, kind: str, did: str, most: int) -> None:
    with DaemonProcess(short_dir, "--pool-size", "1MiB") as daemon, PublisherProcess(short_dir, daemon.socket) as each:
        engine = Engine(daemon.wait_ready())
        with subscribe(each) as router:
            wait_for(router, engine.store(1))
            before, highest = rss(each.process.pid), 0
            process = attack(short_dir, "publisher_memory", kind)
            while process.poll() is None:
                highest = max(highest, rss(each.process.pid))
                time.sleep(0.05)
            assert result(process)[did] > 0
            assert highest - before < most + SLACK_BYTES
            eventually(lambda: engine.store(2) <= set(router.cpu()), pause=0.2)
        engine.rank.close()


@processes
def test_the_memory_comes_back_when_the_attacks_are_over(short_dir: Path) -> None:
    metrics = ("--metrics", "127.0.0.1:0")
    with (
        DaemonProcess(short_dir, "--pool-size", "1MiB") as daemon,
        PublisherProcess(short_dir, daemon.socket, *metrics) as each,
    ):
        engine = Engine(daemon.wait_ready())
        with subscribe(each) as router:
            wait_for(router, engine.store(1))
            before = rss(each.process.pid)
            # How long it takes is a matter of the cores: until it is killed.
            process = attack(short_dir, "publisher_memory", seconds=10 * SECONDS)
            try:
                while each.metric("kvsidecar_publisher_known_bytes") <= REMEMBERED_BYTES:
                    assert process.poll() is None
                    time.sleep(0.2)
            finally:
                process.kill()
                process.communicate()
            assert rss(each.process.pid) - before > REMEMBERED_BYTES
            with daemon.client() as client:
                client.clear()

            def extra() -> float:
                return rss(each.process.pid) - before - each.metric("kvsidecar_publisher_kept_bytes")

            eventually(lambda: extra() < GIVEN_BACK_SLACK, lambda: f"{extra() / 2**20:.0f} MiB are kept", pause=0.2)
            eventually(lambda: each.metric('kvsidecar_publisher_connections{endpoint="replay"}') == 0)
            eventually(lambda: engine.store(2) <= set(router.cpu()), pause=0.2)
        engine.rank.close()


@processes
def test_routers_that_do_not_read_their_replays_delay_nobody(short_dir: Path) -> None:
    with DaemonProcess(short_dir, "--pool-size", "1MiB") as daemon, PublisherProcess(short_dir, daemon.socket) as each:
        engine = Engine(daemon.wait_ready())
        assert result(attack(short_dir, "publisher_memory", "notes"))["noted_blocks"] > 0
        eventually(lambda: replay_bytes(each) > UNREAD_BYTES, pause=0.2)
        process = attack(short_dir, "publisher_memory", "unread")
        honest = []
        while process.poll() is None:
            begun = time.monotonic()
            assert replay(each.replay, 1)
            honest.append(time.monotonic() - begun)
        assert result(process)["unread_replays"] > 0
        assert max(honest) < REPLAY_SECONDS / 4, "it has waited for one that does not read"
        engine.rank.close()


@processes
def test_colliding_hashes_stop_the_publisher_for_nobody(short_dir: Path) -> None:
    with DaemonProcess(short_dir, "--pool-size", "1MiB") as daemon, PublisherProcess(short_dir, daemon.socket) as each:
        engine = Engine(daemon.wait_ready())
        with subscribe(each) as router:
            wait_for(router, engine.store(1))
            before = rss(each.process.pid)
            assert result(attack(short_dir, "colliding_hashes"))["circles"] > 0
            eventually(lambda: engine.store(2) <= set(router.cpu()), pause=0.2)
            assert rss(each.process.pid) - before < SLACK_BYTES
            with subscribe(each) as late:
                eventually(lambda: set(late.cpu()) == set(router.cpu()) and late.cpu())
        engine.rank.close()
