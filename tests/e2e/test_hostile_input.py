"""Whatever a client sends, the daemon answers with a documented status, lives, leaks nothing, and harms nobody.

Ten seconds in CI, and on a slow machine as many requests; ``KVSIDECAR_HOSTILE_SECONDS=600`` for more,
``KVSIDECAR_HOSTILE_SEED=N`` for other requests. A
failure names the seed and the number of the request: the same seed sends the same requests in the same order.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.attacks.hostile import Attacker
from benchmarks.attacks.hostile_messages import METHODS, reply_types, request_types
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import DaemonProcess, Rank, done, eventually

RSS_GROWTH = 64 << 20
"""Bytes. A leak of a page per request is more; gRPC's and Python's own arenas are less."""
AT_LEAST = 1000
"""Requests: three times what reaches every field with the seed of CI."""


class Holdings:
    """What the daemon holds for others, as the kernel and its own metrics say."""

    def __init__(self, daemon: DaemonProcess) -> None:
        process = Path(f"/proc/{daemon.process.pid}")
        self.fds = len(os.listdir(process / "fd"))
        self.shared_mappings = (process / "maps").read_text().count("/memfd:") + daemon.mapped_buffers()
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        self.rss = int(status["VmRSS"].split()[0]) * 1024
        self.ranks = daemon.metric("kvsidecar_attached_ranks")
        self.leases = daemon.metric("kvsidecar_leases")
        self.reserved = daemon.metric("kvsidecar_pool_reserved_bytes")

    def more_than(self, before: Holdings) -> list[str]:
        now, then = vars(self), vars(before)
        return [f"{name}: {then[name]} -> {now[name]}" for name in now if name != "rss" and now[name] > then[name]]


def store_and_load(rank: Rank, number: int) -> None:
    """A well-behaved engine's work: what comes back is what was stored."""
    stored = rank.store(("good", number), at=[2])
    assert done(stored).copied_blocks + stored.skipped_blocks == 1
    rank.fill(3, "something else")
    done(rank.load(("good", number), at=[3]))
    assert rank.holds(3, ("good", number)), f"other bytes came back after request {number}"
    assert not rank.kv[:, 4:].any(), f"blocks that nobody named were written before request {number}"


def end_holds(rank: Rank) -> None:
    """Those that the attacker, who is an admin here, has made: only they, their expiry or a restart would end them."""
    for hold in rank.client.status().pins:
        assert rank.client.unpin(hold.name)


@pytest.mark.timeout(0)
def test_hostile_requests_harm_nobody(short_dir: Path) -> None:
    seconds = float(os.environ.get("KVSIDECAR_HOSTILE_SECONDS", "10"))
    seed = int(os.environ.get("KVSIDECAR_HOSTILE_SEED", "1"))
    disk = ("--disk-dir", str(short_dir / "disk"), "--disk-size", "1MiB", "--disk-admission", "all")
    with DaemonProcess(short_dir, "--lease-max", "1", *disk) as daemon:
        rank = Rank(daemon.wait_ready(), instance="good")
        attacker = Attacker(daemon, seed)
        attacker.sweep()
        for _ in range(100):  # what grows once, with the first requests, is no leak
            attacker.attack()
        store_and_load(rank, 0)
        attacker.close()
        eventually(lambda: daemon.metric("kvsidecar_attached_ranks") == 1)
        end_holds(rank)
        before = Holdings(daemon)
        attacker = Attacker(daemon, seed + 1)
        end = time.monotonic() + seconds
        while attacker.number < AT_LEAST or time.monotonic() < end:
            attacker.attack()
            if attacker.number % 10 == 0:
                store_and_load(rank, attacker.number)
        store_and_load(rank, attacker.number + 1)
        attacker.close()
        print(f"{attacker.number} requests:", *sorted(attacker.codes.items()), sep="\n  ")
        end_holds(rank)
        eventually(lambda: not Holdings(daemon).more_than(before), lambda: Holdings(daemon).more_than(before))
        # The well-behaved engine may have had a lease before, too.
        after = eventually(lambda: now if (now := Holdings(daemon)).leases == now.reserved == 0 else None)
        assert after.rss < before.rss + RSS_GROWTH, (
            f"{after.rss - before.rss} bytes more after {attacker.number} requests"
        )
        rank.close()
        assert daemon.terminate() == 0
        daemon.wait_log("stopped")
        bad = [
            line for line in daemon.log if line["event"] in ("task failed", "stderr") or line.get("level") == "error"
        ]
        assert not bad, bad[:5]
    driven = METHODS.keys() - {"Drain"}  # which has a test of its own
    assert {name for name, _ in attacker.codes} == driven | {"local"}
    untouched = {(message.name, field.name) for message in request_types() for field in message.fields}
    untouched -= attacker.touched
    assert not untouched, f"the generator never reached {sorted(untouched)}"


def test_every_message_is_a_request_that_is_driven_or_a_reply() -> None:
    """A new kind of request that comes over another way than a method or the Hello must be driven too."""
    known = {message.full_name for message in (*request_types(), *reply_types())}
    assert {message.full_name for message in pb.DESCRIPTOR.message_types_by_name.values()} == {
        name for name in known if name.count(".") == pb.DESCRIPTOR.package.count(".") + 1
    }


def test_a_drain_with_unknown_fields_is_a_drain(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        attacker = Attacker(daemon, 0)
        attacker.call("Drain", [b"\xfa\x3e\x03abc"])
        assert rank.store("a").reason == "draining"
        attacker.close()
        rank.close()
        assert daemon.terminate() == 0
