"""Models with states, whose blocks are long: hits that end inside a block, as those of the engine's own cache do."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.harness import DEVICE, DaemonProcess
from tests.marks import promise
from tests.vllm import models
from tests.vllm.engine import Prompt, forget, join, joined, kvsidecar, prompt, running

UNIT = 32
BLOCK = 4 * UNIT
FINE: dict[str, Any] = {"block_size": BLOCK, "prefix_match_unit": UNIT, "enable_prefix_caching": True}
EXACT = DEVICE == "cuda"
"""Whether vLLM 0.33 computes the same in whatever pieces, and beside whatever else; not of this model on a CPU."""
FIRST = {
    "in the last block": prompt("long", 6 * BLOCK + 2 * UNIT + 5),
    "in the first block": prompt("short", 3 * UNIT + 1),
    "at a block's end": prompt("whole", 3 * BLOCK + 3),
    "in a block that the answer fills": prompt("fills", 3 * BLOCK - 5),
}
TURNS = {name: first + prompt(f"turn of {name}", 60).ids for name, first in FIRST.items()}
MORE = [prompt(f"more {i}", i * UNIT + 5) for i in range(1, 8, 2)]
TOKENS = 12


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save_states(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module", autouse=True)
def _states_on_a_cpu() -> Iterator[None]:
    """What vLLM's states need on a GPU they have, and on a CPU not: the kernel that copies one from block to block does
    nothing without Triton, and that of a convolution's single tokens gives other results than that of many."""
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d
    from vllm.v1.worker import mamba_utils

    def copy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    def update(
        x: torch.Tensor, state: torch.Tensor, *weights: Any, conv_state_indices: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        states = state[conv_state_indices].contiguous()
        out = causal_conv1d.causal_conv1d_update_torch(x.unsqueeze(-1), states, *weights, **options)
        state[conv_state_indices] = states
        return out.squeeze(-1)

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE != "cuda":
            patch.setattr(mamba_utils, "batch_memcpy", copy)
            patch.setattr(causal_conv1d, "causal_conv1d_update_cpu", update)
        yield


@pytest.fixture(scope="module")
def right(states: str) -> dict[Prompt, tuple[int, ...]]:
    """The tokens without a connector, and without a hit."""
    prompts = [*FIRST.values(), *TURNS.values(), *MORE]
    with running(states, **FINE) as engine:
        found = {each: engine.generate(Prompt(each.ids, str(i)), tokens=TOKENS)[0] for i, each in enumerate(prompts)}
    assert not any(each.cached for each in found.values())
    assert len({each.tokens for each in found.values()}) == len(found), "the tokens do not depend on the KV"
    return {each: answer.tokens for each, answer in found.items()}


@promise("a hit from the pool ends where one on the GPU would")
def test_hits_end_where_those_of_the_engine_itself_do(
    states: str, daemon: DaemonProcess, right: dict[Prompt, tuple[int, ...]]
) -> None:
    """The same prompt again, and a longer one. (What vLLM 0.33 answers after its own hit inside a block is not what it
    answers without one, on a CPU and on an H200: it loses the KV of that block.)"""
    with joined(daemon, states, **FINE) as engine:
        for name, first in FIRST.items():
            for again in (first, TURNS[name]):
                cached = {}
                for where in ("GPU", "pool"):
                    cold, hit = (Prompt(each.ids, f"{len(again.ids)} {where}") for each in (first, again))
                    (answer,) = engine.generate(cold, tokens=TOKENS)
                    assert (answer.cached, answer.tokens) == (0, right[first])
                    if where == "pool":
                        forget(engine)
                    (answer,) = engine.generate(hit, tokens=TOKENS)
                    cached[where] = answer.cached
                assert cached["GPU"] == cached["pool"] > 0
                if again is first or EXACT:  # else it is computed in other pieces
                    assert answer.tokens == right[again], name
        assert engine.connector._scheduler.counters.unanswered_lookups == 0


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_requests_are_computed_and_hit_together(
    states: str, daemon: DaemonProcess, right: dict[Prompt, tuple[int, ...]], mode: str
) -> None:
    """States are stored while their requests go on and others wait for their turn."""
    prompts, inside = [*FIRST.values(), *MORE], 0
    few: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 2 * BLOCK}
    with running(states, kvsidecar(daemon.socket, store_mode=mode), **FINE, **few) as engine:
        join(engine, daemon)
        for _ in range(3):
            for each, answer in zip(prompts, engine.generate(*prompts, tokens=TOKENS), strict=True):
                assert not EXACT or answer.tokens == right[each]
                inside += answer.cached % BLOCK != 0
            engine.drain()
            forget(engine)
        assert daemon.metric('kvsidecar_jobs_total{direction="load",outcome="failed"}') == 0
    assert inside > 0
