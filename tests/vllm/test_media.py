"""Sounds whose names, which a client gives, say nothing of what is in them. (Images go the same way in vLLM.)"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import DaemonProcess
from tests.marks import promise
from tests.vllm import models
from tests.vllm.engine import Answer, Engine, answer_of, forget, joined, running, sampling

LISTENS: dict[str, Any] = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"audio": 1}}
WORDS = " ".join(f"w{i}" for i in range(10, 210))
WHOLE = 224
"""Tokens in the full blocks of the sound and the words behind it."""


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save_listening(tmp_path_factory.getbasetemp())


def hear(engine: Engine, seed: int, uuid: str | None = None) -> Answer:
    """What the engine says to a second of a tone, which the client calls so."""
    import numpy as np

    sound = np.sin(np.arange(16000, dtype=np.float32) * seed / 10)
    asked: dict[str, Any] = {
        "prompt": f"{models.HEARS} {WORDS}",
        "multi_modal_data": {"audio": (sound, 16000)},
        "multi_modal_uuids": {"audio": [uuid]},
    }
    (output,) = engine.llm.generate([asked], sampling(8), use_tqdm=False)
    return answer_of(output)


@promise("replaces it with the [content of the image](#images-audio-and-video)")
def test_one_name_for_two_sounds_is_no_hit_and_two_names_for_one_are(listening: str, daemon: DaemonProcess) -> None:
    with running(listening, enable_prefix_caching=False, mm_processor_cache_gb=0, **LISTENS) as engine:
        wanted = {seed: hear(engine, seed).tokens for seed in (1, 2, 3)}
    assert len(set(wanted.values())) == 3, "what is heard changes nothing"
    with joined(daemon, listening, **LISTENS) as engine:
        assert hear(engine, 1, "the doorbell") == Answer(wanted[1], 0, "length")
        forget(engine)
        assert hear(engine, 1, "the doorbell").cached == WHOLE
        engine.drain()
    with joined(daemon, listening, mm_processor_cache_gb=0, **LISTENS) as engine:
        assert hear(engine, 2, "the doorbell") == Answer(wanted[2], 0, "length"), "after a restart"
        assert hear(engine, 3, "the doorbell") == Answer(wanted[3], 0, "length"), "in one engine"
        assert hear(engine, 1) == Answer(wanted[1], WHOLE, "length"), "whatever it is called"
        forget(engine)
        for seed in (3, 2, 1):
            assert hear(engine, seed, f"sound {seed}") == Answer(wanted[seed], WHOLE, "length")
            engine.drain()
