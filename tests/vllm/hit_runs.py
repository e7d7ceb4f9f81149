"""Runs of vLLM that store, and hit."""

from __future__ import annotations

from collections.abc import Callable

from tests.harness import DaemonProcess, eventually
from tests.vllm.conftest import Truth
from tests.vllm.engine import EngineProcess, blocks, prompt, rejoin

LONG = prompt("long", 700)


WHOLE = 672


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
