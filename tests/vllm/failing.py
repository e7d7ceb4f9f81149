"""Daemons in which things go wrong, and what an engine beside them still does."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.harness import DaemonProcess, Gate
from tests.vllm.conftest import POOL, Truth
from tests.vllm.engine import Engine, prompt, rejoin

LONG = prompt("long", 700)
WHOLE = 672
LAYERS = 3
"""Of the model: each is a chunk of a load within a step."""


def wrong(directory: Path, rules: str) -> DaemonProcess:
    """A daemon in which things go wrong as these failpoints say."""
    return DaemonProcess(directory, *POOL, KVSIDECAR_FAILPOINTS=rules).wait_ready()


SELF_TEST = {"store.in_flight": 2, "load.in_flight": 2}
"""Hits of a point by the copies of the daemon's own self-test."""


def ask_again(engine: Engine) -> None:
    """Store the long prompt and forget it, so that the next request for it must load."""
    engine.generate(LONG)
    engine.drain()
    assert engine.reset()


def failed_loads(daemon: DaemonProcess) -> int:
    return int(daemon.metric('kvsidecar_jobs_total{direction="load",outcome="failed"}'))


def works(engine: Engine, daemon: DaemonProcess, truth: Truth) -> None:
    """The engine uses this daemon: another prompt is stored, loaded, and right."""
    rejoin(engine, daemon)
    other = prompt(("works", daemon.process.pid), 200)
    engine.generate(other)
    engine.drain()
    assert engine.reset()
    (hit,) = engine.generate(other)
    assert hit.cached == 192
    assert [hit.tokens] == truth(other)


def fatal(point: str, number: int, gate: Gate) -> str:
    """The rule by which a daemon is killed at a hit of a point; a copier holds the copy there until it is."""
    return f"{point}@{number}={gate if 'in_flight' in point else 'kill'}"


def kill_when_held(daemon: DaemonProcess, point: str) -> None:
    def kill() -> None:
        daemon.wait_log("failpoint")
        daemon.process.kill()

    if "in_flight" in point:
        threading.Thread(target=kill, daemon=True).start()
