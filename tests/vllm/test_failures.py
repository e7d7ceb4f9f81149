"""Whatever goes wrong beside the engine, it goes on, gives the right tokens, and uses the daemon again when it can."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from kvsidecar.client import Client
from tests.harness import NO_WAIT, SECONDS, DaemonProcess, Gate, eventually
from tests.marks import promise
from tests.vllm.conftest import POOL, Truth
from tests.vllm.engine import (
    LONG,
    WHOLE,
    Engine,
    ask_again,
    forget,
    hits,
    joined,
    kvsidecar,
    prompt,
    rejoin,
    running,
)
from tests.vllm.hit_runs import (
    SELF_TEST,
    failed_loads,
    fatal,
    kill_when_held,
    works,
    wrong,
)


@promise("the engine serves without offload, and its log says why")
def test_a_daemon_whose_pool_cannot_be_pinned(
    model: str, short_dir: Path, truth: Truth, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine serves without it, says why, and uses the daemon that is started in its place."""
    with (
        DaemonProcess(short_dir, *POOL, KVSIDECAR_FAILPOINTS="pool.pin_chunk=raise(no memory to lock)") as first,
        running(model, kvsidecar(first.socket)) as engine,
    ):
        eventually(lambda: "no memory to lock" in caplog.text, "the engine's log says why")
        for _ in range(2):
            hits(engine, truth, LONG, 0)
            forget(engine)
        first.process.kill()
        first.process.wait(SECONDS)
        with DaemonProcess(short_dir, *POOL) as second:
            works(engine, second.wait_ready(), truth)


@promise("running loads fail, and vLLM computes their tokens")
@pytest.mark.parametrize("point", ["load.before_copy", "load.in_flight"])
def test_a_daemon_killed_during_a_load(model: str, short_dir: Path, gate: Gate, truth: Truth, point: str) -> None:
    """The request is computed instead; a daemon started in its place is used."""
    with (
        wrong(short_dir, fatal(point, SELF_TEST.get(point, 0), gate)) as first,
        joined(first, model) as engine,
    ):
        ask_again(engine)
        assert first.process.poll() is None
        kill_when_held(first, point)
        (answer,) = engine.generate(LONG)
        assert first.process.wait(SECONDS) == -signal.SIGKILL
        assert [answer.tokens] == truth(LONG)
        (alone,) = engine.generate(prompt("alone", 100))
        assert [alone.tokens] == truth(prompt("alone", 100))
        engine.drain()
        with DaemonProcess(short_dir, *POOL) as next_one:
            works(engine, next_one.wait_ready(), truth)
            # It has nothing of what the first one had, so that is stored again.
            ask_again(engine)
            hits(engine, truth)


@promise("blocks that were being stored are lost, never half stored")
@pytest.mark.parametrize("point", ["store.before_copy", "store.in_flight", "store.before_seal"])
def test_a_daemon_killed_during_a_store(model: str, short_dir: Path, gate: Gate, truth: Truth, point: str) -> None:
    number = SELF_TEST.get(point, 0) + 1  # the first one lets the engine join
    with wrong(short_dir, fatal(point, number, gate)) as first, joined(first, model) as engine:
        kill_when_held(first, point)
        (answer,) = engine.generate(LONG, tokens=40)
        assert first.process.wait(SECONDS) == -signal.SIGKILL
        assert [answer.tokens] == truth(LONG, tokens=40)
        engine.drain()
        assert engine.reset()  # the blocks of the store that never ended are given back
        with DaemonProcess(short_dir, *POOL) as next_one:
            works(engine, next_one.wait_ready(), truth)


@promise("the engine serves without offload, logs it once, and attaches when a daemon runs")
def test_an_engine_starts_without_a_daemon_and_uses_one_that_comes(
    model: str, short_dir: Path, truth: Truth, caplog: pytest.LogCaptureFixture
) -> None:
    with running(model, kvsidecar(str(short_dir / "kvs.sock"))) as engine:
        (answer,) = engine.generate(LONG)
        assert [answer.tokens] == truth(LONG)
        forget(engine)
        with DaemonProcess(short_dir, *POOL) as daemon:
            works(engine, daemon.wait_ready(), truth)


@promise("the engine serves without offload until the daemon is ready")
def test_an_engine_joins_while_the_pool_is_still_being_pinned(
    model: str, short_dir: Path, gate: Gate, truth: Truth
) -> None:
    """And does not wait for it: it serves meanwhile."""
    socket = str(short_dir / "kvs.sock")
    with (
        running(model, kvsidecar(socket)) as engine,
        DaemonProcess(short_dir, *POOL, KVSIDECAR_FAILPOINTS=f"pool.pin_chunk@0={gate}") as daemon,
    ):
        assert daemon.socket == socket
        daemon.wait_log("rank attached")
        (answer,) = engine.generate(prompt("early", 100))
        assert daemon.get("/status")[1]["readiness"]["state"] == "pinning"
        assert [answer.tokens] == truth(prompt("early", 100))
        gate.let_pass()
        daemon.wait_ready()
        works(engine, daemon, truth)


