"""Several engines and one daemon: they share what is equal, and outlive each other and the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsidecar.client import Namespace
from tests.harness import DEVICE, SECONDS, DaemonProcess, Gate, Rank, eventually
from tests.marks import promise
from tests.sglang.conftest import POOL, Engines, failing
from tests.sglang.engine import WHOLE, SGLangProcess, forgotten, join, stored, warm
from tests.vllm.engine import LONG, EngineProcess, blocks, kvsidecar, prompt

VLLM = Path(".venv-vllm/bin/python")


class VLLMProcess(EngineProcess):
    python = str(VLLM)


def works(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    """The engine uses this daemon: another prompt is stored, loaded, and right."""
    join(engine, daemon)
    other = prompt(("works", daemon.process.pid), 200)
    cold = stored(engine, daemon, other)
    hit = engine.ask(other)
    assert (cold.cached, hit.host, hit.tokens) == (0, 192, cold.tokens)


@promise("It serves at once, with or without one")
def test_an_engine_that_started_without_a_daemon_uses_one_that_comes(
    engine: SGLangProcess, daemon: DaemonProcess
) -> None:
    assert "continuing without a daemon" in engine.text()
    works(engine, daemon)


@promise("Two engines hit each other's blocks")
def test_two_engines_share(engines: Engines, daemon: DaemonProcess) -> None:
    first, second = engines[0], engines[1]
    join(first, daemon)
    join(second, daemon)
    cold = stored(first, daemon, LONG)
    hit = second.ask(LONG)
    assert (hit.host, hit.tokens) == (WHOLE, cold.tokens)
    held = {each["namespace"]["hash_algorithm"] for each in daemon.get("/status")[1]["namespaces"]}
    assert held == {"sglang sha256"}


@pytest.mark.skipif(DEVICE != "host", reason="the other engine's memory is the host's")
def test_an_engine_of_another_kind_shares_nothing(engines: Engines, daemon: DaemonProcess) -> None:
    join(engines[0], daemon)
    namespace = Namespace("m", "bf16", "LBNHC", 32, 1, 1, "sha256")
    other = Rank(daemon, namespace=namespace, instance="vllm 1234")
    other.store("a")
    assert len(daemon.get("/status")[1]["namespaces"]) == 2
    other.client.close()


def test_a_vllm_engine_lives_on_the_same_daemon_in_a_namespace_of_its_own(
    model: str, engine: SGLangProcess, home: Path
) -> None:
    """Each hits what it stored itself; the same model and prompt, but pages and blocks of different kinds."""
    small_slabs = ("--slab-size", "256KiB")  # three sizes of slots share the pool
    if not VLLM.exists():
        pytest.skip("vLLM is not installed: make venv-vllm")
    with (
        DaemonProcess(home, *POOL, *small_slabs).wait_ready() as daemon,
        VLLMProcess(model, kvsidecar(daemon.socket)).wait_started() as vllm,
    ):
        join(engine, daemon)
        cold = stored(engine, daemon, LONG)
        before = blocks(daemon)

        def is_stored() -> bool:
            vllm.generate(LONG)
            vllm.drain()
            return blocks(daemon) >= before + len(LONG.ids) // 32

        eventually(is_stored, "vLLM's blocks")
        assert vllm.reset()
        (own,) = vllm.generate(LONG)
        hit = engine.ask(LONG)
        assert (hit.host, own.cached) == (WHOLE, 672)
        assert hit.tokens == cold.tokens == own.tokens
        status = daemon.get("/status")[1]
        assert len(status["namespaces"]) == 2
        assert len({each["instance"] for each in status["ranks"]}) == len(status["ranks"]) >= 2


@promise("resumes after a restart of the daemon")
def test_a_daemon_killed_between_two_requests(engine: SGLangProcess, home: Path) -> None:
    with DaemonProcess(home, *POOL) as first:
        join(engine, first.wait_ready())
        cold = stored(engine, first, LONG)
        first.process.kill()
        first.process.wait(SECONDS)
        alone = engine.ask(LONG)
        assert (alone.status, alone.host, alone.tokens) == (200, 0, cold.tokens)
    with DaemonProcess(home, *POOL) as second:
        works(engine, second.wait_ready())


@promise("SGLang answers a request with HTTP 503 if a load fails after it has started")
def test_a_daemon_killed_during_a_load_costs_that_request(engine: SGLangProcess, home: Path, gate: Gate) -> None:
    """SGLang aborts a request whose load has started: it cannot compute it any more."""
    with failing(home, f"load.in_flight@2={gate}") as first:
        cold = warm(engine, first, LONG)
        engine.send_generate(LONG)
        first.wait_log("failpoint")
        first.process.kill()
        (answer,) = engine.answers()
        assert (answer.status, answer.tokens) == (503, ())
        again = engine.ask(LONG)
        assert (again.status, again.cached, again.tokens) == (200, 0, cold), "another request ran on wrong KV"
    with DaemonProcess(home, *POOL) as second:
        works(engine, second.wait_ready())


@promise("Only a load that has started can fail a request")
def test_a_load_that_fails_costs_that_request(engine: SGLangProcess, home: Path) -> None:
    with failing(home, "load.before_copy@0=raise(planned)") as daemon:
        cold = warm(engine, daemon, LONG)
        assert engine.ask(LONG).status == 503
        again = engine.ask(LONG)
        assert (again.status, again.host, again.tokens) == (200, 0, cold), "the next one might fail as well"
        forgotten(engine, daemon, LONG)
        hit = engine.ask(LONG)
        assert (hit.host, hit.tokens) == (WHOLE, cold)
        assert daemon.get("/status")[1]["pool"]["leases"] == 0


@promise("no request fails")
def test_a_store_that_fails_costs_nothing(engine: SGLangProcess, home: Path) -> None:
    with failing(home, "store.before_copy@0=raise(planned)") as daemon:
        eventually(lambda: daemon.get("/status")[1]["ranks"], "the engine attaches")
        cold = engine.ask(LONG)
        assert cold.status == 200
        engine.forget()
        works(engine, daemon)


@promise("a restarted engine finds its blocks again")
def test_an_engine_is_killed_and_another_one_hits(engines: Engines, daemon: DaemonProcess) -> None:
    first, second = engines[0], engines[1]
    join(first, daemon)
    join(second, daemon)
    cold = stored(second, daemon, LONG)
    second.kill()
    eventually(lambda: len(daemon.get("/status")[1]["ranks"]) == 1, "the daemon notices")
    hit = first.ask(LONG)
    assert (hit.host, hit.tokens) == (WHOLE, cold.tokens)
