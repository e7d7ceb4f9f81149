"""SIGHUP at a terminal; apart from one it reloads: test_service_manager.py. SIGTERM: test_readiness.py. And SIGSTOP."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from kvsidecar.client import Blocks, Client
from tests.harness import FIRST, SECONDS, DaemonProcess, Gate, Rank, done, eventually, hashes
from tests.terminal import Terminal

NOHUP = ("sh", "-c", 'trap "" HUP; exec "$@"', "nohup")


def state(http: str) -> str:
    """As /ready says it."""
    try:
        with urllib.request.urlopen(http + "/ready", timeout=SECONDS) as reply:
            return str(json.load(reply)["state"])
    except urllib.error.HTTPError as error:
        return str(json.load(error)["state"])


@pytest.mark.parametrize("stdin", [True, False], ids=["foreground", "standard input elsewhere"])
def test_a_terminal_that_is_closed_stops_the_daemon_as_sigterm_does(short_dir: Path, gate: Gate, stdin: bool) -> None:
    path = str(short_dir / "kvs.sock")
    flags = ("--device", "host", "--pool-size", "1MiB", "--http-port", "0", "--drain-timeout", str(SECONDS))
    failpoints = f"store.in_flight@{FIRST}={gate}"
    with Terminal(
        "serve", *flags, "--socket", path, columns=200, stdin=stdin, KVSIDECAR_FAILPOINTS=failpoints
    ) as terminal:
        drawn = terminal.until("] ready")
        found = re.search(r"http://127\.0\.0\.1:\d+", drawn)
        assert found is not None
        rank = Rank(None, client=Client(path, timeout=SECONDS, step_budget=SECONDS))
        rank.fill(0, "a")
        job = rank.client.store([Blocks(0, hashes("a"), [0])])
        terminal.until("failpoint")
        terminal.hang_up()
        eventually(lambda: state(found[0]) == "draining")
        terminal.process.send_signal(signal.SIGHUP)  # a shell sends one, and the kernel another when the shell ends
        gate.let_pass()
        done(rank.finish(job))
        assert terminal.process.wait(SECONDS) == 0
        rank.close()
    assert sorted(each.name for each in short_dir.glob("kvs.*")) == ["kvs.sock.lock"]


def test_a_daemon_that_is_to_outlive_its_terminal_reloads(short_dir: Path) -> None:
    """As nohup(1) starts it: with the signal ignored."""
    file = short_dir / "kvsidecar.toml"
    file.write_text("stuck_after = 4\n")
    flags = ("--device", "host", "--pool-size", "1MiB", "--http-port", "0", "--config", str(file))
    with Terminal("serve", *flags, "--socket", str(short_dir / "kvs.sock"), columns=200, under=NOHUP) as terminal:
        terminal.until("] ready")
        file.write_text("stuck_after = 5\n")
        terminal.process.send_signal(signal.SIGHUP)
        terminal.until("changed=['stuck_after']")
        terminal.press(b"\x03")
        assert terminal.end() == 0


MODULES = {"copier": "kvsidecar.copier.process", "tier": "kvsidecar.tiers.process"}


@pytest.mark.parametrize("kind", MODULES)
def test_what_is_stopped_in_its_first_instants_holds_no_lock(short_dir: Path, pool_dir: Path, kind: str) -> None:
    flags = ["--disk-dir", str(short_dir / "disk"), "--disk-size", "1MiB", "--pool-dir", str(pool_dir)]
    with DaemonProcess(short_dir, *flags, until="starting" if kind == "copier" else "listening") as daemon:
        while not (stopped := daemon.children(MODULES[kind])):  # no pause: it asks for the signal soon
            assert daemon.process.poll() is None
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        daemon.process.kill()
        daemon.process.wait()
        try:
            with DaemonProcess(short_dir, *flags, "--lock-wait", "2") as after:
                after.wait_ready()
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        daemon.read_log()  # until all that had its standard error has ended: those see that the daemon is dead
