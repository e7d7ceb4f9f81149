"""The whole story of readiness, over real sockets: pinning, ready, failing, draining."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from kvsidecar.client import AttachRefused, Blocks, HostBuffer, LookupMode, Outcome, State
from kvsidecar.support.file_lock import RUNNING_SECONDS, try_lock
from tests.e2e.restarts import CHUNKS, grpc_health
from tests.harness import (
    FIRST,
    LAYERS,
    NAMESPACE,
    NUM_BLOCKS,
    ROW_BYTES,
    SECONDS,
    DaemonProcess,
    Gate,
    Rank,
    done,
    environment,
    eventually,
    hashes,
    layout,
    wait_until_ready,
)
from tests.marks import both_protocols, lent_daemon, promise

pytestmark = lent_daemon

WAITING = "waiting for another daemon to exit"


@promise("engines can attach while the pool is being pinned")
def test_while_the_pool_is_pinned_everything_answers_and_nothing_waits(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, *CHUNKS, KVSIDECAR_FAILPOINTS=f"pool.pin_chunk={gate}") as daemon:
        daemon.wait_log("failpoint")
        rank = Rank(daemon)

        assert rank.client.readiness.state is State.PINNING
        assert daemon.get("/health") == (200, {"alive": True, "reason": ""})
        code, ready = daemon.get("/ready")
        assert code == 503
        assert ready["state"] == "pinning"
        assert ready["ready"] is False
        assert ready["pool_bytes"] == 1 << 20
        assert ready["reason"] == "the pool is being pinned"
        assert grpc_health(daemon) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert daemon.metric("kvsidecar_ready") == 0

        lookup = rank.client.lookup(NAMESPACE, {0: hashes("a", "b")}, mode=LookupMode.BITMAP, lease_seconds=5)
        assert not lookup.ready
        assert lookup.groups[0].found == (False, False)
        assert lookup.lease is None
        declined = rank.store("a")
        assert (declined.outcome, declined.reason) == (Outcome.DECLINED, "not_ready")
        assert daemon.refused("not_ready") == 2
        assert rank.client.readiness.state is State.PINNING

        for chunk in range(1, 8):
            gate.let_pass()
            pinned = chunk << 17
            eventually(lambda pinned=pinned: rank.client.readiness.pinned_bytes == pinned, f"chunk {chunk} is told")  # type: ignore[misc]
        _, ready = daemon.get("/ready")
        assert ready["pinned_bytes"] == daemon.metric("kvsidecar_pool_pinned_bytes") == 7 << 17
        assert ready["pin_bytes_per_second"] > 0
        assert ready["eta_seconds"] >= 0
        gate.let_pass()
        wait_until_ready(rank.client)

        assert daemon.get("/ready")[0] == 200
        assert grpc_health(daemon) == grpc_health(daemon, "") == health_pb2.HealthCheckResponse.SERVING
        assert daemon.locked_kib() == 1024
        done(rank.store("a"))
        assert rank.hits("a") == 1
        rank.close()


@promise("If the whole pool cannot be pinned, the daemon keeps running but is not ready")
def test_a_pin_that_fails_leaves_a_live_daemon_that_says_why_everywhere(short_dir: Path) -> None:
    failpoint = "pool.pin_chunk@3=raise(no more pages)"
    with DaemonProcess(short_dir, *CHUNKS, KVSIDECAR_FAILPOINTS=failpoint) as daemon:
        logged = daemon.wait_log("not ready")["reason"]
        assert "no more pages" in logged
        assert "chunk 4 of 8" in logged or "chunk 3 of 8" in logged

        assert daemon.locked_kib() == 0, "the chunks before the failed one were not given back"
        assert daemon.get("/health")[0] == 200
        code, ready = daemon.get("/ready")
        assert (code, ready["state"], ready["reason"], ready["pinned_bytes"]) == (503, "failed", logged, 0)
        assert daemon.get("/status")[1]["readiness"]["reason"] == logged
        assert daemon.metric('kvsidecar_state{state="failed"}') == 1
        assert grpc_health(daemon) == health_pb2.HealthCheckResponse.NOT_SERVING

        rank = Rank(daemon)
        assert rank.client.readiness.state is State.FAILED
        assert rank.client.readiness.reason == logged
        assert rank.store("a").reason == "not_ready"
        assert rank.hits("a") == 0
        rank.close()
        assert daemon.terminate() == 0


def test_sigterm_while_pinning_stops_behind_the_chunk_until_which_the_probes_answer(
    short_dir: Path, gate: Gate
) -> None:
    with DaemonProcess(short_dir, *CHUNKS, KVSIDECAR_FAILPOINTS=f"pool.pin_chunk={gate}") as daemon:
        daemon.wait_log("failpoint")
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_log("stopping")
        eventually(lambda: not any(Path(path).exists() for path in (daemon.socket, daemon.socket + ".attach")))
        for _ in range(3):
            code, ready = daemon.get("/ready")
            assert (code, ready["state"], ready["reason"]) == (503, "draining", "the daemon is shutting down")
            assert daemon.get("/health") == (200, {"alive": True, "reason": ""})
            assert daemon.metric('kvsidecar_state{state="draining"}') == 1
            assert daemon.get("/status")[1]["readiness"]["state"] == "draining"
        gate.let_pass()  # the chunk that it is at, and none of the seven that would come
        assert daemon.process.wait(SECONDS) == 0


@promise("the daemon finishes running jobs and accepts no new work")
@both_protocols
def test_a_drain_that_is_taken_back_leaves_everything_as_it_was(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    done(rank.store("a"))
    rank.client.drain()
    assert rank.store("b").reason == "draining"
    code, ready = daemon.get("/ready")
    assert (code, ready["state"], daemon.get("/health")[0]) == (503, "draining", 200)
    late = daemon.client(name="late")
    buffer = HostBuffer(LAYERS * NUM_BLOCKS * ROW_BYTES)
    kv = {"namespace": NAMESPACE, "buffers": buffer.kv_buffers(), "groups": [layout()]}
    with pytest.raises(AttachRefused, match="draining"):
        late.attach(instance="late", **kv)
    late.close()
    waiting = daemon.client(name="waiting")
    waiting.attach(instance="waiting", retry=True, **kv)
    assert rank.client.cancel_drain()

    assert daemon.get("/ready")[0] == 200
    assert grpc_health(daemon) == grpc_health(daemon, "") == health_pb2.HealthCheckResponse.SERVING
    assert daemon.metric('kvsidecar_state{state="ready"}') == 1
    wait_until_ready(rank.client)
    assert rank.hits("a") == 1, "what was stored is there"
    done(rank.load("a", at=[5]))
    assert rank.holds(5, "a")
    done(rank.store("b"))
    wait_until_ready(waiting)
    assert not rank.client.cancel_drain(), "it was not draining"
    daemon.wait_log("drain cancelled")
    for client in (waiting, rank.client):
        client.close()
    buffer.close()


def test_a_drain_of_a_daemon_that_pins_can_be_taken_back(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, *CHUNKS, KVSIDECAR_FAILPOINTS=f"pool.pin_chunk@3={gate}") as daemon:
        daemon.wait_log("failpoint")
        with daemon.client() as client:
            client.drain()
            assert daemon.get("/ready")[1]["state"] == "draining"
            gate.let_pass()
            daemon.wait_ready()
            assert daemon.get("/ready")[0] == 503, "the pin ended below the drain"
            assert client.cancel_drain()
        assert daemon.get("/ready")[0] == 200
        assert daemon.locked_kib() == 1024


def test_a_shutdown_is_not_taken_back(short_dir: Path, gate: Gate) -> None:
    wait = ("--drain-timeout", str(SECONDS))
    with DaemonProcess(short_dir, *wait, KVSIDECAR_FAILPOINTS=f"store.in_flight@{FIRST}={gate}") as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        rank.fill(0, "a")
        job = rank.client.store([Blocks(0, hashes("a"), [0])])
        daemon.wait_log("failpoint")
        with daemon.client() as operator:
            operator.drain()
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_log("stopping")
            assert not operator.cancel_drain()
        gate.let_pass()
        done(rank.finish(job))
        assert daemon.process.wait(SECONDS) == 0
        rank.close()


@promise("drained when stopped")
def test_sigterm_ends_streams_removes_sockets_and_exits_with_0(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    done(rank.store("a"))
    assert daemon.terminate() == 0
    lost = rank.finish(rank.client.store([]))
    assert lost.reason == "daemon_lost"
    assert sorted(path.name for path in Path(daemon.socket).parent.iterdir()) == ["kvs.sock.lock"]
    rank.close()


@promise("the first is not affected")
@pytest.mark.parametrize("seconds", ["0", "600"])
def test_a_second_daemon_on_the_same_socket_is_refused_soon_and_harms_nothing(
    daemon: DaemonProcess, seconds: str
) -> None:
    """However long it would wait for a daemon that ends."""
    command = [sys.executable, "-m", "kvsidecar", "serve", "--device", "host", "--socket", daemon.socket]
    second = subprocess.run(
        [*command, "--pool-size", "1MiB", "--http-port", "0", "--lock-wait", seconds],
        capture_output=True, text=True, timeout=SECONDS, env=environment(),
    )  # fmt: skip
    assert second.returncode == 73
    assert f"another kvsidecar serves {daemon.socket} (pid {daemon.process.pid} on " in second.stderr
    assert second.stderr.count(WAITING) == (1 if seconds != "0" else 0)
    assert "Traceback" not in second.stderr
    rank = Rank(daemon)
    wait_until_ready(rank.client)
    done(rank.store("a"))
    rank.close()


def test_a_second_daemon_is_refused_while_the_first_one_starts(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, until="starting", KVSIDECAR_FAILPOINTS=f"start.load={gate}") as first:
        first.wait_log("failpoint")
        with DaemonProcess(short_dir, "--lock-wait", "600", until=WAITING) as second:
            assert second.process.wait(SECONDS) == 73


def test_a_daemon_waits_for_the_end_of_the_one_before_it_and_never_pins_beside_it(short_dir: Path, gate: Gate) -> None:
    held_copy = f"store.in_flight@{FIRST}={gate}"
    with DaemonProcess(short_dir, "--drain-timeout", "600", KVSIDECAR_FAILPOINTS=held_copy) as first:
        rank = Rank(first.wait_ready())
        rank.fill(0, "a")
        job = rank.client.store([Blocks(0, hashes("a"), [0])])
        first.wait_log("failpoint")
        first.process.send_signal(signal.SIGTERM)
        first.wait_log("stopping")
        with DaemonProcess(short_dir, "--lock-wait", "600", until=WAITING) as second:
            assert second.log[-1]["holder"].startswith(f"pid {first.process.pid} on ")
            assert second.log[-1]["wait_seconds"] == 600
            time.sleep(2 * RUNNING_SECONDS)  # after which one that stays is not waited for any more
            assert second.process.poll() is None
            assert (first.locked_kib(), second.locked_kib()) == (1024, 0)
            gate.let_pass()
            eventually(lambda: second.locked_kib(), pause=0.0)
            assert first.locked_kib() == 0, "two pools were pinned at once"
            assert first.process.wait(SECONDS) == 0
            assert rank.finish(job).outcome is Outcome.DONE, "the copy was not finished, or its client not told"
            rank.close()
            late = Rank(second.wait_ready())
            done(late.store("b"))
            late.close()
            assert second.terminate() == 0


def test_sigterm_ends_a_daemon_that_waits_for_another_one(short_dir: Path) -> None:
    with (short_dir / "kvs.sock.lock").open("w+") as lock:
        assert try_lock(lock.fileno())  # as the copier of a daemon that was killed
        with DaemonProcess(short_dir, "--lock-wait", "600", until=WAITING) as second:
            assert second.terminate() == 0


def test_a_daemon_waits_for_what_is_left_of_one_that_was_killed(short_dir: Path) -> None:
    with (short_dir / "kvs.sock.lock").open("w+") as lock:
        assert try_lock(lock.fileno())
        with DaemonProcess(short_dir, until=WAITING) as second:
            time.sleep(2 * RUNNING_SECONDS)
            assert second.process.poll() is None
            lock.close()
            second.wait_ready()


@promise("a new daemon starts empty")
def test_a_killed_daemons_socket_is_taken_over(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as first:
        first.wait_ready()
        first.process.kill()
        first.process.wait()
        assert Path(first.socket).exists()
    with DaemonProcess(short_dir) as second:
        second.wait_ready()
        rank = Rank(second)
        done(rank.store("a"))
        rank.close()


@pytest.mark.parametrize("mode", ["0600", "0660"])
def test_both_sockets_have_the_configured_mode(short_dir: Path, mode: str) -> None:
    with DaemonProcess(short_dir, "--socket-mode", mode) as daemon:
        for path in (daemon.socket, daemon.socket + ".attach"):
            assert f"{Path(path).stat().st_mode & 0o777:04o}" == mode
