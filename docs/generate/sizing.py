"""docs/sizing.md: docs/generate/sizing.md, and what `kvsidecar size` prints of some models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from click.testing import CliRunner

from docs.generate.markdown import code, table
from kvsidecar.cli.main import main
from kvsidecar.support.units import format_size

HEAD = Path(__file__).with_name("sizing.md")
"""What is above the recipes."""
NODE: Final = "--host-memory 1600GiB --disk 14TiB"
USERS: Final = "--context 32Ki --sessions 500"
RECIPES: Final = (
    ("dense", "Llama-3.1-8B", 1),
    ("dense", "Llama-3.3-70B", 4),
    ("dense", "Qwen3-32B", 2),
    ("MoE", "Qwen3-235B-A22B", 4),
    ("MoE", "GLM-4.5-Air", 4),
    ("MoE", "MiniMax-M2", 4),
    ("MoE, MLA", "DeepSeek-V3.1", 8),
    ("MoE, MLA, sparse", "DeepSeek-V3.2", 8),
    ("MoE, MLA", "Kimi-K2", 8),
    ("MoE, windows", "gpt-oss-120b", 2),
    ("dense, windows", "gemma-3-27b", 2),
    ("MoE, states", "Qwen3-Next-80B-A3B", 4),
    ("MoE, MLA, states", "Kimi-Linear-48B-A3B", 4),
)
"""Kind, known name, and GPUs of an engine."""
SHOWN: Final = "Llama-3.3-70B"
"""The one whose whole output is shown."""


def command(model: str, tp: int) -> list[str]:
    return ["size", model, "--tp", str(tp), "--gpus", "8", *USERS.split(), *NODE.split()]


def run(arguments: list[str]) -> str:
    """What the command prints, on a page of 100 columns."""
    result = CliRunner(env={"COLUMNS": "100"}).invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.splitlines())


def figures(model: str, tp: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run([*command(model, tp), "--json"]))
    return found


def _row(kind: str, model: str, tp: int) -> list[str]:
    found = figures(model, tp)
    disk = f", {format_size(found['disk_bytes'])}" if found["disk_bytes"] else ""
    return [
        code(f"{model} --tp {tp}"),
        kind,
        format_size(round(found["kv"]["token_bytes"])),
        str(found["kv"]["block_tokens"]),
        format_size(found["session_bytes"]),
        format_size(found["pool_bytes"]) + disk,
        str(found["sessions_in_pool"]),
    ]


def page() -> str:
    shown = next(recipe for recipe in RECIPES if recipe[1] == SHOWN)
    header = ("`kvsidecar size`", "Kind", "A token", "Block", "Session of 32Ki", "Pool, disk", "Sessions in the pool")
    line = f"kvsidecar {' '.join(command(shown[1], shown[2]))}"
    return (
        f"{HEAD.read_text()}A node with eight GPUs, 1,600 GiB for the daemon and 14 TiB of disk, and 500 sessions of\n"
        f"32,768 tokens: each line is `kvsidecar size` with the options of its first column and\n"
        f"`--gpus 8 {USERS} {NODE}`. *Block* is in tokens.\n\n"
        f"{table(header, (_row(*recipe) for recipe in RECIPES))}\n\n"
        f"The full output for one of them:\n\n```console\n$ {line}\n{run(command(*shown[1:]))}\n```\n"
    )
