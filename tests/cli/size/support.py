"""A model and a trace to size a pool for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def alternating(path: Path) -> Path:
    """In Mooncake's format: two sessions of 40 blocks that alternate, each prompt a block longer."""
    lines = []
    for turn in range(10):
        for session in range(2):
            blocks = list(range(session * 10**15, session * 10**15 + 40 + turn))
            lines.append({"timestamp": turn * 1000 + session, "input_length": len(blocks) * 512, "hash_ids": blocks})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