@promise("A new copier pins the pool, the rank attaches again, and the cache is still there")
@pytest.mark.parametrize(
    ("rules", "flags"),
    [
        ("load.in_flight@2=raise(a bug)", ()),
        ("load.in_flight@2=kill", ()),
        ("load.in_flight@2=delay(3600)", ("--stuck-after", "3")),
    ],
    ids=["a bug in a copier", "a killed copier", "a copy that hangs"],
)
def test_a_load_whose_copier_dies_is_computed_and_the_next_one_hits(
    model: str, short_dir: Path, truth: Truth, rules: str, flags: tuple[str, ...]
) -> None:
    with (
        DaemonProcess(short_dir, *POOL, *flags, KVSIDECAR_FAILPOINTS=rules) as daemon,
        joined(daemon, model, kvsidecar(daemon.wait_ready().socket, load_chunks=0)) as engine,
    ):
        ask_again(engine)
        (answer,) = engine.generate(LONG)
        assert failed_loads(daemon) == 1
        assert [answer.tokens] == truth(LONG)
        engine.drain()
        assert engine.reset(), "its blocks were not given back"
        daemon.wait_log("the copier works")
        daemon.wait_log("rank attached")
        rejoin(engine, daemon)
        (hit,) = engine.generate(LONG)
        assert hit.cached == WHOLE, "the cache outlives a copier"
        assert [hit.tokens] == truth(LONG)


@promise("its request is computed; if it is preempted later, it may load again")
def test_a_failed_load_is_computed_instead(model: str, short_dir: Path, truth: Truth) -> None:
    with (
        wrong(short_dir, "load.before_copy@0=raise(planned)") as daemon,
        joined(daemon, model) as engine,
    ):
        ask_again(engine)
        together = [LONG, prompt("other", 100)]
        answers = engine.generate(*together)
        assert failed_loads(daemon) == 1
        assert [each.tokens for each in answers] == truth(*together)
        engine.drain()
        assert daemon.get("/status")[1]["pool"]["leases"] == 0
        assert engine.reset()
        hits(engine, truth)


@promise("With vLLM's default, `fail`, a request ends with an error if a load fails")
def test_policy_fail_ends_the_request_and_not_the_engine(model: str, short_dir: Path, truth: Truth) -> None:
    with (
        wrong(short_dir, "load.before_copy@0=raise(planned)") as daemon,
        joined(daemon, model, kvsidecar(daemon.socket, policy="fail")) as engine,
    ):
        ask_again(engine)
        (answer,) = engine.generate(LONG)
        assert failed_loads(daemon) == 1
        assert (answer.finish, answer.tokens) == ("error", ())
        engine.drain()
        (hit,) = engine.generate(LONG)
        assert [hit.tokens] == truth(LONG)


@promise("With `recompute`, vLLM computes the tokens instead")
def test_a_block_that_is_gone_when_it_is_loaded_is_computed(
    model: str, daemon: DaemonProcess, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the lookup and the load the namespace is cleared: the leases of a hit cannot help against that."""
    load = Client.load

    def load_too_late(self: Client, *arguments: object, **options: object) -> int:
        with daemon.client() as operator:
            operator.clear()
        return load(self, *arguments, **options)  # type: ignore[arg-type]

    with joined(daemon, model) as engine:
        ask_again(engine)
        with monkeypatch.context() as patched:
            patched.setattr(Client, "load", load_too_late)
            (answer,) = engine.generate(LONG)
        assert [answer.tokens] == truth(LONG)
        works(engine, daemon, truth)


@promise("all lookups together cost a step at most `lookup_budget`")
def test_a_daemon_that_hangs_delays_a_request_and_no_more(model: str, daemon: DaemonProcess, truth: Truth) -> None:
    transfer = kvsidecar(daemon.socket, lookup_budget="5ms", lookup_patience="100ms")
    with joined(daemon, model, transfer) as engine:
        ask_again(engine)
        began = time.monotonic()
        engine.generate(prompt("as long", 700))
        computed = time.monotonic() - began
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            (answer,) = engine.generate(LONG)
            took = time.monotonic() - began
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        assert [answer.tokens] == truth(LONG)
        assert took < NO_WAIT + 10 * computed
        engine.drain()
        works(engine, daemon, truth)


@promise("its GPU blocks are freed when every rank has reported")
def test_a_request_aborted_during_its_load_frees_its_blocks_when_the_load_is_over(
    model: str, short_dir: Path, gate: Gate, truth: Truth
) -> None:
    with (
        wrong(short_dir, f"load.in_flight@2={gate}") as daemon,
        joined(daemon, model, kvsidecar(daemon.socket, load_chunks=0)) as engine,
    ):
        ask_again(engine)
        free = engine.free_blocks
        name = engine.add(LONG)
        engine.step_until(lambda: _copying(daemon), "a load")
        assert _loading(engine)
        engine.engine.abort_request([name])
        engine.step()
        for _ in range(5):
            assert engine.free_blocks < free, "blocks that are still written to were given back"
            engine.step()
        assert _copying(daemon)
        gate.let_pass()
        engine.drain()
        assert engine.free_blocks == free
        assert daemon.get("/status")[1]["pool"]["leases"] == 0
        assert engine.reset()
        hits(engine, truth)


def _copying(daemon: DaemonProcess) -> bool:
    return bool(daemon.get("/status")[1]["jobs"]["running"])


def _loading(engine: Engine) -> bool:
    return any(request.status.name == "WAITING_FOR_REMOTE_KVS" for request in engine.scheduler.requests.values())
