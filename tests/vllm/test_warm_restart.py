"""The cache outlives the daemon: a real engine hits what it stored before the daemon was killed (``--pool-dir``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness import SECONDS, DaemonProcess, Gate, eventually
from tests.marks import promise
from tests.vllm.conftest import POOL, Truth
from tests.vllm.engine import (
    LONG,
    WHOLE,
    Answer,
    Engine,
    EngineProcess,
    blocks,
    hits,
    join,
    kvsidecar,
    rejoin,
    running,
)


@contextmanager
def started(short_dir: Path, pool_dir: Path, *flags: str) -> Iterator[DaemonProcess]:
    with DaemonProcess(short_dir, *POOL, "--pool-dir", str(pool_dir), *flags) as daemon:
        yield daemon.wait_ready()


def kill(daemon: DaemonProcess) -> None:
    daemon.process.kill()
    daemon.process.wait(SECONDS)


def loads_all_of_it(engine: Engine, daemon: DaemonProcess, truth: Truth) -> None:
    """The prompt is loaded as a whole, is right, and nothing of it is stored again."""
    before, jobs = engine.counters(), daemon.get("/status")[1]["jobs"]
    (answer,) = engine.generate(LONG)
    engine.drain()
    after, then = engine.counters(), daemon.get("/status")[1]["jobs"]
    assert answer.cached == WHOLE
    assert [answer.tokens] == truth(LONG)
    name = "vllm:external_prefix_cache_hits"
    assert after[name] - before.get(name, 0) == WHOLE
    assert then["loaded_bytes"] > jobs["loaded_bytes"]
    assert then["stored_bytes"] == jobs["stored_bytes"], "stored again although it was kept"


@promise("the engine attaches again by itself, hits every kept block and stores none of them again")
def test_an_engine_that_runs_on_hits_what_it_stored_before_the_kill(
    model: str, short_dir: Path, pool_dir: Path, truth: Truth
) -> None:
    with running(model, kvsidecar(str(short_dir / "kvs.sock"))) as engine:
        with started(short_dir, pool_dir) as first:
            join(engine, first)
            hits(engine, truth, LONG, 0)
            engine.drain()
            stored = blocks(first)
            kill(first)
        with started(short_dir, pool_dir) as second:
            assert blocks(second) == stored
            rejoin(engine, second)
            loads_all_of_it(engine, second, truth)


def test_an_engine_hits_what_is_pinned_before_the_new_daemon_is_ready(
    model: str, short_dir: Path, pool_dir: Path, gate: Gate, truth: Truth
) -> None:
    chunks = ("--chunk-size", "1MiB", "--slab-size", "1MiB", "--huge-pages", "none")
    with running(model, kvsidecar(str(short_dir / "kvs.sock"))) as engine:
        with started(short_dir, pool_dir, *chunks) as first:
            join(engine, first)
            engine.generate(LONG)
            engine.drain()
            kill(first)
        flags = (*POOL, "--pool-dir", str(pool_dir), *chunks)
        with DaemonProcess(short_dir, *flags, KVSIDECAR_FAILPOINTS=f"pool.pin_chunk@5={gate}") as second:
            second.wait_log("serving kept blocks")
            eventually(lambda: gate.holds(second.process.pid))

            def hit() -> Answer | None:
                if not engine.reset():  # refused while a store still reads a block
                    return None
                (answer,) = engine.generate(LONG)
                engine.drain()
                return answer if answer.cached else None

            answer = eventually(hit, lambda: f"the engine hits nothing: {second.get('/status')[1]}")
            assert (answer.cached, [answer.tokens]) == (WHOLE, truth(LONG))
            assert second.get("/ready")[0] == 503
            gate.let_pass()
            second.wait_ready()


def test_an_engine_that_starts_after_both_were_killed_hits(
    model: str, short_dir: Path, pool_dir: Path, truth: Truth
) -> None:
    transfer = kvsidecar(str(short_dir / "kvs.sock"))
    with started(short_dir, pool_dir) as first, EngineProcess(model, transfer) as before:
        before.wait_started()
        join(before, first)
        before.generate(LONG)
        before.drain()
        stored = blocks(first)
        before.kill()
        kill(first)
    with started(short_dir, pool_dir) as second, running(model, transfer) as engine:
        assert blocks(second) == stored
        join(engine, second)
        loads_all_of_it(engine, second, truth)
