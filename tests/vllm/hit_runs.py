"""Runs of vLLM that store, and hit, also beside daemons in which things go wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tests.harness import DaemonProcess, Gate, eventually
from tests.vllm.conftest import POOL, Truth
from tests.vllm.engine import LONG, WHOLE, Engine, EngineProcess, blocks, hits, prompt, rejoin


def until(condition: Callable[[], object], what: str, daemon: DaemonProcess | None = None) -> None:
    eventually(condition, lambda: f"{what}; {daemon and _seen_by(daemon)}")


def _seen_by(daemon: DaemonProcess) -> str:
    """What tells a store that was refused from one that never came."""
    jobs = [line for line in daemon.get("/metrics")[1].splitlines() if line.startswith("kvsidecar_jobs_total")]
    return f"{daemon.get('/status')[1]} {jobs}"


def stores_and_hits(engine: EngineProcess, daemon: DaemonProcess, truth: Truth) -> None:
    rejoin(engine, daemon)
    before = blocks(daemon)
    (cold,) = engine.generate(LONG)
    until(lambda: blocks(daemon) >= before + WHOLE // 32, "an idle engine stores all", daemon)
    until(engine.reset, "no block is held")
    (hit,) = engine.generate(LONG)
    assert (cold.cached, hit.cached) == (0, WHOLE)
    assert [cold.tokens] == [hit.tokens] == truth(LONG)
    # Attention does not see in which order the blocks behind it lie: a part of them shows that each holds its own.
    part = prompt("long", 300) + [3] * 10
    (local,) = engine.generate(part)
    assert local.cached == 288
    assert [local.tokens] == truth(part)
    until(engine.reset, "no block is held")


# -- daemons in which things go wrong, and what an engine beside them still does ------------------------------------

LAYERS = 3
"""Of the model: each is a chunk of a load within a step."""


def wrong(directory: Path, rules: str) -> DaemonProcess:
    """A daemon in which things go wrong as these failpoints say."""
    return DaemonProcess(directory, *POOL, KVSIDECAR_FAILPOINTS=rules).wait_ready()


SELF_TEST = {"store.in_flight": 2, "load.in_flight": 2}
"""Hits of a point by the copies of the daemon's own self-test."""


def failed_loads(daemon: DaemonProcess) -> int:
    return int(daemon.metric('kvsidecar_jobs_total{direction="load",outcome="failed"}'))


def works(engine: Engine, daemon: DaemonProcess, truth: Truth) -> None:
    """The engine uses this daemon: another prompt is stored, loaded, and right."""
    rejoin(engine, daemon)
    other = prompt(("works", daemon.process.pid), 200)
    engine.generate(other)
    engine.drain()
    assert engine.reset()
    hits(engine, truth, other, 192)


def fatal(point: str, number: int, gate: Gate) -> str:
    """The rule by which a daemon is killed at a hit of a point; a copier holds the copy there until it is."""
    return f"{point}@{number}={gate if 'in_flight' in point else 'kill'}"


def kill_when_held(daemon: DaemonProcess, point: str) -> None:
    def kill() -> None:
        daemon.wait_log("failpoint")
        daemon.process.kill()

    if "in_flight" in point:
        threading.Thread(target=kill, daemon=True).start()
