"""Runs of vLLM with KV events."""

from __future__ import annotations

from tests.vllm.engine import Prompt

OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The engine's core sleeps in a process of its own while it has nothing to do."""


FEW = {"num_gpu_blocks_override": 34}
"""Blocks of 32 tokens on the GPU: two prompts of 600 tokens evict each other."""


def whole_blocks(of: Prompt) -> set[tuple[int, ...]]:
    return {of.ids[i : i + 32] for i in range(0, len(of.ids) // 32 * 32, 32)}
