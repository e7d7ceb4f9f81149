"""The configuration of a model: a file, a folder, or a name that is known here.

Raises `BadModel` for everything that is wrong with it.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from kvsidecar.cli.size.kv import BadModel

Config = dict[str, Any]


def _gqa(layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> Config:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": "bfloat16",
        **more,
    }


def _mla(**more: Any) -> Config:
    return {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16", **more}


KNOWN: Final[dict[str, Config]] = {
    "Llama-3.1-8B": _gqa(32, 32, 8, 128),
    "Llama-3.1-70B": _gqa(80, 64, 8, 128),
    "Llama-3.1-405B": _gqa(126, 128, 8, 128),
    "Llama-3.3-70B": _gqa(80, 64, 8, 128),
    "Mistral-Large-2411": _gqa(88, 96, 8, 128),
    "Mistral-Large-Instruct": _gqa(88, 96, 8, 128),
    "Mixtral-8x7B": _gqa(32, 32, 8, 128),
    "Mixtral-8x22B": _gqa(56, 48, 8, 128),
    "Qwen3-8B": _gqa(36, 32, 8, 128),
    "Qwen3-32B": _gqa(64, 64, 8, 128),
    "Qwen3-30B-A3B": _gqa(48, 32, 4, 128),
    "Qwen3-235B-A22B": _gqa(94, 64, 4, 128),
    "Qwen3-Coder-30B-A3B": _gqa(48, 32, 4, 128),
    "Qwen3-Coder-480B-A35B": _gqa(62, 96, 8, 128),
    "GLM-4.5": _gqa(92, 96, 8, 128),
    "GLM-4.5-Air": _gqa(46, 96, 8, 128),
    "GLM-4.6": _gqa(92, 96, 8, 128),
    "MiniMax-M2": _gqa(62, 48, 8, 128),
    "DeepSeek-R1": _mla(),
    "DeepSeek-R1-Distill-Llama-8B": _gqa(32, 32, 8, 128),
    "DeepSeek-R1-Distill-Llama-70B": _gqa(80, 64, 8, 128),
    "DeepSeek-R1-Distill-Qwen-7B": _gqa(28, 28, 4, 128),
    "DeepSeek-R1-Distill-Qwen-14B": _gqa(48, 40, 8, 128),
    "DeepSeek-R1-Distill-Qwen-32B": _gqa(64, 40, 8, 128),
    "DeepSeek-V3": _mla(),
    "DeepSeek-V3.1": _mla(),
    "DeepSeek-V3.2": _mla(index_topk=2048, index_head_dim=128),
    "Kimi-K2": _mla(),
    "gpt-oss-20b": _gqa(24, 64, 8, 64, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12),
    "gpt-oss-120b": _gqa(36, 64, 8, 64, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18),
    "gemma-3-27b": _gqa(62, 32, 16, 128, sliding_window=1024, sliding_window_pattern=6),
    "Qwen3-Next-80B-A3B": _gqa(
        48,
        16,
        2,
        256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    "Kimi-Linear-48B-A3B": {
        **_mla(num_hidden_layers=27),
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [layer for layer in range(1, 27) if layer % 4],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
}
"""The parts of each known model's ``config.json`` that determine the size of its KV, by name."""


def load(model: str) -> Config:
    """The ``config.json`` of a model.

    Args:
        model: path of the file or of its folder, or a known name; what precedes the last ``/`` of a name, suffixes such
            as ``-Instruct``, and spaces in place of hyphens do not matter.

    Raises:
        BadModel: there is no such file or name, or the file is no configuration.
    """
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file() or path.suffix == ".json" or model.startswith((".", "/", "~")):
        return _read(path.expanduser())
    name = "-".join(model.rpartition("/")[2].lower().split())
    # The longest one that it begins with: Qwen3-30B-A3B-Instruct-2507 is Qwen3-30B-A3B. A distilled model is not the
    # one that it has learned from.
    fits = [known for known in KNOWN if name == known.lower() or name.startswith(known.lower() + "-")]
    fits = [known for known in fits if "-distill" not in name.removeprefix(known.lower())]
    if fits:
        return KNOWN[max(fits, key=len)]
    near = get_close_matches(name, [known.lower() for known in KNOWN], n=1)
    meant = [known for known in KNOWN if known.lower().startswith(name + "-")]  # Mixtral is Mixtral-8x7B or -8x22B
    meant = meant or [known for known in KNOWN if known.lower() in near]
    hint = f"did you mean {' or '.join(meant)}? Otherwise " if meant else ""
    others = "" if meant else f", or one of {', '.join(KNOWN)}"
    raise BadModel(
        f"{model!r} is neither a file, a folder nor a known model: {hint}give the path of the model's config.json"
        f"{others}"
    )


def _read(path: Path) -> Config:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadModel(f"{path} is not a model's config.json: it is not a JSON object")
    return config
