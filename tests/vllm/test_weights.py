"""Engines whose weights are updated in place, one after the other, and engines that were started from copies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.harness import DaemonProcess
from tests.marks import promise
from tests.vllm import models
from tests.vllm.conftest import Truth
from tests.vllm.engine import (
    LONG,
    WHOLE,
    Engine,
    EngineProcess,
    Prompt,
    ask_again,
    forget,
    hits,
    join,
    joined,
    kvsidecar,
    prompt,
    running,
)

safetensors = pytest.importorskip("safetensors.torch")


def computed(engine: Engine, asked: Prompt, salt: str) -> tuple[int, ...]:
    """The tokens that the engine's weights give, without any cache."""
    (answer,) = engine.generate(Prompt(asked.ids, salt))
    assert answer.cached == 0
    engine.drain()
    return answer.tokens


@promise("engines with the new weights are never offered blocks of other weights")
def test_an_updated_engine_is_not_offered_kv_of_the_old_weights_and_shares_again_by_name(
    model: str, daemon: DaemonProcess, truth: Truth, tmp_path: Path
) -> None:
    new, name = models.save("other", tmp_path), tmp_path / "name"
    name.write_text("another run's")
    transfer = kvsidecar(daemon.socket, weights_version_file=str(name))
    with EngineProcess(model, transfer) as other, running(model, transfer) as engine:
        other.wait_started()
        join(engine, daemon)
        join(other, daemon)
        engine.update(new)
        assert engine.reset(connector=True)
        wanted = computed(engine, LONG, "cold")
        assert [wanted] != truth(LONG)

        # The other replica has the old weights still, and stores.
        other.generate(LONG)
        other.drain()
        (cold,) = engine.generate(LONG)
        assert (cold.cached, cold.tokens) == (0, wanted)
        engine.drain()
        assert other.reset()
        (theirs,) = other.generate(LONG)
        assert theirs.cached == WHOLE, "they keep what they share"
        assert [theirs.tokens] == truth(LONG)
        other.drain()
        assert engine.reset()
        (mine,) = engine.generate(LONG)
        assert (mine.cached, mine.tokens) == (WHOLE, wanted), "an engine that is alone still has its own"
        engine.drain()
        assert engine.counters()["vllm:kvsidecar_unnamed_resets"] == 1
        name.write_text("step 1")
        other.update(new)
        assert other.reset(connector=True)
        assert engine.reset(connector=True)
        (cold,) = other.generate(LONG)
        assert (cold.cached, cold.tokens) == (0, wanted)
        other.drain()
        (shared,) = engine.generate(LONG)
        assert (shared.cached, shared.tokens) == (WHOLE, wanted)
        engine.drain()

        # Nobody has changed the name, so nobody has said what the weights are.
        assert engine.reset(connector=True)
        assert engine.generate(LONG)[0].cached == 0
        engine.drain()
        assert engine.counters()["vllm:kvsidecar_unnamed_resets"] == 2


def test_a_reset_that_is_refused_must_be_asked_for_again(
    model: str, daemon: DaemonProcess, truth: Truth, tmp_path: Path
) -> None:
    """Requests run: the GPU keeps their KV, which nobody may share."""
    with joined(daemon, model) as engine:
        ask_again(engine)
        engine.add(prompt("runs", 300), tokens=30)
        engine.step_until(lambda: engine.scheduler.running, "a request runs")
        stored = daemon.get("/status")[1]["jobs"]["stores_done"]
        assert not engine.reset(connector=True)
        engine.run()
        engine.drain()
        assert daemon.get("/status")[1]["jobs"]["stores_done"] - stored <= 1, "what was under way, and nothing since"
        assert engine.generate(LONG)[0].cached == 0
        engine.drain()
        assert engine.reset(connector=True)
        (cold,) = engine.generate(LONG)
        forget(engine)
        (hit,) = engine.generate(LONG)
        assert (cold.cached, hit.cached) == (0, WHOLE)
        assert [cold.tokens] == [hit.tokens] == truth(LONG)
        engine.drain()
        counters = engine.counters()
        assert counters["vllm:kvsidecar_resets"] == 2
        assert counters["vllm:kvsidecar_refused_resets"] == 1
        assert counters["vllm:kvsidecar_own_hashes"] == 0


def test_an_engine_whose_hashes_are_its_own_says_so_on_its_metrics(
    model: str, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This version makes a random seed for some algorithms only; vLLM 0.26 does for all."""
    pytest.importorskip("xxhash")
    monkeypatch.delenv("PYTHONHASHSEED")
    with joined(daemon, model, prefix_caching_hash_algo="xxhash") as engine:
        assert engine.counters()["vllm:kvsidecar_own_hashes"] == 1


def test_two_copies_of_the_same_weights_share(model: str, daemon: DaemonProcess, truth: Truth, tmp_path: Path) -> None:
    """As two pods have them that downloaded a model each: another directory, other times."""
    copy = tmp_path / "downloaded later"
    shutil.copytree(model, copy, copy_function=shutil.copyfile)
    for number, each in enumerate(copy.iterdir()):
        os.utime(each, (number, number))
    with joined(daemon, model) as engine:
        engine.generate(LONG)
        engine.drain()
    with joined(daemon, str(copy)) as engine:
        hits(engine, truth)
        (space,) = daemon.get("/status")[1]["namespaces"]
        assert space["namespace"]["model"].startswith("LlamaForCausalLM-")


def test_a_copy_in_which_an_adapter_was_merged_into_one_tensor_hits_nothing(
    model: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    merged = tmp_path / "merged"
    shutil.copytree(model, merged)
    (weights,) = merged.glob("*.safetensors")
    tensors = safetensors.load_file(weights)
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 1.01
    safetensors.save_file(tensors, weights, {"format": "pt"})
    with joined(daemon, model) as engine:
        engine.generate(LONG)
        engine.drain()
    with joined(daemon, str(merged)) as engine:
        assert engine.generate(LONG)[0].cached == 0


def test_an_engine_that_sleeps_as_older_versions_do_is_not_offered_kv_of_before_when_it_wakes(
    model: str, daemon: DaemonProcess, truth: Truth, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They reset the prefix cache without the connector. What sleeps is not the memory, which a CPU has no way to."""
    with joined(daemon, model) as engine:
        core = engine.engine.engine_core.engine_core
        for call in ("sleep", "wake_up"):
            monkeypatch.setattr(core.model_executor, call, lambda *_: None)
        monkeypatch.setattr(core, "_reset_caches", lambda *_, **__: core.reset_prefix_cache(True))
        ask_again(engine)
        core.sleep(0)
        core.wake_up(["scheduling"])
        hits(engine, truth)  # it was paused only
        engine.drain()
        core.sleep(2)
        engine.update(models.save("other", tmp_path))
        core.wake_up()
        (cold,) = engine.generate(LONG)
        assert (cold.cached, cold.tokens) == (0, computed(engine, LONG, "cold"))
