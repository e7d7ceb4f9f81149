"""What vLLM for the CPU cannot run: an FP8 KV cache, MLA with prefix caching, pipeline parallel ranks.

TEST_DEVICE=cuda python -m pytest tests/vllm

With it, the other tests of this folder run on the GPU as well. Those of several ranks need as many GPUs.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness import DEVICE, SECONDS, DaemonProcess, Gate
from tests.vllm import models
from tests.vllm.conftest import POOL, Truth
from tests.vllm.engine import LONG, WHOLE, EngineProcess, blocks, join, kvsidecar, needs_gpus, rejoin
from tests.vllm.hit_runs import stores_and_hits, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cuda", reason="TEST_DEVICE=cuda is not set"),
]

MLA: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "TRITON_MLA"}


@pytest.fixture(scope="session")
def mla(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save("mla", tmp_path_factory.getbasetemp())


def _hits_like_the_gpus_own(engine: EngineProcess, daemon: DaemonProcess) -> None:
    """The same kernels read the same bytes, so also bfloat16 gives the same tokens."""
    rejoin(engine, daemon)
    before = blocks(daemon)
    (cold,) = engine.generate(LONG)
    until(lambda: blocks(daemon) >= before + WHOLE // 32, "an idle engine stores all", daemon)
    (own,) = engine.generate(LONG)
    until(engine.reset, "no block is held")
    (hit,) = engine.generate(LONG)
    assert (cold.cached, own.cached, hit.cached) == (0, WHOLE, WHOLE)
    assert hit.tokens == own.tokens


def test_latent_attention_is_stored_and_hit(mla: str, daemon: DaemonProcess) -> None:
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with EngineProcess(mla, kvsidecar(daemon.socket), variables, **MLA) as engine:
        engine.wait_started()
        _hits_like_the_gpus_own(engine, daemon)


def test_an_fp8_kv_cache_is_stored_and_hit_and_shared_with_no_other_format(model: str, daemon: DaemonProcess) -> None:
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    namespaces = set()
    for cache_dtype in ("fp8", "auto"):
        options = {"dtype": "bfloat16", "kv_cache_dtype": cache_dtype}
        with EngineProcess(model, kvsidecar(daemon.socket), variables, **options) as engine:
            engine.wait_started()
            _hits_like_the_gpus_own(engine, daemon)  # and begins without a hit
            namespaces |= {tuple(rank["namespace"].items()) for rank in daemon.get("/status")[1]["ranks"]}
    assert len(namespaces) == 2


def test_latent_attention_of_two_ranks_is_stored_once_and_loaded_by_both(mla: str, daemon: DaemonProcess) -> None:
    needs_gpus(2)
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with EngineProcess(mla, kvsidecar(daemon.socket), variables, tensor_parallel_size=2, **MLA) as engine:
        engine.wait_started()
        _hits_like_the_gpus_own(engine, daemon)
        ranks = daemon.get("/status")[1]["ranks"]
        assert sorted(rank["stored_bytes"] > 0 for rank in ranks) == [False, True]
        assert all(rank["loaded_bytes"] > 0 for rank in ranks)


def test_pipeline_parallel_ranks_store_and_load_their_layers(model: str, daemon: DaemonProcess, truth: Truth) -> None:
    needs_gpus(2)
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with EngineProcess(model, kvsidecar(daemon.socket), variables, pipeline_parallel_size=2) as engine:
        engine.wait_started()
        stores_and_hits(engine, daemon, truth)
        ranks = daemon.get("/status")[1]["ranks"]
        assert len(ranks) == 2
        assert all(rank["stored_bytes"] > 0 and rank["loaded_bytes"] > 0 for rank in ranks)


def test_tensor_parallel_ranks_survive_a_daemon_that_is_killed_while_they_load(
    model: str, short_dir: Path, gate: Gate, truth: Truth
) -> None:
    needs_gpus(2)
    import torch

    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    held = f"load.in_flight={gate}"
    with DaemonProcess(short_dir, *POOL, KVSIDECAR_FAILPOINTS=held) as daemon:
        gate.let_pass(2 * torch.cuda.device_count())  # each copier's self-test
        daemon.wait_ready()
        with EngineProcess(model, kvsidecar(daemon.socket), variables, tensor_parallel_size=2) as engine:
            engine.wait_started()
            join(engine, daemon)
            before = blocks(daemon)
            engine.generate(LONG)
            until(lambda: blocks(daemon) >= before + WHOLE // 32, "an idle engine stores all", daemon)
            until(engine.reset, "no block is held")
            engine.send_generate(LONG, tokens=8)
            until(lambda: daemon.get("/status")[1]["jobs"]["running"], "a load runs", daemon)
            daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait(SECONDS)
            assert [each.tokens for each in engine.answers()] == truth(LONG)
            until(engine.reset, "no block is held")
            with DaemonProcess(short_dir, *POOL) as next_one:
                stores_and_hits(engine, next_one.wait_ready(), truth)
