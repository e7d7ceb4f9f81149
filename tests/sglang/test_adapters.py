"""Engines with LoRA adapters, whose names and paths stay while their content changes."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.harness import DaemonProcess
from tests.sglang.engine import WHOLE, SGLangProcess, join, linker, stored
from tests.vllm import models
from tests.vllm.engine import LONG, Prompt


def test_adapters_are_hit_by_their_content(model: str, daemon: DaemonProcess, tmp_path: Path) -> None:
    """Not by their names, paths and random ids, of which the first two stay when an adapter is trained again."""
    path = tmp_path / "adapter"
    options = {
        "lora_paths": {"tuned": models.save_adapter(path, 1)},
        "lora_backend": "torch_native",
        "max_loras_per_batch": 2,
    }
    with SGLangProcess(model, linker(daemon.socket), tmp_path / "first", **options) as engine:
        engine.wait_started()
        join(engine, daemon)
        old = stored(engine, daemon, LONG, adapter="tuned")
        base = stored(engine, daemon, LONG)
        assert old.cached == base.cached == 0
        assert old.tokens != base.tokens
        hit = engine.ask(LONG, adapter="tuned")
        assert (hit.host, hit.tokens) == (WHOLE, old.tokens)
    shutil.copytree(path, tmp_path / "copy")
    models.save_adapter(path, 2)
    with SGLangProcess(model, linker(daemon.socket), tmp_path / "second", **options) as engine:
        engine.wait_started()
        join(engine, daemon)
        new = engine.ask(LONG, adapter="tuned")
        assert (new.cached, new.tokens) == (0, engine.ask(Prompt(LONG.ids, "cold"), adapter="tuned").tokens)
        assert new.tokens != old.tokens
        engine.load_adapter("copy", str(tmp_path / "copy"))
        hit = engine.ask(LONG, adapter="copy")
        assert (hit.host, hit.tokens) == (WHOLE, old.tokens)
        # The same name, path and place in memory, and the weights of the other one.
        engine.unload_adapter("copy")
        shutil.copytree(path, tmp_path / "copy", dirs_exist_ok=True)
        engine.load_adapter("copy", str(tmp_path / "copy"))
        again = engine.ask(LONG, adapter="copy")
        assert (again.cached, again.tokens) == (WHOLE, new.tokens), "the engine's own cache has it by its content, too"
        hit = engine.ask(LONG)
        assert (hit.host, hit.tokens) == (WHOLE, base.tokens), "requests without an adapter are not concerned"
