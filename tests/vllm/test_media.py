"""Sounds and images whose names, which a client gives, say nothing of what is in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import DaemonProcess
from tests.marks import promise
from tests.vllm import models
from tests.vllm.engine import Answer, Engine, answer_of, forget, joined, running, sampling

WORDS = " ".join(f"w{i}" for i in range(10, 210))


@dataclass(frozen=True)
class Medium:
    """A kind of item, and a model that takes it."""

    name: str
    """vLLM's."""
    save: Callable[[Path], str]
    item: Callable[[int], Any]
    """One of the items, by number."""
    words: str
    whole: int
    """Tokens in the full blocks of an item and the words behind it."""

    @property
    def options(self) -> dict[str, Any]:
        return {"skip_tokenizer_init": False, "limit_mm_per_prompt": {self.name: 1}}

    def ask(self, engine: Engine, number: int, uuid: str | None = None) -> Answer:
        """What the engine says to an item, which the client calls so."""
        asked: dict[str, Any] = {
            "prompt": self.words,
            "multi_modal_data": {self.name: self.item(number)},
            "multi_modal_uuids": {self.name: [uuid]},
        }
        (output,) = engine.llm.generate([asked], sampling(8), use_tqdm=False)
        return answer_of(output)


def _tone(number: int) -> Any:
    """A second of it, and its rate."""
    import numpy as np

    return np.sin(np.arange(16000, dtype=np.float32) * number / 10), 16000


def _picture(number: int) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (models.IMAGE, models.IMAGE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


MEDIA = [
    Medium("audio", models.save_listening, _tone, f"{models.HEARS} {WORDS}", 224),
    Medium("image", models.save_seeing, _picture, WORDS, 192),
]


@pytest.fixture(autouse=True)
def pixtral(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks of every encoder of images whether it is Pixtral's, which imports much that is not installed here."""
    named = {"PixtralVisionConfig": type("PixtralVisionConfig", (), {}), "PixtralHFEncoderInfo": None}
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.pixtral", SimpleNamespace(**named))


@pytest.mark.parametrize("medium", MEDIA, ids=lambda each: each.name)
@promise("replaces it with the [content of the image](#images-audio-and-video)")
def test_one_name_for_two_items_is_no_hit_and_two_names_for_one_are(
    medium: Medium, tmp_path: Path, daemon: DaemonProcess
) -> None:
    model, whole = medium.save(tmp_path), medium.whole
    with running(model, enable_prefix_caching=False, mm_processor_cache_gb=0, **medium.options) as engine:
        wanted = {number: medium.ask(engine, number).tokens for number in (1, 2, 3)}
    assert len(set(wanted.values())) == 3, "what the item is changes nothing"
    with joined(daemon, model, **medium.options) as engine:
        assert medium.ask(engine, 1, "the doorbell") == Answer(wanted[1], 0, "length")
        forget(engine)
        assert medium.ask(engine, 1, "the doorbell").cached == whole
        engine.drain()
    with joined(daemon, model, mm_processor_cache_gb=0, **medium.options) as engine:
        assert medium.ask(engine, 2, "the doorbell") == Answer(wanted[2], 0, "length"), "after a restart"
        assert medium.ask(engine, 3, "the doorbell") == Answer(wanted[3], 0, "length"), "in one engine"
        assert medium.ask(engine, 1) == Answer(wanted[1], whole, "length"), "whatever it is called"
        forget(engine)
        for number in (3, 2, 1):
            assert medium.ask(engine, number, f"item {number}") == Answer(wanted[number], whole, "length")
            engine.drain()
