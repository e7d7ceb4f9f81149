"""Engines of other kinds than those of the other files: with short limits, and with several ranks."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.harness import NO_WAIT, DaemonProcess, Gate, eventually
from tests.marks import promise
from tests.sglang.conftest import POOL
from tests.sglang.engine import WHOLE, SGLangProcess, join, linker, stored
from tests.vllm import models
from tests.vllm.engine import LONG, needs_gpus, prompt


@promise("the engine gives the daemon up, and none of its copies begins after that")
def test_a_daemon_that_hangs_delays_requests_within_limits(
    model: str, home: Path, tmp_path: Path, short_dir: Path
) -> None:
    """A request is computed if that is in its lookup; in its load it is aborted, when the copier is dead."""
    gate = Gate(short_dir)
    options = linker(str(home / "kvs.sock"), lookup_budget="200ms", load_timeout="1s", lease_seconds="30s")
    with (
        SGLangProcess(model, options, tmp_path / "log").wait_started() as engine,
        DaemonProcess(
            home, *POOL, "--stuck-after", "5", KVSIDECAR_FAILPOINTS=f"load.in_flight@2={gate}"
        ).wait_ready() as daemon,
    ):
        assert isinstance(engine, SGLangProcess)
        eventually(lambda: daemon.get("/status")[1]["ranks"], "the engine attaches")
        cold = stored(engine, daemon, LONG)

        def asked() -> int:
            """A busy machine makes the lookup miss."""
            engine.forget()
            return engine.ask(LONG).status

        eventually(lambda: asked() == 503, "a load")
        assert daemon.wait_log("the copier hangs and is killed")
        gate.let_pass(100)  # the next copier
        after = engine.ask(LONG)
        assert (after.status, after.tokens) == (200, cold.tokens)
        join(engine, daemon)
        engine.forget()
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            answer = engine.ask(LONG)
            took = time.monotonic() - began
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        assert (answer.status, answer.host, answer.tokens) == (200, 0, cold.tokens)
        assert took < NO_WAIT
        join(engine, daemon)
    gate.close()


def test_two_ranks_store_their_shards_and_hit_together(
    model: str, home: Path, tmp_path: Path, daemon: DaemonProcess
) -> None:
    """By way of staging memory, which each of them has."""
    needs_gpus(2)
    options = linker(str(home / "kvs.sock"), staging="256KiB")
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with SGLangProcess(model, options, tmp_path / "log", variables=cores, tp_size=2).wait_started() as engine:
        assert isinstance(engine, SGLangProcess)
        join(engine, daemon)
        eventually(lambda: len(daemon.get("/status")[1]["ranks"]) == 4, "the staging memory is registered")
        ranks = daemon.get("/status")[1]["ranks"]
        assert {(each["rank"], each["world_size"]) for each in ranks} == {(0, 2), (1, 2)}
        cold = stored(engine, daemon, LONG)
        before = engine.counters()["staged_loads"]
        hit = engine.ask(LONG)
        assert (hit.host, hit.tokens) == (WHOLE, cold.tokens)
        eventually(lambda: engine.counters()["staged_loads"] > before, "its load is counted")
        daemon.process.kill()
        alone = engine.ask(prompt("alone", 100))
        assert (alone.status, alone.host) == (200, 0)


@promise("what SGLang keeps beside KV for each token is not loaded")
def test_the_experts_of_cached_tokens_are_their_own(home: Path, tmp_path: Path, daemon: DaemonProcess) -> None:
    """SGLang has what it returns of a token beside the token's KV, and nobody else has it."""
    options, other = linker(str(home / "kvs.sock")), prompt("other", 700)
    experts = {"enable_return_routed_experts": True}
    with SGLangProcess(models.save_experts(tmp_path), options, tmp_path / "log", **experts).wait_started() as engine:
        assert isinstance(engine, SGLangProcess)
        refusal = "no offload: --enable-return-routed-experts"
        eventually(lambda: refusal in engine.text() or daemon.get("/status")[1]["ranks"], "attached, or refused")
        computed = engine.experts(LONG)
        for _ in range(5):  # as long as something may be on its way to the daemon
            engine.forget()
            assert engine.experts(other) != computed
            engine.forget()
            assert engine.experts(LONG) == computed
        assert engine.experts(LONG) == computed, "those of tokens in the engine's own cache"
        assert refusal in engine.text()


def test_an_engine_without_kv_events_says_that_a_publisher_gets_nothing_from_it(
    model: str, home: Path, tmp_path: Path, daemon: DaemonProcess
) -> None:
    options = linker(str(home / "kvs.sock"), publisher=True)
    with SGLangProcess(model, options, tmp_path / "log").wait_started() as engine:
        assert isinstance(engine, SGLangProcess)
        eventually(lambda: daemon.get("/status")[1]["ranks"], "the engine attaches")
        assert "the option publisher needs SGLang's --kv-events-config" in engine.text()
