"""A real vLLM whose KV cache is physical memory of the CUDA VMM API: its sleep mode, and its cumem allocator alone.

TEST_DEVICE=cuda python -m pytest tests/vllm/test_sleep.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsidecar.support.cuda_driver import CudaContext
from kvsidecar.support.units import MiB
from tests.harness import DEVICE, DaemonProcess
from tests.vllm import models
from tests.vllm.engine import LONG, WHOLE, EngineProcess, blocks, kvsidecar, prompt, rejoin
from tests.vllm.hit_runs import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,  # what is free of the GPU is measured
    pytest.mark.skipif(DEVICE != "cuda", reason="TEST_DEVICE=cuda is not set"),
]

VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
ROUNDS = 20
KV: dict[str, Any] = {"kv_cache_memory_bytes": 256 * MiB}
"""Much more than the tolerance of the measurement."""


def started(
    model: str, transfer: dict[str, Any] | None, variables: dict[str, str] | None = None, **options: Any
) -> EngineProcess:
    return EngineProcess(model, transfer, VARIABLES | (variables or {}), **KV, **options)


def sleep(engine: EngineProcess, gpu: CudaContext, level: int) -> int:
    """Bytes of the GPU that are free then."""
    engine.sleep(level)
    return gpu.memory_info()[0]


def wake(engine: EngineProcess, model: str, level: int) -> None:
    if level == 1:
        engine.wake()
        return
    engine.wake("weights")
    engine.update(model)
    engine.wake("kv_cache")


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_all_memory_and_blocks_hit_after_each_wake(model: str, daemon: DaemonProcess, level: int) -> None:
    gpu = CudaContext(0)
    with started(model, None, enable_sleep_mode=True) as engine:
        engine.wait_started()
        (own,) = engine.generate(LONG)
        (again,) = engine.generate(LONG)
        without = sleep(engine, gpu, level)
    with started(model, kvsidecar(daemon.socket), enable_sleep_mode=True) as engine:
        engine.wait_started()
        rejoin(engine, daemon)
        before = blocks(daemon)
        engine.generate(LONG)
        until(lambda: blocks(daemon) >= before + WHOLE // 32, "an idle engine stores all", daemon)
        for number in range(ROUNDS):
            engine.generate(*(prompt((number, each), 200) for each in range(4)), tokens=2)  # their stores are under way
            assert sleep(engine, gpu, level) >= without - 64 * MiB
            wake(engine, model, level)
            (hit,) = engine.generate(LONG)
            assert hit.cached == WHOLE
            assert hit.tokens == again.tokens
    assert own.tokens == again.tokens
    gpu.close()


def test_weights_that_changed_while_the_engine_slept_hit_nothing_of_before(
    model: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    other = models.save("other", tmp_path)
    with started(model, kvsidecar(daemon.socket), enable_sleep_mode=True) as engine:
        engine.wait_started()
        rejoin(engine, daemon)
        before = blocks(daemon)
        engine.generate(LONG)
        until(lambda: blocks(daemon) >= before + WHOLE // 32, "an idle engine stores all", daemon)
        engine.sleep(2)
        wake(engine, other, 2)
        (answer,) = engine.generate(LONG)
        assert answer.cached == 0


def test_an_engine_that_is_killed_asleep_or_awake_leaves_no_memory_behind(model: str, daemon: DaemonProcess) -> None:
    gpu = CudaContext(0)
    free = gpu.memory_info()[0]
    for asleep in (False, True):
        with started(model, kvsidecar(daemon.socket), enable_sleep_mode=True) as engine:
            engine.wait_started()
            rejoin(engine, daemon)
            engine.generate(LONG)
            if asleep:
                engine.sleep(1)
            engine.kill()
        until(lambda: gpu.memory_info()[0] >= free - 64 * MiB, "its memory is free", daemon)
    gpu.close()


@pytest.mark.parametrize("expandable", [False, True], ids=["cumem", "cumem beside expandable segments"])
def test_the_cumem_allocator_without_sleep_mode_stores_and_hits(
    model: str, daemon: DaemonProcess, expandable: bool
) -> None:
    """(vLLM takes expandable segments beside a connector only if this allocator is on.)"""
    variables = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    with started(model, kvsidecar(daemon.socket), variables, enable_cumem_allocator=True) as engine:
        engine.wait_started()
        rejoin(engine, daemon)
        before = blocks(daemon)
        (cold,) = engine.generate(LONG)
        until(lambda: blocks(daemon) >= before + WHOLE // 32, "an idle engine stores all", daemon)
        until(engine.reset, "no block is held")
        (hit,) = engine.generate(LONG)
        assert (cold.cached, hit.cached) == (0, WHOLE)
        assert hit.tokens == cold.tokens
