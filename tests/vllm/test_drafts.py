"""Speculative decoding with a drafter that has KV of its own: it lies in the same blocks, and comes back with them."""

from __future__ import annotations

from pathlib import Path

from tests.harness import DaemonProcess
from tests.vllm import models
from tests.vllm.conftest import Truth
from tests.vllm.engine import LONG, WHOLE, Engine, forget, joined
from tests.vllm.models import BLOCK

TOKENS = 40


def drafted(engine: Engine) -> tuple[float, float]:
    """Tokens that were drafted, and accepted."""
    counters = engine.counters()
    return counters["vllm:spec_decode_num_draft_tokens"], counters["vllm:spec_decode_num_accepted_tokens"]


def test_the_kv_of_a_draft_model_comes_back_with_the_targets(model: str, daemon: DaemonProcess, truth: Truth) -> None:
    """The target drafts for itself, so each of its tokens is accepted if its KV is right."""
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    with joined(daemon, model, speculative_config=drafts) as engine:
        (cold,) = engine.generate(LONG, tokens=TOKENS)
        forget(engine)
        before = drafted(engine)
        (hit,) = engine.generate(LONG, tokens=TOKENS)
        assert (cold.cached, hit.cached) == (0, WHOLE)
        assert [cold.tokens] == [hit.tokens] == truth(LONG, tokens=TOKENS)
        tried, accepted = (now - old for now, old in zip(drafted(engine), before, strict=True))
        assert tried == accepted > 0


def test_an_eagle_head_hits_a_block_less(model: str, daemon: DaemonProcess, truth: Truth, tmp_path: Path) -> None:
    """Its KV of a block's last token depends on the token after it, so vLLM computes the last block again."""
    drafts = {"method": "eagle", "model": models.save_eagle(tmp_path), "num_speculative_tokens": 3}
    with joined(daemon, model, speculative_config=drafts) as engine:
        (cold,) = engine.generate(LONG, tokens=TOKENS)
        forget(engine)
        (hit,) = engine.generate(LONG, tokens=TOKENS)
        assert (cold.cached, hit.cached) == (0, WHOLE - BLOCK)
        assert drafted(engine)[0] > 0
        assert [cold.tokens] == [hit.tokens] == truth(LONG, tokens=TOKENS)
