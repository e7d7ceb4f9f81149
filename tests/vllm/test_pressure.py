"""Too little memory for what runs: preempted requests, evicted blocks, lazy stores. The tokens stay the same."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from kvsidecar.integrations.vllm import stores as stores_module
from kvsidecar.integrations.vllm.stores import Stores
from tests.harness import SECONDS, DaemonProcess, eventually
from tests.marks import promise
from tests.vllm.conftest import Truth
from tests.vllm.engine import Engine, blocks, forget, join, joined, kvsidecar, prompt, running
from tests.vllm.models import BLOCK


@promise("its full blocks are stored (eager mode) and loaded when it resumes")
def test_preempted_requests_continue_from_what_the_daemon_holds(
    model: str, daemon: DaemonProcess, truth: Truth
) -> None:
    """Six requests that need 60 blocks with decoding, on 24."""
    prompts = [prompt(f"preempted {i}", 100) for i in range(6)]
    transfer = kvsidecar(daemon.socket)
    with joined(daemon, model, transfer, num_gpu_blocks_override=24, max_model_len=512) as engine:
        answers = engine.generate(*prompts, tokens=200)
        assert engine.counters()["vllm:num_preemptions"] > 0
        assert daemon.get("/status")[1]["jobs"]["loads_done"] > 0
        assert [each.tokens for each in answers] == truth(*prompts, tokens=200)
        engine.drain()
        assert engine.reset()  # and no block is held for ever


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_daemon_that_hangs_leaves_an_engine_under_pressure_going(
    model: str, daemon: DaemonProcess, mode: str
) -> None:
    """Six requests that need 60 blocks with decoding, on 24; then one that needs 16, the most that one may have."""
    prompts = [prompt(f"hang {mode} {i}", 100) for i in range(6)]
    longest = prompt(f"hang {mode}", 500)
    with running(model, enable_prefix_caching=False) as engine:
        expected = [engine.generate(each, tokens=200)[0].tokens for each in prompts]
        expected.append(engine.generate(longest, tokens=12)[0].tokens)
    transfer = kvsidecar(daemon.socket, lookup_budget="50ms", lookup_patience="100ms", store_mode=mode)
    with running(model, transfer, num_gpu_blocks_override=24, max_model_len=512) as engine:
        stores = _stores_of(engine)
        _warm_up(engine, daemon)
        free, before = engine.free_blocks, engine.counters()["vllm:num_preemptions"]
        names = [engine.add(each, tokens=200) for each in prompts]
        engine.step_until(lambda: len(engine.scheduler.running) > 3, "requests that decode")
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            answers = engine.run()
            assert engine.counters()["vllm:num_preemptions"] > before
            names.append(engine.add(longest, tokens=12))
            answers |= engine.run()
            held = [block for each in stores.running for block in each.selection]
            given_up = engine.connector._scheduler.counters.given_up_daemons
            assert held or given_up, "nothing was stored when the daemon stopped: nothing was held"
            assert all(block.ref_cnt > 0 for block in held), "the daemon may read these blocks when it goes on"
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        given = [answers[name.partition("-")[0]].tokens for name in names]  # vLLM makes names its own
        assert given == expected
        engine.drain()
        assert engine.free_blocks == free
    # What the daemon has stored late is what these blocks held: another engine goes on as this one did.
    with joined(daemon, model) as engine:
        hit = 0
        for each, tokens in zip(prompts, given, strict=False):
            (again,) = engine.generate(each + tokens[:190], tokens=10)
            assert again.tokens == tokens[190:]
            hit += again.cached
    assert hit or given_up or mode == "lazy"


def test_a_daemon_that_hangs_with_all_blocks_of_an_engine_is_given_up(
    model: str, daemon: DaemonProcess, truth: Truth
) -> None:
    """Each request needs 23 of 25 blocks: while the daemon holds those of the first, the second has none."""
    first, second = prompt("all 1", 23 * BLOCK), prompt("all 2", 23 * BLOCK)
    transfer = kvsidecar(daemon.socket, lookup_budget="50ms", lookup_patience="100ms")
    with joined(daemon, model, transfer, num_gpu_blocks_override=26, max_model_len=768) as engine:
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            answers = [engine.generate(each, tokens=4)[0].tokens for each in (first, second)]
            assert engine.connector._scheduler.counters.given_up_daemons > 0
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        assert answers == truth(first, second, tokens=4)


def test_prompts_as_long_as_the_gpu_are_all_stored(
    model: str, daemon: DaemonProcess, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request needs 23 of 25 blocks. How long a core may take for a store does not matter here."""
    for name in ("SOON_SECONDS", "HUNG_SECONDS", "GIVE_UP_SECONDS"):
        monkeypatch.setattr(stores_module, name, SECONDS)
    prompts = [prompt(f"long {i}", 23 * BLOCK) for i in range(4)]
    with joined(daemon, model, num_gpu_blocks_override=26, max_model_len=768) as engine:
        before = blocks(daemon)
        names = [engine.add(each, tokens=4) for each in prompts]
        answers = engine.run()
        given = [answers[name.partition("-")[0]].tokens for name in names]
        engine.drain()
        assert engine.connector._scheduler.counters.given_up_blocks == 0
        assert blocks(daemon) - before == 4 * 23
        assert given == truth(*prompts, tokens=4)


