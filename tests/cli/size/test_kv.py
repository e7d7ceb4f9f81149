"""The size of models' KV. tests/vllm/test_size.py compares it with vLLM's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.cli.size.kv import BadModel, KVKind, kv_of
from kvsidecar.cli.size.models import KNOWN, load
from kvsidecar.support.units import KiB, MiB
from tests.cli.size.support import LLAMA


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key != name}


@pytest.mark.parametrize(
    ("model", "options", "token_bytes"),
    [
        ("Llama-3.1-8B", {}, 128 * KiB),
        ("Llama-3.3-70B", {}, 320 * KiB),
        ("Llama-3.3-70B", {"tp": 8}, 320 * KiB),
        ("Llama-3.3-70B", {"fp8": True}, 160 * KiB),
        ("Qwen3-235B-A22B", {"tp": 4}, 188 * KiB),
        ("Qwen3-235B-A22B", {"tp": 8}, 188 * KiB),  # four KV heads: each is on two ranks, and stored once
        ("DeepSeek-V3.1", {}, 61 * 1152),
        ("DeepSeek-V3.1", {"tp": 8}, 61 * 1152),  # equal on all ranks, stored once
        ("DeepSeek-V3.1", {"fp8": True}, 61 * 576),
        ("DeepSeek-V3.2", {}, 61 * (1152 + 132)),
        ("DeepSeek-V3.2", {"fp8": True}, 61 * (656 + 132)),
        ("gpt-oss-120b", {}, 36 * KiB),  # of half of the layers
        ("Qwen3-Next-80B-A3B", {}, 24 * KiB),  # of a quarter
    ],
)
def test_a_token_of_context_takes_what_is_kept_of_it(model: str, options: dict[str, Any], token_bytes: int) -> None:
    assert kv_of(KNOWN[model], **options).token_bytes == token_bytes


def test_a_block_with_states_is_as_long_as_a_state_is_large() -> None:
    kv = kv_of(KNOWN["Qwen3-Next-80B-A3B"])
    assert {each.block_tokens for each in kv.groups} == {544}, "as vLLM's log says of this model"
    assert [(each.kind, each.layers) for each in kv.groups] == [(KVKind.FULL, 12)] + [(KVKind.STATE, 12)] * 3
    assert kv_of(KNOWN["Kimi-Linear-48B-A3B"]).block_tokens == 1920


def test_a_prompt_leaves_its_full_blocks_and_the_end_of_windows_and_states() -> None:
    oss = kv_of(KNOWN["gpt-oss-120b"])
    assert oss.blocks(1600 + 15) == 100 + 8
    assert oss.nbytes(1600) == 108 * 576 * KiB
    assert oss.blocks(1600, retention=None) == 200, "all, as before vLLM 0.32"
    assert oss.blocks(1600, retention=800) == 100 + 8 * 3
    assert oss.blocks(32) == 4, "less than a window"
    assert kv_of(KNOWN["Qwen3-Next-80B-A3B"]).blocks(544 * 10) == 10 + 3


def test_layers_are_grouped_as_the_fewest_or_padded_where_nearly_equal() -> None:
    gemma = kv_of(KNOWN["gemma-3-27b"])
    assert [each.layers for each in gemma.groups] == [10, 9, 9, 9, 9, 8, 8]
    types = ["full_attention"] * 13 + ["sliding_attention"] * 12
    drafted = kv_of({**LLAMA, "num_hidden_layers": 25, "layer_types": types, "sliding_window": 128})
    assert [each.layers for each in drafted.groups] == [13, 12]


@pytest.mark.parametrize("model", KNOWN)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_known_model_has_a_size(model: str, tp: int) -> None:
    kv = kv_of(KNOWN[model], tp=tp)
    assert KiB < kv.token_bytes < MiB
    assert kv.nbytes(131072) > kv.token_bytes * 130000


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (without("num_hidden_layers"), "has no num_hidden_layers"),
        (without("num_attention_heads"), "has no num_attention_heads"),
        (without("hidden_size"), "has no hidden_size"),
        ({**LLAMA, "num_key_value_heads": "8"}, "num_key_value_heads = '8'"),
        ({**LLAMA, "hidden_size": 4097}, "no head_dim, and hidden_size 4097"),
        ({**LLAMA, "torch_dtype": "int3"}, "dtype = 'int3'"),
        ({**LLAMA, "layer_types": ["retention"] * 32}, "'retention'"),
        ({**LLAMA, "compress_ratios": [1, 4]}, "compress_ratios"),
        ({**LLAMA, "num_kv_shared_layers": 10}, "10 layers use the KV of others"),
        ({"num_hidden_layers": 2, "kv_lora_rank": 512}, "has no qk_rope_head_dim"),
        ({**LLAMA, "layer_types": ["mamba"] * 16 + ["attention"] * 16}, "states of a kind"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "has no sliding_window"),
        ({**LLAMA, "mamba_num_heads": 4}, "which layers"),
    ],
)
def test_what_is_missing_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModel) as caught:
        kv_of(config)
    assert words in str(caught.value)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(BadModel, match="8 KV heads cannot be divided over --tp 3"):
        kv_of(LLAMA, tp=3)


def test_a_file_a_folder_and_names_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    for model in (str(tmp_path), str(tmp_path / "config.json")):
        assert kv_of(load(model)).token_bytes == 128 * KiB
    assert load("Qwen/Qwen3-30B-A3B-Instruct-2507") is KNOWN["Qwen3-30B-A3B"]
    assert load("Gemma 3 27B") is KNOWN["gemma-3-27b"]
    assert load("deepseek-ai/DeepSeek-R1-0528") is KNOWN["DeepSeek-R1"]
    assert load("deepseek-ai/DeepSeek-R1-Distill-Llama-70B") is KNOWN["DeepSeek-R1-Distill-Llama-70B"]
    with pytest.raises(BadModel):
        load("DeepSeek-R1-Distill-Qwen-1.5B")
    assert load("gpt-oss-20b") is KNOWN["gpt-oss-20b"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"did you mean Llama-3.3-70B\?"):
        load("meta-llama/Llama-3.3-7B")
    with pytest.raises(BadModel, match=r"none\.json cannot be read: No such file"):
        load(str(tmp_path / "none.json"))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BadModel, match="it is not a JSON object"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadModel, match="is not JSON"):
        load(str(tmp_path))
