"""Checks a bundle of SGLang on a GPU: an engine with a Llama, or with multi-head latent attention, of random weights.

    python3 check_sglang.py [--mla] [--layers 8] [--pages 1,16,64] [--linker '{"linker": ...}'] [--engine '{...}']

Each engine answers prompts cold, from its radix cache, and after a flush of it, where a linker may have their pages.
Prints a line for each step, and exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    from benchmarks.bundles.steps import Answers, Asked, end, step
except ModuleNotFoundError:  # in a bundle
    from steps import Answers, Asked, end, step  # type: ignore[import-not-found,no-redef]


def environment() -> dict[str, str]:
    """What an engine needs without a network and with the bundle's stand-ins; set before SGLang is imported."""
    spec = importlib.util.find_spec("sgl_kernel")
    if spec is None or spec.origin is None:
        raise SystemExit("the bundle is not on PYTHONPATH")
    site = Path(spec.origin).parent.parent
    return {
        "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "few_models",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the other one needs the torch that it was built with
        "CPATH": f"{site}/include",
        "LIBRARY_PATH": f"{site}/lib",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def save_model(options: argparse.Namespace) -> str:
    """The directory of a model of random weights, made in a process of its own, which leaves the GPU as it was."""
    directory = tempfile.mkdtemp()
    if os.fork() == 0:
        try:
            _save_model(options, directory)
        finally:
            os._exit(0)
    os.wait()
    if not list(Path(directory).glob("*.safetensors")):
        raise RuntimeError("no weights were saved")
    return directory


def _save_model(options: argparse.Namespace, directory: str) -> None:
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM

    shared: dict[str, Any] = {
        "hidden_size": 256 if options.tiny else 4096,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 4 if options.tiny else 32,
        "intermediate_size": 512 if options.tiny else 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if options.mla:
        config: Any = DeepseekV2Config(
            **shared,
            num_key_value_heads=shared["num_attention_heads"],
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            first_k_dense_replace=options.layers,
            moe_layer_freq=1,  # which SGLang reads, and this class lacks
        )
        kind: Any = DeepseekV2ForCausalLM
    else:
        config = LlamaConfig(
            **shared, num_key_value_heads=2 if options.tiny else 8, head_dim=64 if options.tiny else 128
        )
        kind = LlamaForCausalLM
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model = kind(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5)
    model.save_pretrained(directory)


def ask(engine: Any, ids: list[int], tokens: int) -> tuple[tuple[int, ...], int, float]:
    """Tokens, how many of the prompt's were cached, and how long it took, in ms."""
    start = time.perf_counter()
    answer = engine.generate(
        input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    )
    took = (time.perf_counter() - start) * 1e3
    return tuple(answer["output_ids"]), answer["meta_info"].get("cached_tokens", 0), took


def answers(engine: Any, prompts: list[list[int]], first_without: int = 0) -> Answers:
    """Of each prompt, asked twice: the second time it hits in the radix cache, while the cores are as fast as before.

    Args:
        first_without: so many tokens are left out at the end of a prompt that is asked for the first time.
    """
    pairs = [(ask(engine, ids[: len(ids) - first_without], 1), ask(engine, ids, 1)) for ids in prompts]
    found = [ask(engine, ids, 16)[0] for ids in prompts]
    first, again = (statistics.median(took for *_, took in asked) for asked in zip(*pairs, strict=True))
    more = statistics.median(first[2] - again[2] for first, again in pairs)
    return found, (
        f"first token after {first:.1f} ms, asked again after {again:.1f} ({more:+.1f} at the median), "
        f"{pairs[0][0][1]} of {len(prompts[0])} tokens cached"
    )


def check(options: argparse.Namespace, model: str, page: int) -> None:
    import sglang

    arguments: dict[str, Any] = {
        "model_path": model,
        "skip_tokenizer_init": True,
        "device": options.device,
        "dtype": "bfloat16",
        "attention_backend": "triton" if options.device == "cuda" else "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "page_size": page,
        "mem_fraction_static": 0.5,
        "max_running_requests": 16,
        "disable_custom_all_reduce": True,
        "random_seed": 0,
        "log_level": "warning",
        **json.loads(options.engine),
    }
    if options.linker:
        arguments |= {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": json.loads(options.linker),
        }
    engine = step(f"pages of {page}: engine", lambda: sglang.Engine(**arguments))
    if engine is None:
        return
    numbers = random.Random(1)
    # Half a page more: a last page that is whole is computed among the others at first and alone after a flush, which
    # rounds differently, so that the answers would be of other KV. A page of one token is always whole: the last one is
    # computed alone at first, too.
    length = options.tokens + page // 2
    prompts = [[numbers.randrange(10, 32000) for _ in range(length)] for _ in range(5)]
    asked = Asked(lambda cold: answers(engine, prompts, first_without=int(cold and page == 1)))

    def flush() -> str:
        time.sleep(2)  # an idle engine flushes; what is stored after a request keeps it busy for a moment
        engine.flush_cache()
        return asked.again()

    step(f"pages of {page}: cold", asked.cold)
    step(f"pages of {page}: from the radix cache", asked.again)
    step(f"pages of {page}: after a flush", flush)
    engine.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mla", action="store_true", help="multi-head latent attention instead of a Llama")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--pages", default="1,16,64", help="page sizes")
    parser.add_argument("--linker", default="", help="configuration of the linker, JSON")
    parser.add_argument("--engine", default="{}", help="further arguments of sglang.Engine, JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    options = parser.parse_args()
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    model = step("model", lambda: save_model(options))
    if model is not None:
        for page in options.pages.split(","):
            check(options, model, int(page))
    return end()


if __name__ == "__main__":
    sys.exit(main())
