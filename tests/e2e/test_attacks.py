"""Clients that attack: who is honest is served all the same. Each attack is a process, of `benchmarks/attacks`."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.attacks.fetch_flood import NAMES
from benchmarks.attacks.lookup_flood import HASHES
from benchmarks.attacks.lookup_times import Asked, Waits
from benchmarks.attacks.support import attack
from kvsidecar.server.arrivals import TABLE_SHARE
from kvsidecar.server.http_connection import MAX_CONNECTIONS
from tests.e2e.leftovers import open_fds, port_of
from tests.e2e.policies import daemon_for_others, needs_root
from tests.e2e.unfinished import ended
from tests.harness import SECONDS, DaemonProcess, Rank, done, eventually
from tests.marks import daemon_may_open

TABLE = 4096
"""Descriptors that a daemon may have here: few, so that an attack of any user can fill them."""


@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="needs root: of others the kernel refuses more descriptors under way, the daemon's own too",
)
@daemon_may_open(TABLE)
def test_descriptors_of_unfinished_hellos_leave_room_for_honest_ones(short_dir: Path) -> None:
    few = ("sh", "-c", f'ulimit -n {TABLE}; exec "$@"', "sh")
    with DaemonProcess(short_dir, under=few) as daemon:
        daemon.wait_ready()
        before = open_fds(daemon)
        with attack("unfinished_hellos", short_dir, SECONDS):
            eventually(lambda: open_fds(daemon) > before + TABLE / 4)
            most = 0
            for number in range(45):
                rank = Rank(daemon, instance=str(number))
                done(rank.store(number))
                rank.close()
                most = max(most, open_fds(daemon))
            assert most < before + TABLE * TABLE_SHARE
            assert daemon.refused("limit") > 0
            assert len([line for line in daemon.read_so_far() if line["event"] == "attach connection refused"]) < 200
        eventually(lambda: open_fds(daemon) <= before + 1)
        assert daemon.terminate() == 0


def test_http_clients_that_never_read_leave_descriptors_for_others(short_dir: Path) -> None:
    few = ("sh", "-c", f'ulimit -n {2 * MAX_CONNECTIONS}; exec "$@"', "sh")
    with DaemonProcess(short_dir, under=few) as daemon:
        daemon.wait_ready()
        before = open_fds(daemon)
        with ExitStack() as stack:
            for done_with in (MAX_CONNECTIONS, 2 * MAX_CONNECTIONS):
                for _ in range(MAX_CONNECTIONS):
                    client = stack.enter_context(socket.socket())
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                    client.connect(("127.0.0.1", port_of(daemon)))
                    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 30)
                eventually(lambda all_=done_with: ended(daemon) >= all_)
            assert daemon.get("/health")[0] == 200
            done(Rank(daemon).store("a"))
            eventually(lambda: open_fds(daemon) < before + 20)
        assert daemon.terminate() == 0


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_what_does_not_parse_is_counted_and_seldom_logged(short_dir: Path, transport: str) -> None:
    """At most one line in a second of each kind, without a stack trace, and none that is not JSON."""
    with DaemonProcess(short_dir) as daemon:
        daemon.wait_ready()
        began, before = time.monotonic(), len(daemon.read_so_far())
        with attack("bad_gzip", port_of(daemon) if transport == "http" else short_dir, 3) as running:
            did = running.did()
        said = daemon.read_so_far()[before:]
        seconds = time.monotonic() - began
        assert did["requests"] > 30 * seconds, "too few to be a flood"
        counted = daemon.refused("invalid_request") + daemon.refused("register_refused")
        assert counted >= did["requests"] / 3 if transport == "grpc" else counted >= did["requests"] - 1
        assert not [line for line in said if "exception" in line or line["event"] == "stderr"]
        kinds = Counter(line["event"] for line in said)
        assert kinds
        assert max(kinds.values()) <= seconds + 1, kinds
        rank = Rank(daemon)
        done(rank.store("a"))
        rank.close()
        assert daemon.terminate() == 0


def lookup_seconds(rank: Rank, count: int = 300) -> list[float]:
    """How long lookups take, sorted."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        assert rank.hits("a") == 1
        found.append(time.perf_counter() - began)
    return sorted(found)


