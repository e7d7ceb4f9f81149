"""Speculative decoding with a drafter that has KV of its own: it lies in the same blocks, and comes back with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import DaemonProcess
from tests.vllm import models
from tests.vllm.engine import (
    LONG,
    WHOLE,
    Engine,
    EngineProcess,
    Prompt,
    forget,
    join,
    joined,
    kvsidecar,
    needs_gpus,
)
from tests.vllm.models import BLOCK

TOKENS = 40
COUNTED = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Guessed:
    """An answer, and how well it was guessed."""

    cached: int
    tokens: tuple[int, ...]
    counts: dict[str, float]
    """By name, without what `COUNTED` says; those that are accepted also by position in a draft."""

    @property
    def accepted(self) -> float:
        """The part of what was drafted."""
        return self.counts["accepted_tokens"] / self.counts["draft_tokens"]


def guessed(engine: Engine | EngineProcess, what: Prompt) -> Guessed:
    before = engine.counters()
    (answer,) = engine.generate(what, tokens=TOKENS)
    counts = {
        name.removeprefix(COUNTED): count - before.get(name, 0)
        for name, count in engine.counters().items()
        if name.startswith(COUNTED)
    }
    return Guessed(answer.cached, answer.tokens, counts)


def guesses_alike(engine: Engine | EngineProcess, whole: int) -> None:
    """Requests are answered and guessed after hits from the pool as after hits on the GPU.

    Args:
        whole: tokens of a hit of `LONG`.
    """
    cold, own = guessed(engine, LONG), guessed(engine, LONG)
    assert (cold.cached, own.cached, cold.tokens) == (0, whole, own.tokens)
    assert min(cold.accepted, own.accepted) > 0.6
    # Its last blocks were computed with drafts. Of several groups, they are hit once they were part of a prompt.
    longer = LONG + cold.tokens + [3] * 20
    guessed(engine, longer)
    longer_own = guessed(engine, longer)
    assert longer_own.cached == whole + 2 * BLOCK
    for what, on_gpu in ((LONG, own), (longer, longer_own)):
        forget(engine)
        assert guessed(engine, what) == on_gpu


def whole_of(method: str) -> int:
    """Tokens of a hit of `LONG`. A head's KV of a block's last token depends on the token after it, so vLLM computes
    the last block again."""
    return WHOLE if method == "draft_model" else WHOLE - BLOCK


METHODS = pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
HYBRID = pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "several groups"])


@METHODS
@HYBRID
def test_as_much_is_accepted_after_a_hit_from_the_pool_as_on_the_gpu(
    method: str, hybrid: bool, ahead: bool, daemon: DaemonProcess, tmp_path: Path
) -> None:
    model, drafts = models.save_drafted(tmp_path, method, hybrid=hybrid)
    with joined(daemon, model, speculative_config=drafts, async_scheduling=ahead) as engine:
        assert (len(engine.scheduler.kv_cache_config.kv_cache_groups) > 1) is hybrid
        guesses_alike(engine, whole_of(method))


@pytest.mark.long
@METHODS
@HYBRID
def test_as_much_is_accepted_by_two_ranks(method: str, hybrid: bool, daemon: DaemonProcess, tmp_path: Path) -> None:
    needs_gpus(2)
    model, drafts = models.save_drafted(tmp_path, method, hybrid=hybrid)
    options = {"speculative_config": drafts, "tensor_parallel_size": 2}
    with EngineProcess(model, kvsidecar(daemon.socket), **options) as engine:
        join(engine.wait_started(), daemon)
        guesses_alike(engine, whole_of(method))
        assert len(daemon.get("/status")[1]["ranks"]) == 2
