"""What is stored later than its request: what lazy mode leaves, what a step had no room for, what a daemon declined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.command import run
from tests.harness import SECONDS, DaemonProcess, Gate, eventually
from tests.marks import promise
from tests.router import View
from tests.vllm.conftest import POOL, Truth
from tests.vllm.engine import LONG, WHOLE, Engine, EngineProcess, blocks, hits, join, joined, kvsidecar, prompt, running
from tests.vllm.models import BLOCK

OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The engine's core, as it is by default: it steps for as long as the connector says that there is something to do."""


def lazy(daemon: DaemonProcess) -> dict[str, Any]:
    """Next to nothing is stored because it is about to be evicted."""
    return kvsidecar(daemon.socket, store_mode="lazy", lazy_watermark=1)


def another_engine_hits(model: str, daemon: DaemonProcess, truth: Truth) -> None:
    with joined(daemon, model) as engine:
        hits(engine, truth)


@pytest.mark.alone
def test_an_idle_engine_in_lazy_mode_has_stored_all_when_it_is_killed(
    model: str, daemon: DaemonProcess, truth: Truth
) -> None:
    with EngineProcess(model, lazy(daemon), OWN_PROCESS) as engine:
        engine.wait_started()
        join(engine, daemon)
        before = blocks(daemon)
        engine.generate(LONG)
        eventually(lambda: blocks(daemon) >= before + WHOLE // BLOCK, "an idle engine stores what it has")
        engine.kill()
    another_engine_hits(model, daemon, truth)


@pytest.mark.alone
def test_an_engine_in_lazy_mode_that_is_ended_while_it_is_busy_stores_what_it_has(
    model: str, daemon: DaemonProcess, truth: Truth
) -> None:
    with EngineProcess(model, lazy(daemon), OWN_PROCESS) as engine:
        engine.wait_started()
        join(engine, daemon)
        before = blocks(daemon)
        engine.begin(LONG, tokens=300)
        engine.end()
        assert blocks(daemon) >= before + WHOLE // BLOCK
    another_engine_hits(model, daemon, truth)


@promise("blocks computed while there was no daemon")
def test_what_was_computed_while_the_pool_was_pinned_is_stored_when_it_is(
    model: str, short_dir: Path, gate: Gate, truth: Truth
) -> None:
    with (
        running(model, kvsidecar(str(short_dir / "kvs.sock"))) as engine,
        DaemonProcess(short_dir, *POOL, KVSIDECAR_FAILPOINTS=f"pool.pin_chunk@0={gate}") as daemon,
    ):
        daemon.wait_log("rank attached")
        first, second = prompt("before it is known", 300), prompt("declined", 300)
        engine.generate(first)  # the scheduler hears of the daemon with its first step
        engine.generate(second)
        engine.drain()
        assert daemon.get("/status")[1]["readiness"]["state"] == "pinning"
        assert engine.counters()["vllm:kvsidecar_failed_stores"] > 0
        gate.let_pass()
        daemon.wait_ready()
        eventually(lambda: _has_both(engine, daemon), "both are stored")
        assert engine.reset()
        answers = engine.generate(first, second)
        assert [each.cached for each in answers] == [288, 288]
        assert [each.tokens for each in answers] == truth(first, second)


@pytest.mark.alone
def test_what_was_declined_is_stored_by_an_engine_that_sleeps(model: str, daemon: DaemonProcess, truth: Truth) -> None:
    with EngineProcess(model, kvsidecar(daemon.socket), OWN_PROCESS) as engine:
        engine.wait_started()
        join(engine, daemon)
        before = blocks(daemon)
        assert run("drain", "--socket", daemon.socket).returncode == 0
        engine.generate(LONG)
        eventually(lambda: daemon.metric('kvsidecar_refusals_total{reason="draining"}'), "its stores are declined")
        assert blocks(daemon) == before
        assert run("drain", "--cancel", "--socket", daemon.socket).returncode == 0
        eventually(lambda: blocks(daemon) >= before + WHOLE // BLOCK, "no request has come since then")
    another_engine_hits(model, daemon, truth)


def _has_both(engine: Engine, daemon: DaemonProcess) -> bool:
    """An engine that sleeps goes on with its next request."""
    engine.generate(prompt("too short for a block", 20), tokens=1)
    engine.drain()
    return blocks(daemon) >= 18


def test_routers_are_told_what_a_restarted_daemon_does_not_have(
    model: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import KVEventsConfig

    view = View()

    def tell(batch: Any) -> None:
        for each in batch.events:
            view.take(msgspec.to_builtins(each))

    def believed(daemon: DaemonProcess) -> set[int]:
        """Once it agrees: what is stored while the daemon begins to tell what it holds is retracted for a moment."""

        def agrees() -> bool:
            engine.drain()
            return len(view.of("CPU")) == blocks(daemon)

        eventually(agrees, lambda: f"{len(view.of('CPU'))} of {blocks(daemon)} blocks are believed in")
        return set(view.of("CPU"))

    with DaemonProcess(short_dir, *POOL) as first:
        first.wait_ready()
        events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        with running(model, kvsidecar(first.socket), kv_events_config=events_config) as engine:
            monkeypatch.setattr(engine.scheduler.kv_event_publisher, "publish", tell, raising=True)
            join(engine, first)
            engine.generate(LONG)
            before = believed(first)
            assert len(before) >= WHOLE // BLOCK
            first.process.kill()
            first.process.wait(SECONDS)
            with DaemonProcess(short_dir, *POOL) as next_one:
                join(engine, next_one.wait_ready())
                after = believed(next_one)
                assert after
                assert after.isdisjoint(before)
                assert view.ignored == view.repeated == []