@pytest.mark.alone
def test_scrapers_do_not_slow_lookups(short_dir: Path) -> None:
    with DaemonProcess(short_dir, "--log-level", "info") as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        done(rank.store("a"))
        lookup_seconds(rank)
        idle = lookup_seconds(rank, 1000)
        before = open_fds(daemon)
        with attack("scrapers", port_of(daemon), SECONDS):
            eventually(lambda: open_fds(daemon) > before + 16)
            busy = lookup_seconds(rank, 1000)
            texts = [f"p50 {each[500] * 1e3:.2f} ms, p99 {each[990] * 1e3:.2f} ms, most {each[-1] * 1e3:.2f} ms"
                     for each in (idle, busy)]  # fmt: skip
            print(f"idle: {texts[0]}; under scrapers: {texts[1]}")
            assert busy[500] < 10 * idle[500]
            assert daemon.get("/health")[0] == daemon.get("/ready")[0] == 200
            eventually(lambda: shared(daemon))
        rank.close()
        assert daemon.terminate() == 0


@needs_root
@pytest.mark.alone
def test_another_users_flood_of_lookups_does_not_delay_lookups(short_dir: Path) -> None:
    """Each iteration of the loop took 64 requests of each connection: tens of milliseconds."""
    with daemon_for_others(short_dir, "--log-level", "info") as daemon:
        rank = Rank(daemon)
        slower = slowed_by(
            "lookup_flood",
            rank,
            daemon,
            lambda: daemon.metric('kvsidecar_lookup_blocks_total{result="hit"}') > 100 * HASHES,
        )
    assert slower < 30


@needs_root
@pytest.mark.alone
def test_another_users_flood_of_fetches_does_not_delay_lookups(short_dir: Path) -> None:
    disk = ("--disk-dir", str(short_dir / "disk"), "--disk-size", "64MiB")
    with daemon_for_others(short_dir, "--pool-size", "4MiB", *disk) as daemon:
        rank = Rank(daemon)
        ids = list(range(rank.layout.num_blocks))
        for start in range(0, len(NAMES), len(ids)):
            names = NAMES[start : start + len(ids)]
            done(rank.store(*names, at=ids[: len(names)]))
            done(rank.load(*names, at=ids[: len(names)]))  # the tier keeps what is used again
        eventually(lambda: daemon.get("/status")[1]["tiers"][0]["blocks"] > len(NAMES) // 2)
        slower = slowed_by("fetch_flood", rank, daemon, lambda: daemon.get("/status")[1]["tiers"][0]["read_bytes"] > 0)
    assert slower < 10


def slowed_by(name: str, rank: Rank, daemon: DaemonProcess, begun: Callable[[], bool]) -> float:
    """How many times as long a lookup in the middle takes under this attack as before it. Ends the daemon.

    Args:
        begun: whether the attack has made the daemon work.
    """
    done(rank.store("a"))
    with ExitStack() as stack:
        asked, own = Asked(daemon, rank, Waits(daemon.process.pid)), Waits(os.getpid())
        stack.callback(asked.waits.close)
        stack.callback(own.close)
        idle = middle(asked, own)
        with attack(name, Path(daemon.socket).parent, SECONDS):
            eventually(begun)
            busy = middle(asked, own)
    rank.close()
    assert daemon.terminate() == 0
    if idle is None or busy is None:
        pytest.skip("the machine was too busy with other things: nothing was said about the times of lookups")
    print(f"idle: {idle * 1e3:.2f} ms in the middle; under {name}: {busy * 1e3:.2f} ms")
    return busy / idle


def middle(asked: Asked, own: Waits, lookups: int = 1000) -> float | None:
    """Of the times of these lookups, in seconds; None if too few were without a wait of this process."""
    for each in (asked.waits, own):
        each.look()
    for _ in range(lookups):
        asked.ask(own)
    found = asked.taken()
    return found[len(found) // 2] if len(found) > lookups // 10 else None


def shared(daemon: DaemonProcess) -> bool:
    """Whether an answer is that of somebody else's question."""
    first, second = daemon.get("/status")[1], daemon.get("/status")[1]
    return bool(first["uptime_seconds"] == second["uptime_seconds"])
