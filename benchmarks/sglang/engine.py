"""One SGLang engine in a process of its own, with random weights; the parent asks by JSON lines (`serve` at the end).

SGLang starts its scheduler as a child of it, so the time of a request holds the way to that process and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.bundles import check_sglang
from benchmarks.vllm.conversations import Conversations
from benchmarks.vllm.engine import LLAMA_8B, TINY, kv_bytes_per_token, random_tokens
from kvsidecar.bench.processes import serve

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "sglang" / "stand_ins"
"""For what SGLang imports on the CPU, and does not use."""
ON_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "few_models",
    "PYTHONPATH": f"{STAND_INS}:{ROOT}",
}
"""What an engine on the CPU needs offline."""
FLUSH_SECONDS = 30.0
BATCH_SIZES = (1, 2, 4, 8, 12, 16)
"""Of the CUDA graphs for decode."""


def model_config(tiny: bool) -> dict[str, Any]:
    return {**LLAMA_8B, **(TINY if tiny else {})}


def offload_arguments(
    mode: str, *, gpu_tokens: int, pool_bytes: int, tiny: bool, socket: str | None, extra: dict[str, Any]
) -> dict[str, Any]:
    """What a mode adds to the arguments of the engine."""
    if mode == "hicache":
        # Not hicache_size: that is whole GB. Policy, backend and layout stay SGLang's defaults.
        ratio = pool_bytes / (gpu_tokens * kv_bytes_per_token(tiny))
        return {"enable_hierarchical_cache": True, "hicache_ratio": ratio}
    if mode == "kvsidecar":
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "KVSidecarLinker",
                "linker_module_path": "kvsidecar.integrations.sglang",
                "linker_extra_config": {"socket": socket, **extra},
            },
        }
    return {}


def engine_arguments(tiny: bool, concurrency: int) -> dict[str, Any]:
    """Those of all modes."""
    found: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": "cpu" if tiny else "cuda",
        "dtype": "bfloat16",
        "attention_backend": "torch_native" if tiny else "triton",
        "sampling_backend": "pytorch",
        "context_length": 2048 if tiny else 32768,
        "chunked_prefill_size": 256 if tiny else 8192,
        "max_running_requests": concurrency,
        "disable_custom_all_reduce": True,
        "random_seed": 0,
        "log_level": "info",
    }
    if tiny:
        return {**found, "disable_cuda_graph": True}
    # Graphs for prefill need a function of sgl_kernel that the bundle lacks.
    sizes = [size for size in BATCH_SIZES if size < concurrency] + [concurrency]
    return {**found, "disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": sizes}


class Engine:
    """Builds ``sglang.Engine``.

    Args:
        model: its folder.
        tiny: a model for the CPU.
        arguments: of ``sglang.Engine``.
    """

    def __init__(self, model: str, tiny: bool, arguments: dict[str, Any]) -> None:
        if tiny:
            sys.path.insert(0, str(STAND_INS))
            os.environ.update(ON_CPU)
        else:
            for name, value in check_sglang.environment().items():
                os.environ.setdefault(name, value)
        began = time.perf_counter()
        import sglang
        import torch

        self._import_seconds = time.perf_counter() - began
        self._versions = {"sglang": sglang.__version__, "torch": torch.__version__}
        began = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if tiny:
                # SGLang starts its processes by spawn, and each would import for 10 s what this one has imported.
                multiprocessing.set_start_method("fork", force=True)
                stack.enter_context(mock.patch.object(multiprocessing, "set_start_method"))
            self.engine = sglang.Engine(model_path=model, **arguments)
        self._build_seconds = time.perf_counter() - began
        self._vocabulary = min(model_config(tiny)["vocab_size"], 128000)
        self._failed = 0

    def facts(self) -> dict[str, Any]:
        info = self.engine.get_server_info()
        names = [
            *("page_size", "chunked_prefill_size", "max_running_requests", "disable_overlap_schedule"),
            *("attention_backend", "sampling_backend", "cuda_graph_config", "enable_hierarchical_cache"),
            *("hicache_ratio", "hicache_write_policy", "hicache_io_backend", "hicache_mem_layout"),
        ]
        return {
            **self._versions,
            "import_seconds": self._import_seconds,
            "build_seconds": self._build_seconds,
            "gpu_tokens": info["max_total_num_tokens"],
            # What JSON does not have is told as text.
            "arguments": json.loads(json.dumps({name: info.get(name) for name in names}, default=str)),
        }

    def phase(self, first: int, count: int, length: int) -> dict[str, Any]:
        """Run these prompts one after the other, one token each: its time is the time to the first token."""
        return self._run(self._phase(first, count, length))

    async def _phase(self, first: int, count: int, length: int) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"ms": [], "cached": []}
        for name in range(first, first + count):
            ids = random_tokens(name, length, self._vocabulary)
            began = time.perf_counter()
            async for _, finished, cached in self._stream(ids, 1):
                if finished:
                    found["ms"].append((time.perf_counter() - began) * 1e3)
                    found["cached"].append(cached)
        return found

    def converse(self, **options: Any) -> dict[str, Any]:
        """Run `Conversations` to their end."""
        talks = Conversations(**options, vocabulary=self._vocabulary)
        self._failed = 0
        began = time.perf_counter()
        self._run(self._converse(talks))
        return {"seconds": time.perf_counter() - began, **talks.result(), "failed_requests": self._failed}

    async def _converse(self, talks: Conversations) -> None:
        running: set[asyncio.Task[None]] = set()
        while not talks.over:
            for name, ids in talks.next_requests():
                running.add(asyncio.create_task(self._ask(talks, name, ids)))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _ask(self, talks: Conversations, name: str, ids: list[int]) -> None:
        talks.sent(name, time.perf_counter())
        finished = False
        try:
            async for tokens, finished, cached in self._stream(ids, talks.output_tokens):
                talks.answered(name, tokens, time.perf_counter(), finished, cached)
        except Exception as error:  # noqa: BLE001 (SGLang aborts a request whose load fails: the others are measured)
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        if not finished:
            self._failed += 1
            talks.answered(name, [10], time.perf_counter(), True, 0)

    async def _stream(self, ids: list[int], tokens: int) -> AsyncIterator[tuple[list[int], bool, int]]:
        """All tokens of the answer so far, whether it has ended, and how many of the prompt's tokens were cached."""
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        async for part in await self.engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True):
            meta = part["meta_info"]
            reason = meta.get("finish_reason")
            if reason and reason.get("type") == "abort":
                raise RuntimeError(reason.get("message") or "aborted")
            if part["output_ids"]:
                yield list(part["output_ids"]), bool(reason), meta.get("cached_tokens") or 0

    def flush(self) -> dict[str, Any]:
        """Forget the radix cache, and HiCache's. SGLang refuses it while the end of a request is not over."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while not self.engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cache was not flushed within {FLUSH_SECONDS:g} s")
            time.sleep(0.1)
        return {}

    def _run(self, what: Any) -> Any:
        return self.engine.loop.run_until_complete(what)

    def end(self) -> dict[str, Any]:
        """End the processes of SGLang, which waits until they are gone."""
        self.engine.shutdown()
        return {}


def main() -> None:
    config = json.loads(sys.argv[1])
    # Only replies may go to the parent: whatever the engine prints goes to the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    engine = Engine(config["model"], config["tiny"], config["arguments"])
    sys.stdout = replies
    serve({name: getattr(engine, name) for name in ("facts", "phase", "converse", "flush", "end")})
    sys.stdout = sys.stderr


if __name__ == "__main__":
    main()
