"""All attacks at once, of one user: each honest lookup is answered, and the memory comes back but for notes. The times
are printed: with seven busy attackers they are as much the scheduler's of this machine as the daemon's."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvsidecar.core.notes import MAX_NOTES_BYTES
from kvsidecar.server.grpc_front import USER_BYTES
from kvsidecar.server.partial_messages import MAX_PARTIAL_BYTES
from tests.attacks.support import attack
from tests.e2e.test_attacks import port_of
from tests.e2e.test_limits import rss_mib
from tests.harness import DaemonProcess, Rank, done, eventually
from tests.publisher.process import PublisherProcess

ON_SOCKETS = ("headers_bomb", "half_sent_calls", "unfinished_hellos", "colliding_hashes", "publisher_memory")
ATTACK_SECONDS = 20.0
STATED_MIB = (USER_BYTES + MAX_PARTIAL_BYTES + MAX_NOTES_BYTES) / 2**20
"""What docs/security.md allows one user of the memory of the daemon: gRPC connections, incomplete messages, notes."""

SLACK_MIB = 64
"""What the allocator keeps, and structures around the notes."""


def lookup_seconds(rank: Rank, count: int) -> list[float]:
    """How long lookups take, sorted. Whether they hit is not asked: the attackers store, too, and evict what is old."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        rank.hits("a")
        found.append(time.perf_counter() - began)
    return sorted(found)


def said(seconds: list[float]) -> str:
    half, most, last = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100], seconds[-1]
    return f"p50 {half * 1e3:.2f} ms, p99 {most * 1e3:.2f} ms, most {last * 1e3:.2f} ms"


@pytest.mark.alone
def test_all_attacks_at_once_leave_lookups_answered_and_give_the_memory_back(short_dir: Path) -> None:
    with DaemonProcess(short_dir, "--log-level", "info") as daemon, PublisherProcess(short_dir, daemon.socket):
        daemon.wait_ready()
        rank = Rank(daemon)
        done(rank.store("a"))
        lookup_seconds(rank, 300)
        idle = lookup_seconds(rank, 1000)
        start, most, busy = rss_mib(daemon), 0.0, list[float]()
        with ExitStack() as stack:
            running = [stack.enter_context(attack(name, short_dir, ATTACK_SECONDS)) for name in ON_SOCKETS]
            running.append(stack.enter_context(attack("scrapers", port_of(daemon), ATTACK_SECONDS)))
            began = time.monotonic()
            eventually(lambda: daemon.refused("limit") > 0)
            while any(each.process.poll() is None for each in running) and time.monotonic() < began + ATTACK_SECONDS:
                busy += lookup_seconds(rank, 100)
                most = max(most, rss_mib(daemon) - start)
        busy.sort()
        print(f"idle: {said(idle)}; attacked: {said(busy)}; {most:.0f} MiB of {STATED_MIB:.0f} were taken")
        assert most < STATED_MIB
        kept = MAX_NOTES_BYTES / 2**20 + SLACK_MIB
        eventually(lambda: rss_mib(daemon) - start < kept, lambda: f"{rss_mib(daemon) - start:.0f} MiB are kept")
        print(f"{rss_mib(daemon) - start:.0f} MiB are kept after it")
        assert daemon.get("/health")[0] == daemon.get("/ready")[0] == 200
        rank.close()
        assert daemon.terminate() == 0
