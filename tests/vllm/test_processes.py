"""Engines of several processes, and several engines: tensor parallel ranks, sharing, and SIGKILL."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.harness import SECONDS, DaemonProcess
from tests.marks import promise
from tests.vllm import models
from tests.vllm.conftest import POOL, Truth
from tests.vllm.engine import LONG, WHOLE, EngineProcess, blocks, join, kvsidecar, needs_gpus, prompt, rejoin, running
from tests.vllm.hit_runs import LAYERS, stores_and_hits, until
from tests.vllm.models import BLOCK
from tests.vllm.replicas import ReplicasProcess


@promise("engines with the same model share one copy")
def test_two_engines_share_one_cache_and_one_outlives_the_other(
    model: str, daemon: DaemonProcess, truth: Truth
) -> None:
    transfer = kvsidecar(daemon.socket)
    with EngineProcess(model, transfer) as other, running(model, transfer) as engine:
        other.wait_started()
        join(engine, daemon)
        join(other, daemon)
        assert len(daemon.get("/status")[1]["ranks"]) == 2
        mine, theirs = prompt("mine", 300), prompt("theirs", 300)
        engine.generate(mine)
        other.generate(theirs)
        engine.drain()
        other.drain()
        (hit_theirs,), (hit_mine,) = engine.generate(theirs), other.generate(mine)
        assert (hit_theirs.cached, hit_mine.cached) == (288, 288)
        assert [hit_theirs.tokens, hit_mine.tokens] == truth(theirs, mine)
        other.generate(LONG)
        other.drain()
        before = blocks(daemon)
        cut = [prompt(f"cut {i}", 300) for i in range(3)]
        other.send_generate(*cut, tokens=200)
        until(lambda: blocks(daemon) > before, "the other engine stores")
        other.kill()
        (hit,) = engine.generate(LONG)
        assert hit.cached == WHOLE
        until(lambda: len(daemon.get("/status")[1]["ranks"]) == 1, "the dead engine is detached")
        # What it stored until then is whole, as far as it goes.
        answers = engine.generate(*cut)
        assert sum(each.cached for each in answers) > 0
        assert [each.tokens for each in [hit, *answers]] == truth(LONG, *cut)


@pytest.mark.alone
@pytest.mark.parametrize("chunks", [0, LAYERS], ids=["before their step", "within their step"])
def test_tensor_parallel_ranks_store_and_load_their_shards(
    model: str, short_dir: Path, truth: Truth, chunks: int
) -> None:
    """In vLLM's default shape: an engine core and two workers of their own, which drain without being asked."""
    needs_gpus(2)
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    rule = "load.before_copy@1=raise(planned)"  # of the first load, on the rank that comes second
    with DaemonProcess(short_dir, *POOL, KVSIDECAR_FAILPOINTS=rule) as daemon:
        daemon.wait_ready()
        transfer = kvsidecar(daemon.socket, load_chunks=chunks)
        with EngineProcess(model, transfer, variables, tensor_parallel_size=2) as engine:
            engine.wait_started()
            _one_rank_cannot_load(engine, daemon, truth, loads=2 * max(1, chunks))
            stores_and_hits(engine, daemon, truth)
            assert len(daemon.get("/status")[1]["ranks"]) == 2
            daemon.process.kill()
            daemon.process.wait(SECONDS)
            other = prompt("alone", 300)
            (alone,) = engine.generate(other)
            assert [alone.tokens] == truth(other)
            until(engine.reset, "no block is held")
            with DaemonProcess(short_dir, *POOL) as next_one:
                stores_and_hits(engine, next_one.wait_ready(), truth)


def test_ranks_that_share_a_head_store_it_once_and_all_load_it(daemon: DaemonProcess, tmp_path: Path) -> None:
    needs_gpus(2)
    model, block_bytes = models.save_one_head(tmp_path), LAYERS * 2 * BLOCK * 32 * 4  # K and V, of 32 float32 numbers
    with running(model, enable_prefix_caching=False) as engine:
        right = engine.generate(LONG)[0].tokens
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with EngineProcess(model, kvsidecar(daemon.socket), variables, tensor_parallel_size=2) as engine:
        engine.wait_started()
        join(engine, daemon)
        assert engine.generate(LONG)[0].tokens == right
        until(engine.reset, "all is stored")
        assert daemon.metric('kvsidecar_copied_bytes_total{direction="store"}') == blocks(daemon) * block_bytes
        (hit,) = engine.generate(LONG)
        assert (hit.cached, hit.tokens) == (WHOLE, right)
        assert daemon.metric('kvsidecar_copied_bytes_total{direction="load"}') == 2 * WHOLE // BLOCK * block_bytes


