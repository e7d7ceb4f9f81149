"""A real daemon and the protocol of sd_notify(3): what it says, in which order, and when it falls silent."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from kvsidecar.client import Blocks
from kvsidecar.daemon.systemd import EXTEND_SECONDS
from tests.e2e.restarts import CHUNKS
from tests.harness import FIRST, DaemonProcess, Gate, Rank, done, hashes
from tests.marks import promise
from tests.service_manager import ServiceManager

EXTEND = ("EXTEND_TIMEOUT_USEC", str(EXTEND_SECONDS * 1_000_000))
WATCHDOG_USEC = "200000"
FOR_ALL_TIME = "delay(1000)"


@promise("ready once the pool is pinned, restarted if it hangs")
@pytest.mark.parametrize("abstract", [False, True])
def test_ready_comes_after_the_whole_pin_and_each_chunk_extends_the_start(short_dir: Path, abstract: bool) -> None:
    failpoints = "pool.pin_chunk=delay(0.15);pool.pin_chunk@5=delay(0.6)"
    with (
        ServiceManager(short_dir, abstract=abstract) as manager,
        DaemonProcess(short_dir, *CHUNKS, NOTIFY_SOCKET=manager.address, KVSIDECAR_FAILPOINTS=failpoints) as daemon,
    ):
        manager.wait("READY")
        assert daemon.get("/ready")[0] == 200
        said = manager.fields("EXTEND_TIMEOUT_USEC", "READY")
        assert said == [EXTEND] * 8 + [("READY", "1")], "as many as chunks, whatever the time they took; then ready"
        texts = [text for _, text in manager.fields("STATUS")]
        assert texts[0].startswith("starting")
        assert texts[1].startswith("pinning: 0 B of 1 MiB")
        assert [text.partition(" of ")[0] for text in texts[-9:-2]] == [f"pinning: {128 * n} KiB" for n in range(1, 8)]
        assert all(text.endswith(" left") for text in texts[-9:-2])
        assert texts[-1] == "ready: 1 MiB pinned"

        assert daemon.terminate() == 0
        manager.drain()
        assert [name for name, _ in manager.fields("READY", "STOPPING")] == ["READY", "STOPPING"]
        assert manager.heard[-1]["STATUS"].startswith("stopping")
        assert int(manager.heard[-1]["EXTEND_TIMEOUT_USEC"]) > 10_000_000, "the running copies' time is not covered"
        assert manager.fields("WATCHDOG") == [], "nobody asked for it"


def test_a_pin_that_hangs_extends_nothing_any_more(short_dir: Path) -> None:
    failpoints = f"pool.pin_chunk@3={FOR_ALL_TIME}"
    with (
        ServiceManager(short_dir) as manager,
        DaemonProcess(
            short_dir, *CHUNKS,
            NOTIFY_SOCKET=manager.address, WATCHDOG_USEC=WATCHDOG_USEC, KVSIDECAR_FAILPOINTS=failpoints,
        ) as daemon,
    ):  # fmt: skip
        manager.wait("STATUS", "pinning: 384 KiB")
        assert manager.silent_for(1.0), "a timer speaks, not a pinned chunk"
        assert manager.fields("EXTEND_TIMEOUT_USEC", "READY", "WATCHDOG") == [EXTEND] * 3
        assert daemon.get("/health")[0] == 200
        daemon.process.kill()  # only that ends a pin that hangs


@promise("restarted if it hangs")
def test_an_event_loop_that_hangs_stops_the_watchdog(short_dir: Path) -> None:
    failpoints = f"store.after_reserve={FOR_ALL_TIME}"  # sleeps in the event loop
    with (
        ServiceManager(short_dir) as manager,
        DaemonProcess(
            short_dir, NOTIFY_SOCKET=manager.address, WATCHDOG_USEC=WATCHDOG_USEC, KVSIDECAR_FAILPOINTS=failpoints
        ) as daemon,
    ):
        manager.wait("READY")
        rank = Rank(daemon.wait_ready())
        manager.wait("WATCHDOG")
        manager.wait("WATCHDOG")
        rank.client.store([Blocks(0, hashes("a"), [0])])
        daemon.wait_log("failpoint")
        assert manager.silent_for(1.0), "the watchdog was fed although the event loop hangs"
        daemon.process.kill()
        daemon.process.wait()
        rank.close()


def test_a_stopped_process_stops_the_watchdog_and_a_continued_one_feeds_it(short_dir: Path) -> None:
    with (
        ServiceManager(short_dir) as manager,
        DaemonProcess(short_dir, NOTIFY_SOCKET=manager.address, WATCHDOG_USEC=WATCHDOG_USEC) as daemon,
    ):
        manager.wait("WATCHDOG")
        daemon.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{daemon.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            pass
        assert manager.silent_for(0.5)
        daemon.process.send_signal(signal.SIGCONT)
        manager.wait("WATCHDOG")


def test_a_copy_that_is_stuck_costs_its_copier_and_the_watchdog_is_fed(short_dir: Path, gate: Gate) -> None:
    failpoints = f"store.in_flight@{FIRST}={gate}"
    file = short_dir / "kvsidecar.toml"
    file.write_text("")
    with (
        ServiceManager(short_dir) as manager,
        DaemonProcess(
            short_dir, "--config", str(file),
            NOTIFY_SOCKET=manager.address, WATCHDOG_USEC=WATCHDOG_USEC, KVSIDECAR_FAILPOINTS=failpoints,
        ) as daemon,
    ):  # fmt: skip
        rank = Rank(daemon.wait_ready())
        file.write_text("stuck_after = 3")  # longer than a machine stands still; comes into force with SIGHUP
        daemon.process.send_signal(signal.SIGHUP)
        manager.wait("RELOADING")
        manager.wait("READY")
        (copier,) = daemon.copiers()
        rank.fill(0, "a")
        stuck = rank.finish(rank.client.store([Blocks(0, hashes("a"), [0])]))
        assert stuck.reason == "device_lost"
        assert "a store has been in flight" in stuck.error
        manager.wait("STATUS", "ready")
        manager.wait("WATCHDOG")
        assert daemon.get("/health")[0] == 200
        assert copier not in daemon.copiers()
        rank.close()


def test_sighup_brings_what_can_change_into_force_and_names_what_cannot(short_dir: Path) -> None:
    file = short_dir / "kvsidecar.toml"
    file.write_text("")
    with (
        ServiceManager(short_dir) as manager,
        DaemonProcess(short_dir, "--config", str(file), NOTIFY_SOCKET=manager.address) as daemon,
    ):
        manager.wait("READY")
        daemon.wait_ready()
        sent = time.monotonic_ns() // 1000
        file.write_text('store_chunk = "8MiB"\nstuck_after = 5\nlease_max = 5')
        daemon.process.send_signal(signal.SIGHUP)
        reloading = manager.wait("RELOADING")
        assert sent <= int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        assert daemon.wait_log("settings reloaded")["changed"] == ["store_chunk", "stuck_after"]
        assert daemon.wait_log("some settings need a restart")["options"] == ["lease_max"]
        over = manager.wait("READY")
        assert "lease_max" in over["STATUS"]

        file.write_text("store_chunk = 5")
        daemon.process.send_signal(signal.SIGHUP)
        manager.wait("RELOADING")
        assert "store_chunk=5" in daemon.wait_log("settings not reloaded")["reason"]
        assert "store_chunk=5" in manager.wait("READY")["STATUS"]
        rank = Rank(daemon)
        done(rank.store("a"))
        rank.close()
        assert daemon.terminate() == 0