def _stores_of(engine: Engine) -> Stores:
    stores = engine.connector._scheduler._stores
    assert isinstance(stores, Stores)
    return stores


def _warm_up(engine: Engine, daemon: DaemonProcess) -> None:
    """Until the engine stores into this daemon, also in lazy mode: there what it evicts next."""

    def stored() -> int:
        if not blocks(daemon):
            engine.generate(prompt(time.monotonic_ns(), 400), tokens=1)
            engine.drain()
        return blocks(daemon)

    eventually(stored, "the engine uses the daemon")


@promise("blocks that the GPU is about to evict")
def test_lazy_mode_stores_what_the_engine_is_about_to_evict(model: str, daemon: DaemonProcess, truth: Truth) -> None:
    transfer = kvsidecar(daemon.socket, store_mode="lazy")
    prompts = [prompt(f"lazy {i}", 200) for i in range(12)]
    with running(model, transfer, num_gpu_blocks_override=24, max_model_len=512) as engine:
        for _ in range(2):
            for each in prompts:  # 72 full blocks, one after the other
                engine.generate(each)
                engine.drain()
        counters = engine.counters()
        assert counters["vllm:external_prefix_cache_hits"] > 0
        answers = [engine.generate(each)[0] for each in prompts]
        assert sum(each.cached for each in answers) > 0
        assert [each.tokens for each in answers] == truth(*prompts)
        forget(engine)


def test_lazy_mode_does_not_store_what_fits_while_it_is_busy(model: str, daemon: DaemonProcess) -> None:
    transfer = kvsidecar(daemon.socket, store_mode="lazy", lazy_watermark=100)
    # With asynchronous scheduling, each request would have an idle step at its end.
    with running(model, transfer, async_scheduling=False) as engine:
        for i in range(5):
            engine.generate(prompt(f"fits {i}", 200))
        assert blocks(daemon) == 0
        engine.drain()
        assert blocks(daemon) == 5 * 6


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_conversations_on_too_little_memory_everywhere(model: str, short_dir: Path, truth: Truth, mode: str) -> None:
    """Turns of eight conversations with shared beginnings, in batches of random size: more than the engine's 40 blocks
    hold, more than the daemon's 42. Preemption, eviction on both sides, partial hits and stores that find no room."""
    numbers = random.Random(mode)
    system = prompt("system", 3 * BLOCK + 5)
    talks = [system + prompt(f"talk {i}", numbers.randrange(20, 120)).ids for i in range(8)]
    asked, given = [], []
    with DaemonProcess(short_dir, "--pool-size", "2MiB") as daemon:
        daemon.wait_ready()
        transfer = kvsidecar(daemon.socket, store_mode=mode)
        with running(model, transfer, num_gpu_blocks_override=40, max_model_len=640) as engine:
            if mode == "eager":
                join(engine, daemon)
            for turn in range(5):
                order = numbers.sample(range(len(talks)), len(talks))
                while order:
                    batch = [order.pop() for _ in range(min(len(order), numbers.randrange(1, 6)))]
                    answers = engine.generate(*(talks[i] for i in batch), tokens=24)
                    for i, answer in zip(batch, answers, strict=True):
                        asked.append(talks[i])
                        given.append(answer.tokens)
                        talks[i] = talks[i] + answer.tokens + prompt((turn, i), numbers.randrange(5, 40)).ids
                    if numbers.random() < 0.3:
                        forget(engine)
            engine.drain()
            assert engine.counters()["vllm:external_prefix_cache_hits"] > 0
            assert engine.reset()
        status = daemon.get("/status")[1]
        assert status["pool"]["leases"] == 0
        assert daemon.metric("kvsidecar_evicted_blocks_total") > 0
    assert given == truth(*asked, tokens=24)
