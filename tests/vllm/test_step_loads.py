"""A request that is alone is computed while its hit is loaded, and its tokens are right whatever goes wrong then."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvsidecar.integrations.vllm import connector
from kvsidecar.integrations.vllm.step_loads import StepLoads
from kvsidecar.integrations.waited_jobs import WaitedJobs
from tests.harness import SECONDS, DaemonProcess, Gate
from tests.marks import promise
from tests.vllm.conftest import POOL, Truth
from tests.vllm.engine import LONG, WHOLE, Engine, ask_again, forget, hits, joined, kvsidecar, prompt
from tests.vllm.hit_runs import (
    LAYERS,
    SELF_TEST,
    failed_loads,
    fatal,
    kill_when_held,
    works,
    wrong,
)
from tests.vllm.models import BLOCK


def step_loads(engine: Engine) -> float:
    return engine.counters().get("vllm:kvsidecar_step_loads", 0)


@promise("its forward pass begins at once, and each layer waits")
@pytest.mark.parametrize("chunks", [1, 2, 99])
def test_a_hit_that_is_loaded_while_it_is_computed_gives_the_right_tokens(
    model: str, daemon: DaemonProcess, truth: Truth, chunks: int
) -> None:
    with joined(daemon, model, kvsidecar(daemon.socket, load_chunks=chunks)) as engine:
        before = step_loads(engine)
        ask_again(engine)
        hits(engine, truth)
        assert step_loads(engine) == before + 1
        # Each block holds its own KV, in the GPU's prefix cache too.
        part = prompt("long", 300) + [3] * 10
        hits(engine, truth, part, 288)


def test_the_first_layers_are_computed_while_the_last_ones_are_loaded(
    model: str, short_dir: Path, gate: Gate, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the last chunk is held until the last layer asks for it."""
    last = SELF_TEST["load.in_flight"] + LAYERS - 1
    waited: list[str] = []
    wait_for_layer = StepLoads.wait_for_layer

    def let_pass(loads: StepLoads, name: str) -> None:
        waited.append(name)
        if len(waited) == LAYERS:
            gate.let_pass()
        wait_for_layer(loads, name)

    with (
        wrong(short_dir, f"load.in_flight@{last}={gate}") as daemon,
        joined(daemon, model, kvsidecar(daemon.socket, load_chunks=LAYERS)) as engine,
    ):
        assert step_loads(engine) == 0
        ask_again(engine)
        monkeypatch.setattr(StepLoads, "wait_for_layer", let_pass)
        hits(engine, truth)
        assert len(waited) == LAYERS


def test_a_request_that_is_not_alone_is_computed_after_its_load(
    model: str, daemon: DaemonProcess, truth: Truth
) -> None:
    with joined(daemon, model, kvsidecar(daemon.socket, load_chunks=LAYERS)) as engine:
        ask_again(engine)
        before = step_loads(engine)
        other = prompt("other", 100)
        engine.add(other, tokens=40)
        engine.step_until(lambda: engine.scheduler.running, "a request that runs")
        engine.add(LONG)
        hit, beside = sorted(engine.run().values(), key=lambda answer: len(answer.tokens))
        assert [hit.tokens, beside.tokens] == [*truth(LONG), *truth(other, tokens=40)]
        assert hit.cached == WHOLE
        assert step_loads(engine) == before


@promise("If the load fails, vLLM preempts the request, forgets its blocks, and computes it")
@pytest.mark.parametrize("chunk", [0, LAYERS - 1])
def test_after_a_chunk_that_fails_the_request_is_computed_and_nothing_wrong_is_kept(
    model: str, short_dir: Path, truth: Truth, chunk: int, ahead: bool
) -> None:
    longer = LONG + [5] * 150  # of which whole blocks are computed on what was not loaded
    with (
        wrong(short_dir, f"load.before_copy@{chunk}=raise(planned)") as daemon,
        joined(daemon, model, kvsidecar(daemon.socket, load_chunks=LAYERS), async_scheduling=ahead) as engine,
    ):
        ask_again(engine)
        (answer,) = engine.generate(longer, tokens=40)
        assert failed_loads(daemon) == 1
        assert [answer.tokens] == truth(longer, tokens=40)
        (local,) = engine.generate(longer)
        assert [local.tokens] == truth(longer), "the GPU's prefix cache holds the right KV"
        forget(engine)
        (hit,) = engine.generate(longer)
        assert hit.cached == len(longer.ids) // BLOCK * BLOCK
        assert [hit.tokens] == truth(longer), "and so does the daemon"
        assert step_loads(engine) == 2


def test_a_request_that_comes_before_the_failure_is_known_hits_nothing_of_it(
    model: str, short_dir: Path, truth: Truth, ahead: bool
) -> None:
    part = prompt("long", 300) + [3] * 10
    with (
        wrong(short_dir, "load.before_copy@1=raise(planned)") as daemon,
        joined(daemon, model, kvsidecar(daemon.socket, load_chunks=LAYERS), async_scheduling=ahead) as engine,
    ):
        ask_again(engine)
        engine.add(LONG, tokens=20)
        engine.step_until(lambda: failed_loads(daemon), "a load that fails")
        engine.add(part)
        second, first = sorted(engine.run().values(), key=lambda answer: len(answer.tokens))
        assert [first.tokens, second.tokens] == [*truth(LONG, tokens=20), *truth(part)]