def test_the_log_of_an_engine_of_three_processes_says_once_how_the_connection_is(
    model: str, short_dir: Path, tmp_path: Path
) -> None:
    needs_gpus(2)
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }

    def said() -> list[str]:
        return [line for line in engine.text().splitlines() if "kvsidecar: " in line or "the daemon" in line]

    with (
        (tmp_path / "log").open("w") as log,
        DaemonProcess(short_dir, *POOL) as daemon,
        EngineProcess(model, kvsidecar(daemon.socket), variables, stderr=log, tensor_parallel_size=2) as engine,
    ):
        engine.wait_started()
        join(engine, daemon)
        daemon.process.kill()
        daemon.process.wait(SECONDS)
        until(lambda: "is lost" in engine.text(), "it notices", engine.text)
        with DaemonProcess(short_dir, *POOL) as second:
            rejoin(engine, second.wait_ready())
            lines = said()
        for line in lines:
            assert re.search(r"\(\w+( \w+)* pid=\d+\) (INFO|WARNING) [\d: -]+\[\S+:\d+\] kvsidecar: ", line), (
                "in vLLM's format"
            )
        counted = {
            text: sum(text in line for line in lines)
            for text in ("attached to the daemon at", "the daemon is ready", "is lost", "attached again to the daemon")
        }
        assert list(counted.values()) == [1, 2, 1, 1], lines


@pytest.mark.alone
def test_data_parallel_replicas_of_one_engine_share_the_cache(model: str, daemon: DaemonProcess, truth: Truth) -> None:
    needs_gpus(2)
    # On a CPU, vLLM 0.33 gives each replica a NUMA node of its own, which fails where there is only one, unless this
    # variable is set. Its value 0 simulates no nodes, which would bind threads.
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_SIM_MULTI_NUMA": "0"}
    with ReplicasProcess(model, kvsidecar(daemon.socket), variables, data_parallel_size=2) as engine:
        engine.wait_started()
        for replica in range(2):
            _joins(engine, replica, daemon)
        assert len(daemon.get("/status")[1]["ranks"]) == 2
        for storing, loading in ((0, 1), (1, 0)):
            before, name = blocks(daemon), prompt(f"of {storing}", 300)
            (cold,) = engine.generate(name, replica=storing)
            until(lambda before=before: blocks(daemon) >= before + 9, "an idle replica stores all", daemon)  # type: ignore[misc]
            (hit,) = engine.generate(name, replica=loading)
            assert (cold.cached, hit.cached) == (0, 288)
            assert [cold.tokens] == [hit.tokens] == truth(name)


def _joins(engine: ReplicasProcess, replica: int, daemon: DaemonProcess) -> None:
    """`join` would take what another replica still stores for this one's."""

    def stores() -> bool:
        before = blocks(daemon)
        engine.generate(prompt(time.monotonic_ns(), 33), tokens=1, replica=replica)
        time.sleep(0.05)
        return blocks(daemon) > before

    until(stores, f"replica {replica} uses the daemon", daemon)


def _one_rank_cannot_load(engine: EngineProcess, daemon: DaemonProcess, truth: Truth, *, loads: int) -> None:
    join(engine, daemon)
    before = blocks(daemon)
    half = prompt("half", 300)
    engine.generate(half)
    until(lambda: blocks(daemon) >= before + 9, "an idle engine stores all", daemon)
    until(engine.reset, "no block is held")
    (answer,) = engine.generate(half)
    outcomes = [
        daemon.metric(f'kvsidecar_jobs_total{{direction="load",outcome="{each}"}}') for each in ("done", "failed")
    ]
    assert outcomes == [loads - 1, 1]
    assert [answer.tokens] == truth(half)
    until(engine.reset, "no block is held")
