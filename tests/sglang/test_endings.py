"""The daemon learns of the ends of requests and sessions from a real engine, and evicts accordingly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import DaemonProcess, eventually
from tests.sglang.conftest import POOL
from tests.sglang.engine import WHOLE, SGLangProcess, join
from tests.vllm.engine import LONG, Prompt, prompt

FILLING = 60
"""Prompts at most, of which a third fills the pool."""


@pytest.fixture
def daemon(home: Path) -> Iterator[DaemonProcess]:
    """By rhythm. Whether it also declines what is new depends on what has returned so far."""
    with DaemonProcess(home, *POOL, "--eviction", "rhythm") as process:
        yield process.wait_ready()


def ask(engine: SGLangProcess, what: Prompt, **options: Any) -> None:
    """Until the daemon has been told of the end."""
    before = engine.touches()
    assert engine.ask(what, **options).status == 200
    eventually(lambda: engine.touches() > before, "the daemon is told")


def evicted(daemon: DaemonProcess) -> float:
    return daemon.metric("kvsidecar_evicted_blocks_total")


def fill(engine: SGLangProcess, daemon: DaemonProcess, name: str) -> None:
    """Until pages are evicted, by prompts that together take less room than one that is over gives: stores that are
    still under way evict more."""
    for number in range(FILLING):
        engine.ask(prompt((name, daemon.process.pid, number), 200))
        if evicted(daemon):
            return


def has(engine: SGLangProcess, what: Prompt) -> int:
    """Tokens that the daemon has of a prompt."""
    engine.forget()
    return engine.ask(what, tokens=1).host


def test_what_the_engine_itself_has_is_used_in_the_daemon_too(engine: SGLangProcess, home: Path) -> None:
    """It is never looked up; by the order of the stores it would go first."""
    with DaemonProcess(home, *POOL) as daemon:
        join(engine, daemon.wait_ready())
        ask(engine, LONG)
        number = 0
        while evicted(daemon) < WHOLE / 16:
            assert number < FILLING, "the pool is not full"
            engine.ask(prompt(("fresh", daemon.process.pid, number), 600))
            ask(engine, LONG)
            number += 1
        assert has(engine, LONG) == WHOLE


def test_a_prompt_that_is_over_makes_room_for_others(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    join(engine, daemon)
    over, tool = prompt("over", 700), prompt("tool", 700)
    ask(engine, LONG, next_use={"pause": "10min"})
    ask(engine, tool, next_use={"pause": "10min", "tool_pause": 5})
    ask(engine, over, next_use={"over": True})
    fill(engine, daemon, "after what is over")
    assert evicted(daemon)
    assert (has(engine, LONG), has(engine, tool)) == (WHOLE, WHOLE)
    assert has(engine, over) < WHOLE
    counters = engine._call("counters")
    assert (counters["pauses"], counters["bad_pauses"]) == (3, 0)


def test_a_session_that_is_closed_makes_room_for_others(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    join(engine, daemon)
    closed = prompt("closed", 700)
    ask(engine, LONG)
    engine.open_session("s")
    ask(engine, closed, session="s")
    before = engine.touches()
    engine.close_session("s")
    eventually(lambda: engine.touches() > before, "the daemon is told")
    fill(engine, daemon, "after the session")
    assert evicted(daemon)
    assert has(engine, LONG) == WHOLE
    assert has(engine, closed) < WHOLE
