"""What is in vLLM's prefix cache although no forward pass has written it, or one on KV that was not loaded, is hit by
nobody: not in the daemon, and not on the GPU."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest

from tests.harness import DEVICE, DaemonProcess, eventually
from tests.marks import promise
from tests.vllm.conftest import Truth
from tests.vllm.engine import LONG, WHOLE, Prompt, answer_of, joined, kvsidecar, prompt
from tests.vllm.test_multi_connector import multi

AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
"""Whether a step is scheduled before the output of the last one is known, which is vLLM's default."""


@pytest.fixture
def pool() -> tuple[str, ...]:
    return ("--pool-size", "24MiB")


@promise("whose output vLLM has processed")
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@AHEAD
def test_requests_that_are_displaced_in_the_step_that_would_write_their_blocks(
    model: str, daemon: DaemonProcess, truth: Truth, mode: str, ahead: bool
) -> None:
    """Each arrival is more urgent than those before, and there are blocks for half of what runs."""
    numbers = random.Random(1)
    prompts = [prompt(f"p {i}", numbers.randrange(150, 420)) for i in range(14)]
    expected = dict(zip(prompts, truth(*prompts, tokens=12), strict=True))
    few: dict[str, Any] = {"num_gpu_blocks_override": 30, "max_model_len": 512, "scheduling_policy": "priority"}
    chunks = {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 128}
    transfer = kvsidecar(daemon.socket, store_mode=mode)
    with joined(daemon, model, transfer, **few, **chunks, async_scheduling=ahead) as engine:
        given: dict[str, tuple[int, ...]] = {}
        names = {}
        for urgency, each in enumerate(prompts):
            names[engine.add(each, 12, priority=-urgency)] = each
            for _ in range(numbers.randrange(5)):
                given |= {each.request_id: answer_of(each).tokens for each in engine.step() if each.finished}
        given |= {name: answer.tokens for name, answer in engine.run().items()}
        assert engine.counters()["vllm:num_preemptions"] > 0
        named = {name.partition("-")[0]: each for name, each in names.items()}
        assert {named[name.partition("-")[0]]: tokens for name, tokens in given.items()} == expected
        engine.drain()
        assert engine.reset()
        for each in prompts:
            (answer,) = engine.generate(each, tokens=12)
            assert answer.tokens == expected[each]
            engine.drain()


@pytest.mark.usefixtures("by_name")
@AHEAD
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_tokens_that_another_connector_failed_to_load(
    model: str, daemon: DaemonProcess, truth: Truth, mode: str, ahead: bool
) -> None:
    """vLLM computes them again. What was computed on them in between is under the hashes of the right ones."""
    failing = {"kv_connector": "FailingConnector", "kv_connector_module_path": "tests.vllm.failing"}
    children = multi({**failing, "kv_role": "kv_both"}, kvsidecar(daemon.socket, store_mode=mode))
    shorter, longer = Prompt(LONG.ids[:500]), LONG + prompt("behind", 150).ids
    with joined(daemon, model, children, async_scheduling=ahead) as engine:
        for each in (shorter, LONG, longer):
            (answer,) = engine.generate(each)
            # Else vLLM itself delivers what the next step, or its second model runner, has computed on them.
            if not ahead and DEVICE == "host":
                assert [answer.tokens] == truth(each)
        engine.generate(loaded_by_nobody := prompt("loaded by nobody", 90))
        engine.drain()
    with joined(daemon, model) as engine:
        for each in (longer, LONG, shorter):
            (answer,) = engine.generate(each)
            assert [answer.tokens] == truth(each)
        (answer,) = engine.generate(loaded_by_nobody)
        assert answer.cached == 64


@promise("A reset does not wait for stores")
@AHEAD
def test_a_reset_with_stores_in_flight_succeeds_and_what_is_computed_then_is_of_the_new_weights(
    model: str, daemon: DaemonProcess, truth: Truth, tmp_path: Any, ahead: bool
) -> None:
    from tests.vllm import models

    other = models.save("other", tmp_path)
    with joined(daemon, model, async_scheduling=ahead) as engine:
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            engine.generate(prompt("in flight", 700))
            assert engine.connector._scheduler._stores.running, "the test shows nothing without a store in flight"
            engine.update(other)
            assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        engine.generate(LONG)
        engine.drain()
        assert engine.counters().get("vllm:kvsidecar_refused_resets", 0) == 0
    with joined(daemon, model) as engine:
        (old,) = engine.generate(prompt("in flight", 700))
        assert (old.cached, [old.tokens]) == (WHOLE, truth(prompt("in flight", 700)))
        (mine,) = engine.generate(LONG)
        assert (mine.cached, [mine.tokens]) == (0, truth(LONG))


def test_after_a_reset_that_raises_nothing_is_offloaded_until_one_succeeds(
    model: str, daemon: DaemonProcess, truth: Truth, tmp_path: Any
) -> None:
    """vLLM raises before it asks its connector when something else holds a block."""
    from tests.vllm import models

    other = models.save("other", tmp_path)
    with joined(daemon, model) as engine:
        pool = engine.scheduler.kv_cache_manager.block_pool
        (held,) = pool.get_new_blocks(1)
        engine.update(other)
        with pytest.raises(RuntimeError, match="Failed to reset"):
            engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.generate(LONG)
        engine.drain()
        pool.free_blocks([held])
        assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert engine.generate(LONG)[0].cached == 0
        engine.drain()
    with joined(daemon, model) as engine:
        (mine,) = engine.generate(LONG)
        assert (mine.cached, [mine.tokens]) == (0, truth(LONG))


@pytest.mark.parametrize("got", [False, True], ids=["not got", "got"])
def test_a_step_that_is_lost_leaves_nothing_behind(model: str, daemon: DaemonProcess, truth: Truth, got: bool) -> None:
    """As with vLLM's fault tolerance: all requests are aborted, and the engine goes on."""
    # With asynchronous scheduling, vLLM 0.33 itself never frees the blocks of a lost step.
    with joined(daemon, model, async_scheduling=False) as engine:
        free = engine.free_blocks
        engine.add(prompt("before", 200), tokens=100)
        engine.step_until(lambda: engine.connector._scheduler._stores.running, "a store runs")
        engine.add(LONG, tokens=8)
        assert engine.lose_step(got)
        (answer,) = engine.generate(LONG)
        assert [answer.tokens] == truth(LONG)
        engine.drain()
        assert engine.free_blocks == free
        assert engine.reset(connector=True)
    with joined(daemon, model) as engine:
        (answer,) = engine.generate(LONG)
        assert [answer.tokens] == truth(LONG)


def test_requests_whose_loads_end_in_a_step_that_is_lost_give_their_blocks_back(
    model: str, daemon: DaemonProcess, truth: Truth
) -> None:
    """vLLM frees the blocks of a request that is aborted in the midst of a load when it hears of the load's end."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    # Loads before the step: one within a step has ended when vLLM can lose it.
    with joined(daemon, model, kvsidecar(daemon.socket, load_chunks=0), async_scheduling=False) as engine:
        engine.generate(LONG)
        engine.drain()
        assert engine.reset()
        free = engine.free_blocks
        engine.add(LONG, tokens=8)
        engine.step_until(lambda: engine.connector._scheduler._loads.running, "a load runs")
        side = get_kv_transfer_group()._worker
        eventually(lambda: side.poll() or side._results.finished, "the rank knows of its end")
        assert engine.lose_step(got=True)
        engine.drain()
        assert engine.free_blocks == free
        (answer,) = engine.generate(LONG)
        assert [answer.tokens] == truth(LONG)
