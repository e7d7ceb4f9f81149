"""A real engine whose model has sliding windows in some layers: a hit has all KV of the others, and of these the window
at its end.

On a GPU only. Where SGLang 0.5.23 attends on the CPU, it reads the KV of windows at the places that the tokens have in
the other pool, so that answers depend on what was computed before, also without this project.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import DEVICE, DaemonProcess
from tests.sglang.conftest import Engines
from tests.sglang.engine import PAGE, WHOLE, SGLangProcess, forgotten, join, stored
from tests.sglang.test_engine import _overwrite_the_pool
from tests.vllm.engine import LONG, prompt

pytestmark = pytest.mark.skipif(DEVICE == "host", reason="SGLang's windows are wrong on the CPU")

WINDOW = 4 * PAGE


@pytest.fixture(scope="module")
def windowed(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """`model` with a window in every other layer."""
    path = tmp_path_factory.mktemp("windowed") / "model"
    shutil.copytree(model, path)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "architectures": ["WindowedLlamaForCausalLM"],
        "is_hybrid_swa": True,
        "hybrid_layer_pattern": [(layer + 1) % 2 for layer in range(config["num_hidden_layers"])],
        "sliding_window": WINDOW,
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def engines(windowed: str, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    found = Engines(windowed, home, tmp_path_factory.mktemp("engines"))
    yield found
    found.close()


def test_a_hit_with_sliding_windows_gives_the_tokens_that_were_computed(
    engine: SGLangProcess, daemon: DaemonProcess
) -> None:
    join(engine, daemon)
    cold = stored(engine, daemon, LONG)
    hit = engine.ask(LONG)
    assert (cold.cached, hit.cached, hit.host) == (0, WHOLE, WHOLE)
    assert hit.tokens == cold.tokens


def test_wrong_kv_gives_other_tokens_with_sliding_windows(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    join(engine, daemon)
    cold = stored(engine, daemon, LONG)
    _overwrite_the_pool(daemon)
    hit = engine.ask(LONG)
    assert hit.host == WHOLE
    assert hit.tokens != cold.tokens


def test_a_conversation_with_sliding_windows_goes_on_as_from_the_engines_own_cache(
    engine: SGLangProcess, daemon: DaemonProcess
) -> None:
    """Not as without a cache: what the engine decodes is not bit by bit what it would compute of a prompt."""
    join(engine, daemon)
    first = prompt("turn", 300)
    second = first + engine.ask(first, tokens=100).tokens + prompt("turn 2", 20).ids
    local = engine.ask(second)
    forgotten(engine, daemon, second)
    hit = engine.ask(second)
    assert local.cached > len(first.ids)
    assert (local.host, hit.host) == (0, len(second.ids) // PAGE * PAGE)
    assert hit.tokens == local.tokens


def test_a_turn_with_sliding_windows_hits_where_its_prompt_ended(engine: SGLangProcess, daemon: DaemonProcess) -> None:
    join(engine, daemon)
    first = prompt("document", 390)
    stored(engine, daemon, first)
    second = first + prompt("question", 40).ids
    hit = engine.ask(second)
    assert hit.host == 384
    engine.forget()
    with daemon.client() as operator:
        operator.clear()
    cold = engine.ask(second)
    assert (cold.cached, cold.tokens) == (0, hit.tokens)


def test_what_was_computed_before_changes_no_answer_with_sliding_windows(
    engine: SGLangProcess, daemon: DaemonProcess
) -> None:
    """Without this, equal tokens would prove nothing."""
    join(engine, daemon)
    first, said = prompt("again and again", 300), []
    for number in range(3):
        said.append(engine.ask(first, tokens=50).tokens)
        engine.generate(*[prompt(("other", number, each), 100 + 30 * each) for each in range(4)], tokens=20)
        forgotten(engine, daemon, first)
        with daemon.client() as operator:
            operator.clear()
    assert len(set(said)) == 1
