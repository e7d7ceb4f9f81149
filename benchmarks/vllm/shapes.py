"""Conversations with models of other shapes than a dense one: what is hit, tokens per second by round, a hit alone.

python -m benchmarks.vllm.shapes --shapes windows,gdn --json shapes.json    # on a GPU: resident, Simple, this project's
python -m benchmarks.vllm.shapes --tiny                                     # on the CPU: shows that everything works

Chats that grow, more than the GPU holds; each engine answers the same. First the pool is empty; with --full it is then
full of other chats, so that stores evict. At the end each chat is asked once more, one at a time: a hit in the
connector (for ``resident`` on the GPU), and its answer beside that of the same prompt computed, under a salt that
nobody has used. ``resident`` has --resident-times the KV memory, and no connector: what a hit costs that nothing
loads. With --fits every engine has that much, and nothing is ever loaded: what the connector costs then.

Weights are random. Layers and experts are fewer than those of the model that a shape is named after, where it would not
start within a minute; attention, states and windows are its own. --at-once runs so many engines side by side, in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.vllm import runs, throughput
from benchmarks.vllm.engine import ADDITIONS, LLAMA_8B
from benchmarks.vllm.runs import console, p50

CHATS = {
    "count": (24, 4),
    "turns": (3, 3),
    "concurrency": (8, 2),
    "first_tokens": (7000, 200),
    "turn_tokens": (500, 40),
    "output_tokens": (24, 4),
    "system_tokens": (0, 0),
}


@dataclass(frozen=True)
class ModelShape:
    """A kind of model.

    Args:
        config: its ``config.json``.
        gpu_mib: of KV on the GPU, which hold about half of the default chats.
        tiny: what `config` has instead with ``--tiny``; None: the CPU has no kernels for it.
        llm: further options of ``vllm.LLM``.
        dropped: names in `config` that transformers does not keep, and vLLM needs.
        tiny_mib: of KV with ``--tiny``.
    """

    config: Mapping[str, Any]
    gpu_mib: int
    tiny: Mapping[str, Any] | None = None
    llm: Mapping[str, Any] = field(default_factory=dict)
    dropped: Sequence[str] = ()
    tiny_mib: int = 8


SMALL = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "max_position_embeddings": 4096}
SMALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}

SHAPES = {
    "dense": ModelShape(LLAMA_8B, 12_288, {**SMALL, **SMALL_HEADS, "num_hidden_layers": 2}),
    # Gemma 3 4B: five of six layers with a window of 1,024.
    "windows": ModelShape(
        {
            **_TOKENS,
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "vocab_size": 262_208,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
            "max_position_embeddings": 131_072,
        },
        4_600,
        {**SMALL, **SMALL_HEADS, "num_hidden_layers": 6, "sliding_window": 64},
    ),
    # gpt-oss 20B: a window of 128 in every other layer; experts fewer, and not quantized.
    "alternating": ModelShape(
        {
            **_TOKENS,
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 131_072,
        },
        2_400,
    ),
    # Llama 4 Scout: three of four layers attend within chunks of 8,192 tokens; experts fewer.
    "chunked": ModelShape(
        {
            **_TOKENS,
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            "vocab_size": 202_048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "num_hidden_layers": 16,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_chunk_size": 8192,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 8,
            "max_position_embeddings": 131_072,
        },
        6_144,
    ),
    # Qwen3-Next: three of four layers are gated delta networks; half of the layers, the last one alone with experts.
    "gdn": ModelShape(
        {
            **_TOKENS,
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "mlp_only_layers": list(range(23)),
            "max_position_embeddings": 131_072,
        },
        3_072,
        llm={"additional_config": {"gdn_prefill_backend": "triton"}},
    ),
    # Kimi-Linear: three of four layers are Kimi delta attention, the others MLA; the last one alone has experts.
    "kda": ModelShape(
        {
            **_TOKENS,
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "vocab_size": 163_840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 72,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "first_k_dense_replace": 15,
            "moe_intermediate_size": 1024,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16],
                "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
            "model_max_length": 131_072,
            "max_position_embeddings": 131_072,
        },
        3_072,
    ),
    # Falcon-H1 7B: every layer has attention and a Mamba-2 state; half of the layers.
    "mamba2": ModelShape(
        {
            **_TOKENS,
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "vocab_size": 130_048,
            "hidden_size": 3072,
            "intermediate_size": 12_288,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_n_groups": 2,
            "mamba_d_state": 256,
            "max_position_embeddings": 131_072,
        },
        3_072,
    ),
    # LFM2 2.6B: three of four layers are short convolutions.
    "convolution": ModelShape(
        {
            **_TOKENS,
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "vocab_size": 65_536,
            "hidden_size": 2048,
            "intermediate_size": 10_752,
            "num_hidden_layers": 30,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "layer_types": ["full_attention" if each % 4 == 2 else "conv" for each in range(30)],
            "conv_dim": 2048,
            "block_dim": 2048,
            "block_auto_adjust_ff_dim": True,
            "max_position_embeddings": 128_000,
        },
        1_536,
        {
            **SMALL,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "conv_dim": 256,
            "block_dim": 256,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        },
        dropped=("conv_dim", "block_dim"),
    ),
    # DeepSeek V2 Lite, without experts.
    "mla": ModelShape(
        {
            **_TOKENS,
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "vocab_size": 102_400,
            "hidden_size": 2048,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 27,
            "max_position_embeddings": 131_072,
        },
        3_072,
    ),
}
TINY = tuple(name for name, shape in SHAPES.items() if shape.tiny is not None)


def chosen_shapes(options: argparse.Namespace) -> list[str]:
    """Those to run. Raises SystemExit if one is unknown or cannot run here."""
    known = TINY if options.tiny else tuple(SHAPES)
    names: list[str] = options.shapes.split(",") if options.shapes else list(known)
    for name in names:
        if name not in known:
            raise SystemExit(f"--shapes: {name!r} is none of {', '.join(known)}")
    return names


def set_shape(options: argparse.Namespace, name: str) -> None:
    """What `runs.engine` and `runs.llm_options` ask ``options`` for."""
    shape = SHAPES[name]
    options.config = {**shape.config, **((shape.tiny or {}) if options.tiny else {})}
    mib = shape.tiny_mib if options.tiny else shape.gpu_mib
    options.resident_bytes = (mib << 20) * options.resident_times
    options.gpu_bytes = options.resident_bytes if options.fits else mib << 20
    overrides = {name: options.config[name] for name in shape.dropped}
    options.llm_of_shape = {"enforce_eager": not options.graphs, "hf_overrides": overrides, **shape.llm}


def _row(name: str, found: Mapping[str, Any]) -> list[object]:
    rounds = found["rounds"]
    speeds = ", ".join(f"{each['output_tokens'] / each['seconds']:.1f}" for each in rounds)
    cached = ", ".join(f"{100 * each['cached_tokens'] / each['prompt_tokens']:.1f}" for each in rounds)
    loop = ", ".join(f"{each:.0f}" for each in found["loop_us"])
    return [name, found["output_tokens"] / found["seconds"], speeds, cached, p50(found["ttft_ms"]), loop]


def show(shape: str, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    alone = {name: found for name, found in results.items() if name.endswith(throughput.ALONE)}
    rows = [_row(name, each) for name, found in results.items() if name not in alone for each in found]
    columns = ["system, pool", "tok/s", "by round", "cached %, by round", "TTFT p50 ms", f"{ADDITIONS:,} additions, us"]
    runs.table(f"{shape}: conversations", columns, rows)
    throughput.show_lost(results)
    rows = [
        [name, p50(each["ttft_ms"]), min(each["ttft_ms"]), max(each["ttft_ms"]), _cached(each), _right(each)]
        for name, found in alone.items()
        for each in found
    ]
    columns = ["system", "hit p50 ms", "min", "max", "tokens cached", "as computed"]
    runs.table(f"{shape}: one prompt at a time", columns, rows)


def _cached(found: Mapping[str, Any]) -> str:
    return f"{sum(found['cached_tokens']):,} of {sum(found['prompt_tokens']):,}"


def _right(found: Mapping[str, Any]) -> str:
    equal = sum(hit == computed for hit, computed in zip(found["tokens"], found["computed"], strict=False))
    return f"{equal} of {len(found['computed'])}"


def main() -> None:
    parser = runs.arguments(__doc__, runs.WORKLOADS)
    parser.add_argument(
        "--shapes", default="", help=f"comma-separated: {', '.join(SHAPES)}; with --tiny {', '.join(TINY)}"
    )
    parser.add_argument("--graphs", action="store_true", help="torch.compile and CUDA graphs instead of eager mode")
    parser.add_argument("--full", type=int, default=0, help="times that new chats evict earlier ones (%(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="engines of every mode, in turn")
    parser.add_argument("--at-once", type=int, default=1, help="engines that share the GPU, in turns (%(default)s)")
    parser.add_argument("--resident-times", type=int, default=4, help="the KV memory of resident (%(default)s)")
    parser.add_argument("--fits", action="store_true", help="all engines have as much as resident: nothing is loaded")
    options = runs.parsed(parser, CHATS)
    options.tp, options.checked = 1, 8
    default = ("none", "kvsidecar") if options.tiny else ("resident", "simple", "kvsidecar")
    chosen = runs.modes(options, default, runs.WORKLOADS)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for shape in chosen_shapes(options):
        set_shape(options, shape)
        found: dict[str, list[dict[str, Any]]] = {}
        pool = runs.pool_bytes(options, options.resident_bytes)
        try:
            with runs.folder(options, shape) as directory:
                for group in throughput.groups(chosen * options.repeat, options.at_once):
                    console.print(f"{shape}: {', '.join(group)} ...")
                    for mode, phase, each in throughput.in_turns(group, options, directory, pool):
                        found.setdefault(f"{mode}, {phase}", []).append(each)
                        results[shape] = found
                        runs.save(options, {"shapes": results})
        except SystemExit as error:
            console.print(f"{shape}: {error}")  # the next shape may run
        finally:
            if found:
                show(shape, found)


if __name__ == "__main__":
    main()
