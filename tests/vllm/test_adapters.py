"""Engines with LoRA adapters, whose names and paths stay while their content changes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness import DEVICE, DaemonProcess, eventually
from tests.marks import promise
from tests.vllm import models
from tests.vllm.engine import (
    LONG,
    WHOLE,
    Adapter,
    EngineProcess,
    blocks,
    forget,
    join,
    joined,
    kvsidecar,
    needs_gpus,
    prompt,
    running,
)

LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
if DEVICE == "cuda":
    LORA["dtype"] = "bfloat16"  # vLLM's kernels take no adapter in float32

Tokens = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def wanted(model: str) -> Tokens:
    """What an engine without a connector and without a prefix cache answers with an adapter."""
    answers: Tokens = {}
    numbers = iter(range(1, 100))
    with running(model, enable_prefix_caching=False, **LORA) as engine:
        for name, (seed, alpha) in {"v1": (1, 16), "v2": (2, 16), "scaled": (1, 32)}.items():
            path = Path(model).parent / "adapters" / name
            adapter = Adapter(models.save_adapter(path, seed, alpha=alpha), number=next(numbers))
            (answer,) = engine.generate(LONG, adapter=adapter)
            answers[name] = answer.tokens
    assert len(set(answers.values())) == len(answers)
    return answers


@promise("which the connector replaces with the [content of the adapter](#lora-adapters)")
def test_a_restarted_engine_hits_an_adapter_by_its_content(
    model: str, daemon: DaemonProcess, tmp_path: Path, wanted: Tokens
) -> None:
    """Not by its name and path, which stay the same when it is trained again, and differ on another node."""
    path = tmp_path / "adapter"
    adapter = Adapter(models.save_adapter(path, 1))
    with joined(daemon, model, **LORA) as engine:
        engine.load(adapter)
        (cold,) = engine.generate(LONG, adapter=adapter)
        assert (cold.cached, cold.tokens) == (0, wanted["v1"])
        engine.drain()
        (base,) = engine.generate(LONG)
        assert base.cached == 0
        engine.drain()
    shutil.copytree(path, tmp_path / "copy")
    models.save_adapter(path, 2)
    with joined(daemon, model, **LORA) as engine:
        engine.load(adapter)
        (other,) = engine.generate(LONG, adapter=adapter)
        assert (other.cached, other.tokens) == (0, wanted["v2"])
        engine.drain()
        copy = Adapter(str(tmp_path / "copy"), "another name", 2)
        engine.load(copy)
        (hit,) = engine.generate(LONG, adapter=copy)
        assert (hit.cached, hit.tokens) == (WHOLE, wanted["v1"])
        engine.drain()
        # The configuration is content, too.
        models.save_adapter(tmp_path / "copy", 1, alpha=32)
        scaled = Adapter(str(tmp_path / "copy"), "a third name", 3)
        engine.load(scaled)
        (cold,) = engine.generate(LONG, adapter=scaled)
        assert (cold.cached, cold.tokens) == (0, wanted["scaled"])
        engine.drain()
        (hit,) = engine.generate(LONG)
        assert (hit.cached, hit.tokens) == (WHOLE, base.tokens), "requests without an adapter are not concerned"
        assert "vllm:kvsidecar_unknown_adapters" not in engine.counters()
        engine.drain()


def test_a_request_is_not_offloaded_before_its_adapter_is_known(
    model: str, daemon: DaemonProcess, tmp_path: Path, wanted: Tokens
) -> None:
    """vLLM without a server loads an adapter only in the step that computes the first request with it."""
    adapter = Adapter(models.save_adapter(tmp_path / "adapter", 1))
    with joined(daemon, model, **LORA) as engine:
        for expected in (0, 0, WHOLE):  # the second is the first that is stored
            (answer,) = engine.generate(LONG, adapter=adapter)
            assert (answer.cached, answer.tokens) == (expected, wanted["v1"])
            forget(engine)
        assert engine.counters()["vllm:kvsidecar_unknown_adapters"] == 1


def test_an_adapter_is_what_the_engine_has_loaded_whatever_its_files_are_now(
    model: str, daemon: DaemonProcess, tmp_path: Path, wanted: Tokens
) -> None:
    adapter = Adapter(models.save_adapter(tmp_path / "adapter", 1))
    other = Adapter(models.save_adapter(tmp_path / "other", 3), "other", 2)
    with joined(daemon, model, **LORA) as engine:
        engine.load(adapter)
        engine.generate(LONG, adapter=adapter)
        engine.drain()
        models.save_adapter(tmp_path / "adapter", 2)
        assert engine.reset()
        (hit,) = engine.generate(LONG, adapter=adapter)
        assert (hit.cached, hit.tokens) == (WHOLE, wanted["v1"]), "it has the old content in memory"
        engine.drain()
        # There is room for one adapter. The next request makes vLLM read the files again.
        engine.load(other)
        assert engine.reset()
        (cold,) = engine.generate(LONG, adapter=adapter)
        assert (cold.cached, cold.tokens) == (0, wanted["v2"])
        engine.drain()
        assert engine.counters()["vllm:kvsidecar_failed_loads"] == 1
        # That request's hashes were of the old content.
        assert engine.reset()
        for expected in (0, WHOLE):
            (answer,) = engine.generate(LONG, adapter=adapter)
            assert (answer.cached, answer.tokens) == (expected, wanted["v2"])
            forget(engine)
    models.save_adapter(tmp_path / "adapter", 1)
    with joined(daemon, model, **LORA) as engine:
        engine.load(adapter)
        (hit,) = engine.generate(LONG, adapter=adapter)
        assert (hit.cached, hit.tokens) == (WHOLE, wanted["v1"]), "nothing was stored under the old content since"
        engine.drain()


@pytest.mark.parametrize("inplace", [False, True])
def test_an_adapter_that_is_replaced_in_place_is_another(
    model: str, daemon: DaemonProcess, tmp_path: Path, wanted: Tokens, inplace: bool
) -> None:
    """Also in vLLM's own cache, which goes by the path. Its server has the later requests load in place, too, so that
    vLLM reads the files again in each of their steps."""
    adapter = Adapter(models.save_adapter(tmp_path / "adapter", 1), inplace=inplace)
    with joined(daemon, model, **LORA) as engine:
        for seed, version in ((1, "v1"), (2, "v2")):
            models.save_adapter(tmp_path / "adapter", seed)
            engine.load(replace(adapter, inplace=True))
            (cold,) = engine.generate(LONG, adapter=adapter)
            assert (cold.cached, cold.tokens) == (0, wanted[version])
            forget(engine)
            (hit,) = engine.generate(LONG, adapter=adapter)
            assert (hit.cached, hit.tokens) == (WHOLE, wanted[version])
            engine.drain()


@pytest.mark.parametrize("options", [{}, {"store_mode": "lazy", "lazy_watermark": 1000}], ids=["eager", "lazy"])
def test_what_a_request_goes_on_to_compute_with_a_replaced_adapter_is_stored_for_nobody(
    model: str, daemon: DaemonProcess, tmp_path: Path, options: dict[str, Any]
) -> None:
    adapter = Adapter(models.save_adapter(tmp_path / "adapter", 1))
    asked = prompt("runs", 300)
    with joined(daemon, model, kvsidecar(daemon.socket, **options), **LORA) as engine:
        engine.load(adapter)
        engine.generate(prompt("known", 40), adapter=adapter)  # the request below is offloaded from its start
        engine.add(asked, tokens=200, adapter=adapter)
        before: list[int] = []

        def has_begun() -> bool:
            before[:] = [len(each.outputs[0].token_ids) for each in engine.step()]
            return sum(before) >= 20

        eventually(has_begun, "some tokens", pause=0.0)
        models.save_adapter(tmp_path / "adapter", 2)
        engine.load(replace(adapter, inplace=True))
        (answer,) = engine.run().values()
        engine.drain()
        assert engine.counters()["vllm:kvsidecar_changed_adapters"] == 1
        if options:  # so much that it looks for what the GPU evicts next, and no more than the pool has room for
            for number in range(3):
                engine.generate(prompt(number, 900))
            engine.drain()
    models.save_adapter(tmp_path / "adapter", 1)
    whole = asked + answer.tokens
    with joined(daemon, model, **LORA) as engine:
        engine.load(adapter)
        (again,) = engine.generate(whole, adapter=adapter)
        assert again.cached <= len(asked.ids) + sum(before)
        assert again.cached or options
        engine.drain()


def test_two_ranks_in_processes_of_their_own_agree_on_an_adapter(
    model: str, daemon: DaemonProcess, tmp_path: Path, wanted: Tokens
) -> None:
    """As a server runs: the scheduler hears of what the ranks load only in a step, and an idle engine makes none."""
    needs_gpus(2)
    adapter = Adapter(models.save_adapter(tmp_path / "adapter", 1))
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    options = {"tensor_parallel_size": 2, **LORA}
    with EngineProcess(model, kvsidecar(daemon.socket), variables, **options) as engine:
        engine.wait_started()
        join(engine, daemon)
        for seed, version in ((1, "v1"), (2, "v2")):
            models.save_adapter(tmp_path / "adapter", seed)
            engine.load(replace(adapter, inplace=True))
            before = blocks(daemon)
            (cold,) = engine.generate(LONG, adapter=adapter)
            assert (cold.cached, cold.tokens) == (0, wanted[version])
            stored = before + WHOLE // models.BLOCK
            eventually(lambda at_least=stored: blocks(daemon) >= at_least, "the blocks of both ranks")
            eventually(engine.reset, "no store under way")
            (hit,) = engine.generate(LONG, adapter=adapter)
            assert (hit.cached, hit.tokens) == (WHOLE, wanted[version])
        assert "vllm:kvsidecar_unknown_adapters" not in engine.counters()
