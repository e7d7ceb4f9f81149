"""docs/recipes.md: the lines that start a daemon and an engine for models that people run, with the pool that
`kvsidecar size` proposes for each."""

from __future__ import annotations

import json
import tomllib
from typing import Any, Final, NamedTuple

from docs.generate.sizing import run
from kvsidecar.support.units import format_size

USERS: Final = "--context 32Ki --sessions 100"
NODE: Final = "--gpus 8 --host-memory 2TiB"


class Recipe(NamedTuple):
    """A model, and how it is served."""

    title: str
    hub: str
    """Its name in the Hugging Face hub, of which the end is one that `kvsidecar size` knows."""
    tp: int
    kind: str
    flags: str = ""
    """Flags of vLLM and SGLang that it is not served without."""
    sglang: bool = False
    """Whether SGLang's line is shown, too."""


RECIPES: Final = (
    Recipe("Llama 3.3 70B", "meta-llama/Llama-3.3-70B-Instruct", 4, "dense", sglang=True),
    Recipe("Qwen3 235B", "Qwen/Qwen3-235B-A22B-Instruct-2507", 4, "mixture of experts"),
    Recipe("Qwen3-Coder 30B", "Qwen/Qwen3-Coder-30B-A3B-Instruct", 2, "mixture of experts", sglang=True),
    Recipe("Qwen3-Next 80B", "Qwen/Qwen3-Next-80B-A3B-Instruct", 4, "mixture of experts, states"),
    Recipe("gpt-oss 120B", "openai/gpt-oss-120b", 2, "mixture of experts, sliding windows"),
    Recipe("DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2", 8, "MLA with an indexer", "--tokenizer-mode deepseek_v32"),
    Recipe("GLM-4.6", "zai-org/GLM-4.6-FP8", 4, "mixture of experts"),
    Recipe("Kimi K2", "moonshotai/Kimi-K2-Thinking", 8, "MLA", "--trust-remote-code", sglang=True),
    Recipe("Gemma 3 27B", "google/gemma-3-27b-it", 2, "dense, sliding windows"),
    Recipe("MiniMax-M2", "MiniMaxAI/MiniMax-M2", 4, "mixture of experts"),
)

HEAD = f"""<!-- Made by `make docs` from docs/generate/recipes.py and `kvsidecar size`: change these. -->
# Recipes

Lines to paste for {len(RECIPES)} models: first the daemon's, once per node, then the engine's, in an environment into
which `pip install ./client` has brought the client, in a checkout.

- **The pools** hold 100 sessions of 32,768 tokens, by `kvsidecar size` with the options shown and
  `{NODE}`. Put your own users there: [sizing](sizing.md). Where a pool does not fit into your
  memory, any smaller one works, and keeps fewer sessions.
- **The GPUs** are meant to be H200s. On smaller ones, give the engine more of them, and `--tp` the same number.
- **What is left out** is what offload does not change: flags for tool calls, reasoning and the length of the context.
- **What was tested**: vLLM 0.33 and SGLang 0.5.23 parse these lines. These models themselves were not run, but for each
  kind of attention one with random weights was, except MLA with an indexer: see the versions of
  [vLLM](vllm.md#versions) and [SGLang](sglang.md#versions).

**Does it pay?** This runs a model without offload and with it, on growing chats that the GPU has no room for. It prints
output tokens per second, the times to the first token, and the share of prompts that hit, one below the other. It
starts a daemon of its own, and needs a checkout, the model in a folder, and vLLM and both packages of kvsidecar in one
environment. `--gpu-tokens` says how much KV the GPU may keep, `--count` how many chats there are, and `--llm` has
options of vLLM, such as `'{{"block_size": 64}}'` for MLA. A test runs it on the CPU, with a tiny model:

```sh
python -m benchmarks.vllm.throughput --model FOLDER --modes none,kvsidecar
```

`kvsidecar size` does not know Llama 4 and Nemotron, which are offloaded, too:
[their bytes per token](sizing.md#bytes-per-token).
"""
VLLM: Final = """PYTHONHASHSEED=0 vllm serve {hub} --tensor-parallel-size {tp}{flags} \\
    --kv-transfer-config '{{"kv_connector": "KVSidecarConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvsidecar.integrations.vllm", "kv_load_failure_policy": "recompute"}}'
"""
SGLANG: Final = """python -m sglang.launch_server --model-path {hub} --tp-size {tp}{flags} --page-size 64 \\
    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic \\
    --unified-cache-external-linker-config \\
    '{{"linker": "KVSidecarLinker", "linker_module_path": "kvsidecar.integrations.sglang"}}'
"""


def _section(recipe: Recipe) -> str:
    size = f"size {recipe.hub.rpartition('/')[2]} --tp {recipe.tp} {USERS}"
    found: dict[str, Any] = json.loads(run([*size.split(), *NODE.split(), "--json"]))
    pool = tomllib.loads(found["paste"]["toml"])["pool_size"]
    words = {"hub": recipe.hub, "tp": recipe.tp, "flags": f" {recipe.flags}" if recipe.flags else ""}
    sglang = f"\nSGLang:\n\n```sh\n{SGLANG.format(**words)}```\n" if recipe.sglang else ""
    return f"""
## {recipe.title}

{recipe.kind[0].upper()}{recipe.kind[1:]}. A session takes {format_size(found["session_bytes"])}:
`kvsidecar {size}`.

```sh
kvsidecar serve --pool-size {pool}
{VLLM.format(**words)}```
{sglang}"""


def page() -> str:
    return HEAD + "".join(map(_section, RECIPES))
