"""An engine on each GPU, all on one daemon, in multi-turn conversations: tokens a second of one and of all at once.

python -m benchmarks.vllm.several_gpus --json several.json     # on a machine with several GPUs
python -m benchmarks.vllm.several_gpus --tiny                  # on the CPU: shows that everything works

The conversations are those of `benchmarks.vllm.throughput`, others for each engine: their history has left the GPU when
the next turn comes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.vllm import runs
from benchmarks.vllm.runs import ask, console, p50
from benchmarks.vllm.throughput import GPU, SHAPE, conversations_bytes
from kvsidecar.bench.processes import BenchChild
from kvsidecar.support import cuda_driver

WARM_SEED = 1 << 20


@contextmanager
def visible(ordinal: int | None) -> Iterator[None]:
    """Processes that are started within the block see one GPU."""
    if ordinal is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(ordinal)
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)


def at_once(engines: list[BenchChild], do: str, **arguments: Any) -> list[dict[str, Any]]:
    for number, engine in enumerate(engines):
        engine.ask(do, **arguments, seed=number)
    return [engine.answer(runs.START_SECONDS) for engine in engines]


def run(mode: str, options: argparse.Namespace, directory: Path, pool: int) -> dict[str, Any]:
    llm = runs.llm_options(options, max_model_len=16384)
    shape = {name: getattr(options, name) for name in SHAPE}
    with ExitStack() as stack:
        daemon = stack.enter_context(
            runs.daemon(options, directory, pool) if mode == "kvsidecar" else nullcontext(None)
        )
        engines = []
        for number in range(options.engines):
            with visible(None if options.tiny else number):
                engines.append(stack.enter_context(runs.engine(options, directory, mode, pool, daemon, **llm)))
        for engine in engines:
            engine.ask("facts")
        for engine in engines:
            engine.answer(runs.START_SECONDS)
        at_once(engines, "converse", **{**shape, "count": 4, "turns": 2, "system_tokens": shape["system_tokens"] // 2})
        for engine in engines:
            ask(engine, "reset")
        alone = ask(engines[0], "converse", **shape, seed=WARM_SEED)
        ask(engines[0], "reset")
        console.print(f"{mode}: one alone {rate(alone):,.0f} tokens/s")
        together = at_once(engines, "converse", **shape)
    return {"alone": alone, "together": together}


def rate(found: dict[str, Any]) -> float:
    return float(found["output_tokens"] / found["seconds"])


def show(results: dict[str, dict[str, Any]]) -> None:
    rows: list[list[object]] = []
    for mode, found in results.items():
        each = [rate(one) for one in found["together"]]
        for what, one in (
            ("one alone", found["alone"]),
            *((f"engine {n}", e) for n, e in enumerate(found["together"])),
        ):
            cached = f"{100 * one['cached_tokens'] / one['prompt_tokens']:.1f} %"
            rows.append([mode, what, rate(one), p50(one["later_ttft_ms"]), p50(one["tpot_ms"]), cached, one["seconds"]])
        rows.append([mode, "all together", sum(each), "", "", "", ""])
    columns = [
        "mode",
        "engine",
        "output tok/s",
        "TTFT of later turns p50 ms",
        "TPOT p50 ms",
        "prompt cached",
        "seconds",
    ]
    runs.table("Conversations, an engine on each GPU", columns, rows)


def main() -> None:
    parser = runs.arguments(__doc__)
    parser.add_argument("--engines", type=int, default=0, help="default: as many as GPUs; tiny: 2")
    parser.add_argument("--memory", type=float, default=0.7, help="share of the GPU's memory for the engine")
    options = runs.parsed(parser, SHAPE, GPU)
    options.engines = options.engines or (2 if options.tiny else cuda_driver.device_count())
    need = conversations_bytes(options) * (options.engines + 1)
    pool = runs.pool_bytes(options, (need // (1 << 30) + 1) * (1 << 30) if not options.tiny else 16 << 20)
    results: dict[str, dict[str, Any]] = {}
    with runs.folder(options) as directory:
        for mode in runs.modes(options, ("kvsidecar", "none")):
            console.print(f"{mode} ...")
            results[mode] = run(mode, options, directory, pool)
            runs.save(options, {"modes": results})
    show(results)


if __name__ == "__main__":
    main()