@pytest.mark.parametrize("point", ["load.before_copy", "load.in_flight"])
def test_a_daemon_killed_while_a_step_waits_for_its_load(
    model: str, short_dir: Path, gate: Gate, truth: Truth, point: str, ahead: bool
) -> None:
    with (
        wrong(short_dir, fatal(point, SELF_TEST.get(point, 0) + 1, gate)) as first,
        joined(first, model, kvsidecar(first.socket, load_chunks=LAYERS), async_scheduling=ahead) as engine,
    ):
        ask_again(engine)
        assert first.process.poll() is None
        kill_when_held(first, point)
        (answer,) = engine.generate(LONG, tokens=40)
        assert first.process.wait(SECONDS) == -signal.SIGKILL
        assert [answer.tokens] == truth(LONG, tokens=40)
        engine.drain()
        with DaemonProcess(short_dir, *POOL) as next_one:
            works(engine, next_one.wait_ready(), truth)


def test_a_step_does_not_wait_longer_than_the_timeout_for_a_load_that_hangs(
    model: str, short_dir: Path, gate: Gate, truth: Truth
) -> None:
    """The first copy has begun and does not end, so the step waits for the copier, which the daemon kills."""
    number = SELF_TEST["load.in_flight"]
    with (
        DaemonProcess(
            short_dir, *POOL, "--stuck-after", "3", KVSIDECAR_FAILPOINTS=f"load.in_flight@{number}={gate}"
        ) as daemon,
        joined(daemon, model, kvsidecar(daemon.wait_ready().socket, load_chunks=LAYERS, load_timeout=0.5)) as engine,
    ):
        ask_again(engine)
        (answer,) = engine.generate(LONG, tokens=40)
        assert [answer.tokens] == truth(LONG, tokens=40)
        engine.drain()
        gate.let_pass(99)  # the next copier counts from 0
        works(engine, daemon, truth)


def test_a_step_gives_a_hanging_daemon_up_long_before_the_timeout_of_loads(
    model: str, short_dir: Path, gate: Gate, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy ends when the step has given up; no copier is killed."""
    monkeypatch.setattr(connector, "STEP_SECONDS", 0.5)
    give_up, reasons = WaitedJobs.give_up, []

    def let_pass(jobs: WaitedJobs, left: Iterable[int], reason: str) -> None:
        reasons.append(reason)
        gate.let_pass(99)
        give_up(jobs, left, reason)

    monkeypatch.setattr(WaitedJobs, "give_up", let_pass)
    number = SELF_TEST["load.in_flight"]
    with (
        DaemonProcess(
            short_dir, *POOL, "--stuck-after", f"{SECONDS}", KVSIDECAR_FAILPOINTS=f"load.in_flight@{number}={gate}"
        ) as daemon,
        joined(daemon, model, kvsidecar(daemon.wait_ready().socket, load_chunks=LAYERS)) as engine,
    ):
        ask_again(engine)
        (answer,) = engine.generate(LONG)
        assert reasons == ["a load within a step has not ended 2.5 s after its start"]
        assert [answer.tokens] == truth(LONG)
        engine.drain()
        works(engine, daemon, truth)


def test_after_a_copier_that_dies_within_a_step_the_next_one_loads(
    model: str, short_dir: Path, truth: Truth, ahead: bool
) -> None:
    # The last chunk of the second load; the next copier, which counts from 0, does not come so far.
    number = SELF_TEST["load.in_flight"] + 2 * LAYERS - 1
    with (
        wrong(short_dir, f"load.in_flight@{number}=kill") as daemon,
        joined(daemon, model, kvsidecar(daemon.socket, load_chunks=LAYERS), async_scheduling=ahead) as engine,
    ):
        for _ in range(2):
            ask_again(engine)
        assert failed_loads(daemon) == 0
        (answer,) = engine.generate(LONG, tokens=40)
        assert failed_loads(daemon) == 1
        assert [answer.tokens] == truth(LONG, tokens=40)
        engine.drain()
        works(engine, daemon, truth)


def test_a_request_that_is_aborted_while_its_step_is_computed_gives_its_blocks_back(
    model: str, daemon: DaemonProcess, truth: Truth, ahead: bool
) -> None:
    with joined(daemon, model, kvsidecar(daemon.socket, load_chunks=LAYERS), async_scheduling=ahead) as engine:
        ask_again(engine)
        free, before = engine.free_blocks, step_loads(engine)
        name = engine.add(LONG)
        engine.step_until(lambda: step_loads(engine) > before, "a load")
        engine.engine.abort_request([name])
        engine.drain()
        assert engine.free_blocks == free
        assert daemon.get("/status")[1]["pool"]["leases"] == 0
        assert engine.reset()
        hits(engine, truth)
