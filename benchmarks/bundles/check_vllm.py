"""Checks a bundle of vLLM on a GPU: its kernels, then an engine with a Llama of random weights.

    python3 check_vllm.py [--kernels] [--layers 8] [--graphs] [--sleep] [--transfer '{"kv_connector": ...}']

The engine answers prompts cold, from its prefix cache, and after a reset of it, where a connector may have them. Prints
a line for each step, and exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    from benchmarks.bundles.steps import Answers, Asked, end, step
except ModuleNotFoundError:  # in a bundle
    from steps import Answers, Asked, end, step  # type: ignore[import-not-found,no-redef]

OFFLINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""What an engine needs without a network; set before vLLM is imported."""

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_theta": 500000.0,
}
"""The ``config.json`` of Llama-3.1-8B, without the number of its layers."""


def versions() -> str:
    import torch
    import triton
    import vllm

    return f"vLLM {vllm.__version__}, torch {torch.__version__}, Triton {triton.__version__}, " + (
        f"{torch.cuda.get_device_name(0)} x {torch.cuda.device_count()}"
    )


def rms_norm() -> str:
    import torch
    from vllm import _custom_ops as ops

    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-5)
    right = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    return close(out, right, 0.1)


def silu_and_mul() -> str:
    import torch
    from torch.nn.functional import silu

    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(64, 1024, device="cuda", dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(out, x)
    return close(out, silu(x[:, :1024].float()) * x[:, 1024:].float(), 0.2)


def attention() -> str:
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    tokens = 512
    q = torch.randn(tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    ends = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=tokens,
        cu_seqlens_q=ends,
        max_seqlen_k=tokens,
        cu_seqlens_k=ends,
        causal=True,
        fa_version=3,
    )
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)))
    right = scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    return close(out, right, 0.1)


def experts() -> str:
    import torch
    from vllm import _custom_ops as ops

    scores = torch.randn(64, 8, device="cuda")
    weights = torch.empty(64, 2, device="cuda")
    ids, source = (torch.empty(64, 2, device="cuda", dtype=torch.int32) for _ in range(2))
    ops.topk_softmax(weights, ids, source, scores)
    return close(weights, scores.softmax(-1).topk(2).values, 1e-3)


def close(found: Any, right: Any, most: float) -> str:
    error = (found.float() - right.float()).abs().max().item()
    if not error < most:
        raise AssertionError(f"differs by {error}")
    return f"differs by at most {error:.4f}"


def engine(options: argparse.Namespace) -> Any:
    from vllm import LLM

    directory = tempfile.mkdtemp()
    Path(directory, "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": options.layers}))
    extra: dict[str, Any] = json.loads(options.llm)
    if options.transfer:
        extra["kv_transfer_config"] = json.loads(options.transfer)
    llm = LLM(
        model=directory,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=16384,
        gpu_memory_utilization=0.5,
        enforce_eager=not options.graphs,
        enable_sleep_mode=options.sleep,
        generation_config="vllm",
        seed=0,
        **extra,
    )
    llm.apply_model(give_weights)
    return llm


def give_weights(model: Any) -> None:
    """Dummy weights are near 0: attention would vanish in rounding, and wrong KV would go unnoticed."""
    import torch

    generator = torch.Generator(device="cuda")
    generator.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                weight.fill_(1.0 if "norm" in name else 0.0)
            else:
                weight.normal_(0.0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5, generator=generator)


def describe(llm: Any) -> str:
    config = llm.llm_engine.vllm_config
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    caches = runner.kv_caches
    tensors = list(caches.values()) if isinstance(caches, dict) else list(caches)
    first = tensors[0]
    return (
        f"{type(runner).__module__}, async scheduling {config.scheduler_config.async_scheduling}, "
        f"{config.cache_config.num_gpu_blocks} blocks; {len(tensors)} tensors in "
        f"{len({each.untyped_storage().data_ptr() for each in tensors})} storages, the first "
        f"{tuple(first.shape)} {first.stride()}"
    )


def answers(llm: Any, prompts: list[list[int]]) -> Answers:
    """One at a time: the tokens, and the time to the first of them."""
    from vllm import SamplingParams

    took, found = [], []
    for ids in prompts:
        start = time.perf_counter()
        llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        took.append((time.perf_counter() - start) * 1e3)
    for ids in prompts:
        sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        (answer,) = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        found.append(tuple(answer.outputs[0].token_ids))
    return found, f"first token after {sorted(took)[len(took) // 2]:.1f} ms"


def run_engine(options: argparse.Namespace) -> None:
    started: list[Any] = []

    def start() -> str:
        started.append(engine(options))
        return describe(started[0])

    step("engine", start)
    if not started:
        return
    llm = started[0]
    numbers = random.Random(1)
    prompts = [[numbers.randrange(10, 128000) for _ in range(8192)] for _ in range(5)]
    asked = Asked(lambda _: answers(llm, prompts), " (bfloat16 may round some otherwise)")

    def reset() -> str:
        if not llm.reset_prefix_cache():
            raise AssertionError("vLLM refused to reset its prefix cache")
        return asked.again()

    def sleep() -> str:
        import torch

        before = torch.cuda.mem_get_info()[0]
        llm.sleep(level=1)
        freed = torch.cuda.mem_get_info()[0] - before
        llm.wake_up()
        return f"{freed / 2**30:.1f} GiB freed; {asked.again()}"

    step("cold", asked.cold)
    step("from the prefix cache", asked.again)
    step("after a reset", reset)
    if options.sleep:
        step("after sleep and wake", sleep)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", action="store_true", help="only the kernels, no engine")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--graphs", action="store_true", help="with torch.compile and CUDA graphs")
    parser.add_argument("--sleep", action="store_true", help="with sleep mode, and once asleep")
    parser.add_argument("--transfer", default="", help="vLLM's kv_transfer_config, JSON")
    parser.add_argument("--llm", default="{}", help="further options of vLLM's LLM, JSON")
    options = parser.parse_args()
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    step("versions", versions)
    for kernel in (rms_norm, silu_and_mul, attention, experts):
        step(kernel.__name__, kernel)
    if not options.kernels:
        run_engine(options)
    return end()


if __name__ == "__main__":
    sys.exit(main())
