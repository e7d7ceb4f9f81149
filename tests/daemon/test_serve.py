"""The start, in order: probes are answered first, and the rest is imported then."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import SECONDS, DaemonProcess, Gate, environment
from tests.marks import processes

pytestmark = processes

LATE = {"cuda", "google.protobuf", "grpc", "numpy", "opentelemetry", "prometheus_client", "rich", "xxhash"}
LATE |= {f"kvsidecar.{part}" for part in ("cache", "daemon.daemon", "device", "pool", "v1")}
LATE |= {f"kvsidecar.copier.{part}" for part in ("copiers", "link", "process")}  # `launch` starts the first one early
LATE |= {f"kvsidecar.core.{part}" for part in ("jobs", "metrics", "sessions")}

# Ends itself as soon as its server listens, and says what is imported by then.
LISTENS = """
import os, sys
from kvsidecar.cli import main as cli
from kvsidecar.server import http

start = http.Probes.start

async def start_and_end(self, host, port):
    await start(self, host, port)
    print(*sys.modules, flush=True)
    os._exit(0)

http.Probes.start = start_and_end
cli.main()
"""


def held(directory: Path, gate: Gate, *flags: str) -> DaemonProcess:
    """A daemon that answers probes and imports nothing more until it may."""
    return DaemonProcess(directory, *flags, until="starting", KVSIDECAR_FAILPOINTS=f"start.load={gate}")


def test_only_what_a_probe_needs_is_imported_when_it_is_answered(short_dir: Path) -> None:
    flags = ["serve", "--device", "host", "--socket", str(short_dir / "kvs.sock"), "--http-port", "0"]
    ran = subprocess.run(
        [sys.executable, "-c", LISTENS, *flags], capture_output=True, text=True, timeout=SECONDS, env=environment()
    )
    assert ran.returncode == 0, ran.stderr
    imported = set(ran.stdout.split())
    assert {"aiohttp", "kvsidecar.server.http", "uvloop"} <= imported
    assert not LATE & imported


def test_probes_are_answered_while_the_daemon_is_imported(short_dir: Path, gate: Gate) -> None:
    with held(short_dir, gate) as daemon:
        daemon.wait_log("failpoint")
        assert daemon.get("/health") == (200, {"alive": True, "reason": ""})
        code, ready = daemon.get("/ready")
        assert (code, ready["ready"], ready["state"]) == (503, False, "starting")
        assert (ready["reason"], ready["pool_bytes"]) == ("the daemon is starting", 1 << 20)
        assert daemon.get("/metrics") == (503, "the daemon is starting\n")
        assert daemon.get("/status") == (503, {"reason": "the daemon is starting"})
        connection = http.client.HTTPConnection(daemon.http.removeprefix("http://"), timeout=SECONDS)
        connection.request("GET", "/health", headers={"Content-Length": "none"})
        assert connection.getresponse().status == 400
        connection.close()
        gate.let_pass()
        daemon.wait_ready()
        assert daemon.get("/ready")[0] == 200
        assert daemon.get("/status")[0] == 200
        assert daemon.metric('kvsidecar_refusals_total{reason="invalid_request"}') == 1, "refused before it was counted"


def test_sigterm_ends_a_daemon_that_is_being_imported_at_once(short_dir: Path, gate: Gate) -> None:
    with held(short_dir, gate) as daemon:
        daemon.wait_log("failpoint")
        assert daemon.terminate() == 0
        daemon.wait_log("stopping")
        daemon.wait_log("stopped")
    with DaemonProcess(short_dir, "--lock-wait", "0") as daemon:
        daemon.wait_ready()


def test_sighup_while_the_daemon_is_imported_reloads_when_it_is_there(short_dir: Path, gate: Gate) -> None:
    file = short_dir / "kvsidecar.toml"
    file.write_text('log_level = "debug"\nstuck_after = 60\n')
    with held(short_dir, gate, "--config", str(file)) as daemon:
        daemon.wait_log("failpoint")
        file.write_text('log_level = "debug"\nstuck_after = 61\n')
        daemon.process.send_signal(signal.SIGHUP)
        assert daemon.get("/health")[0] == 200
        gate.let_pass()
        assert daemon.wait_log("settings reloaded")["changed"] == ["stuck_after"]


@pytest.mark.parametrize("fault", ["import", "failpoint"])
def test_an_import_that_fails_is_heard_and_ends_the_daemon(short_dir: Path, fault: str) -> None:
    (short_dir / "prometheus_client.py").write_text("raise ImportError('this one is broken')")
    path = os.pathsep.join([str(short_dir), *filter(None, sys.path)])
    broken = {"PYTHONPATH": path} if fault == "import" else {"KVSIDECAR_FAILPOINTS": "start.load=raise(this is broken)"}
    with DaemonProcess(short_dir, until="starting", **broken) as daemon:
        assert daemon.process.wait(SECONDS) == 1
        last = ""
        while "Error: " not in last:
            last = daemon.wait_log("stderr")["text"]
    assert last.rstrip().endswith("ImportError: this one is broken" if fault == "import" else "Error: this is broken")


def test_a_library_without_what_is_hidden_from_it() -> None:
    """And everybody else with it: nothing of how the daemon imports is left behind."""
    script = (
        "import os, ssl; before = dict(os.environ)\n"
        "import kvsidecar.support.log, kvsidecar.server.http, structlog.dev, aiohttp.connector\n"
        "assert structlog.dev.rich is None\n"
        "import rich.console; assert dict(os.environ) == before\n"
        "assert not aiohttp.connector._SSL_CONTEXT_VERIFIED.get_ca_certs()"
    )
    for variables in ({}, {"SSL_CERT_FILE": "/etc/ssl/some.pem"}):
        ran = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment(**variables),
        )
        assert ran.returncode == 0, ran.stderr


def test_a_pool_whose_tables_need_more_memory_than_there_is_is_one_sentence(short_dir: Path) -> None:
    flags = ["serve", "--device", "host", "--socket", str(short_dir / "kvs.sock"), "--http-port", "0"]
    limited = ["prlimit", f"--as={16 << 30}", sys.executable, "-m", "kvsidecar", *flags, "--pool-size", "60TiB"]
    ran = subprocess.run(
        limited, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, env=environment()
    )
    last = ran.stderr.splitlines()[-1]
    assert last == "kvsidecar: the tables of a pool of 60 TiB alone need more memory than there is: lower --pool-size"
    assert (ran.returncode, "Traceback" in ran.stderr) == (78, False)
