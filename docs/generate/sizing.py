"""docs/sizing.md: docs/generate/sizing.md, what `kvsidecar size` prints of some models, and the bytes per token that
`benchmarks.vllm.bytes_per_token` has found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from click.testing import CliRunner

from benchmarks.vllm.bytes_table import MOST, Found, markdown
from docs.generate.markdown import code, table
from kvsidecar.cli.main import main
from kvsidecar.support.units import format_size

HEAD = Path(__file__).with_name("sizing.md")
"""What is above the table of models."""
NODE: Final = "--host-memory 1600GiB --disk 14TiB"
USERS: Final = "--context 32Ki --sessions 500"
MODELS: Final = (
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
SHOWN: str = "Llama-3.3-70B"
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


def bytes_per_token() -> str:
    found = Found.read()
    chunked = next(row for row in found.rows if row.model == "Llama-4-Scout" and row.tp == 1)
    return f"""## Bytes per token

KiB of host memory for each token of a prompt of {found.tokens:,} tokens, on all ranks together; in parentheses, how
many times what a hit needs that is:

- *A hit needs* every KV head, latent vector and state once: of all tokens where attention goes to all of them,
  otherwise of the last window or chunk.
- *Pool* is what the daemon holds once the prompt has been computed, all rounding included, in a pool of 512 GiB.
- *Simple* and *Offloading* are vLLM {found.vllm}'s `SimpleCPUOffloadConnector` and `OffloadingConnector`. In both, the
  block of every group is as large as that of the largest group.

The table is made by a command, in a checkout of the repository and beside vLLM: published configurations go through
vLLM's planner as on H200s, with its defaults, and its scheduler runs each connector. It needs neither a GPU nor
weights, and takes two minutes.

```sh
python -m benchmarks.vllm.bytes_per_token --markdown
```

{markdown(found.rows)}

The pool is to hold at most {MOST} times what a hit needs. It holds more for **chunked attention** (Llama 4): vLLM
caches the blocks of all chunks, and all of them are stored, though a hit loads only those of the last one:
{chunked.kib(chunked.loaded)} KiB for each token of this prompt. A request that goes another way in an earlier chunk
hits them. vLLM's connectors also store all.

What is the same on several ranks is stored once: latent vectors (MLA), and heads where there are fewer than ranks
(Qwen3.5, Qwen3-Next and Nemotron with eight ranks). Simple stores it once for each rank; Offloading does so with heads,
and with latent vectors if the model has states too (Kimi Linear).
"""


def page() -> str:
    shown = next(model for model in MODELS if model[1] == SHOWN)
    header = ("`kvsidecar size`", "Kind", "A token", "Block", "Session of 32Ki", "Pool, disk", "Sessions in the pool")
    line = f"kvsidecar {' '.join(command(shown[1], shown[2]))}"
    return (
        f"{HEAD.read_text()}A node with eight GPUs, 1,600 GiB for the daemon and 14 TiB of disk, and 500 sessions of\n"
        f"32,768 tokens: each line is `kvsidecar size` with the options of its first column and\n"
        f"`--gpus 8 {USERS} {NODE}`. *Block* is in tokens.\n\n"
        f"{table(header, (_row(*model) for model in MODELS))}\n\n"
        f"The full output for one of them:\n\n```console\n$ {line}\n{run(command(*shown[1:]))}\n```\n\n"
        f"{bytes_per_token()}"
    )
