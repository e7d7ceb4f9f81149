"""Recorded sessions of coding agents against vLLM: tokens/s, time to first token and hits, by how many are at work.

python -m benchmarks.vllm.agentx --trace agentic.jsonl.xz --json agentx.json  # on a GPU
python -m benchmarks.vllm.agentx --trace agentic.jsonl.xz --tiny              # on the CPU: shows that all works

Each agent asks, waits for the answer, then for the recorded pause divided by --speed, and asks again; a session that
ends is followed by the next one. A recorded block becomes --block-tokens tokens, so that many sessions are at work with
the KV of few: prompts keep their shape and are shorter. All modes replay the same sessions; what each asks in the time
it has depends on how fast it answers. `kvsidecar:POLICY` is a daemon with --eviction POLICY. `pegaflow` is PegaFlow's
server with a pool of the same bytes, and its connector. `resident` is the ceiling of the card: no connector, and as
many blocks as fit into --memory of the GPU, whatever --gpu-tokens says; each engine's `gpu_tokens`, in its `facts`, are
printed. What they do not hold is computed again there, too. "known" is what an endless cache would hit.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.vllm import runs
from benchmarks.vllm.engine import kv_bytes_per_token
from benchmarks.vllm.runs import ask, console, p50, p90
from benchmarks.vllm.throughput import refusals

SHAPE = {
    "seconds": (150, 20),
    "warm_seconds": (50, 4),
    "speed": (10, 400),
    "block_tokens": (16, 1),
    "max_output_tokens": (128, 4),
    "max_tokens": (65_536, 4_096),
}
GPU = {"gpu_tokens": (262_144, 8_192)}
"""Of KV on the GPU."""
POOL_TOKENS, TINY_POOL_TOKENS = 524_288, 16_384
CONCURRENCY, TINY_CONCURRENCY = "8,16,32", "4"


def run(mode: str, options: argparse.Namespace, directory: Path, pool: int) -> list[dict[str, Any]]:
    """What one engine measured, for each number of agents in turn.

    Nothing of one is hit by the next, whose tokens are others. Connectors keep what they have stored: PegaFlow's calls
    a reset a success, and forgets nothing.
    """
    system, _, policy = mode.partition(":")
    flags = ["--eviction", policy] if policy else []
    llm = runs.llm_options(options, max_model_len=options.max_tokens, resident=system == "resident")
    shape = {name: getattr(options, name) for name in SHAPE}
    shape |= {"path": str(options.trace.resolve()), "seed": options.seed}
    found = []
    with (
        runs.offloads_to(options, directory, system, pool, flags) as server,
        runs.engine(options, directory, system, pool, server, **llm) as child,
    ):
        facts = ask(child, "facts")
        ask(child, "converse", count=4, turns=2, concurrency=4, first_tokens=256, turn_tokens=64, output_tokens=8)
        for concurrency in options.concurrency:
            if not ask(child, "reset")["reset"]:
                raise SystemExit(f"{mode}: the engine's cache is not empty")
            each = {
                "concurrency": concurrency,
                "facts": facts,
                **ask(child, "replay", concurrency=concurrency, **shape),
            }
            if system == "kvsidecar":
                each["refusals"] = refusals(server.socket)
            found.append(each)
    return found


def _row(mode: str, found: dict[str, Any]) -> list[object]:
    seconds, output = found["counted_seconds"], found["output_tokens"]
    return [
        mode,
        found["concurrency"],
        found["requests"],
        (found["prompt_tokens"] + output) / seconds,
        output / seconds,
        p50(found["ttft_ms"]),
        p90(found["ttft_ms"]),
        f"{1e3 / p50(found['tpot_ms']):.1f}" if found["tpot_ms"] else "-",
        f"{100 * found['cached_tokens'] / found['prompt_tokens']:.1f} %",
        f"{100 * found['known_tokens'] / found['prompt_tokens']:.1f} %",
    ]


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    rows = sorted(
        (_row(mode, each) for mode, found in results.items() for each in found if each["requests"]),
        key=lambda row: str(row[1]).zfill(9),
    )
    columns = ["mode", "agents", "requests", "tok/s", "output tok/s", "TTFT p50 ms", "p90", "tok/s/user"]
    runs.table("Agents", [*columns, "hits", "known"], rows)
    runs.show_gpu_tokens({mode: found[-1] for mode, found in results.items()})
    for mode, found in results.items():
        if refused := found[-1].get("refusals"):
            console.print(f"{mode}: the daemon refused, by reason: {refused}")


def main() -> None:
    parser = runs.arguments(__doc__, runs.WORKLOADS)
    parser.add_argument(
        "--trace", type=Path, required=True, help="sessions, as kvsidecar.cli.size.agentic describes them"
    )
    parser.add_argument("--concurrency", default="", help=f"agents at once, comma-separated; {CONCURRENCY}")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory for the engine")
    parser.add_argument("--seed", type=int, default=0, help="of the order of sessions")
    options = runs.parsed(parser, SHAPE, GPU)
    given = options.concurrency or (TINY_CONCURRENCY if options.tiny else CONCURRENCY)
    options.concurrency = [int(each) for each in given.split(",")]
    if len(set(options.concurrency)) < len(options.concurrency):
        raise SystemExit("--concurrency: as many agents once more would hit what they have stored before")
    default = ("none", "kvsidecar") if options.tiny else ("none", "simple", "kvsidecar")
    chosen = runs.modes(options, default, runs.WORKLOADS, policies=True)
    pool_tokens = TINY_POOL_TOKENS if options.tiny else POOL_TOKENS
    pool = runs.pool_bytes(options, pool_tokens * kv_bytes_per_token(options.tiny))
    results: dict[str, list[dict[str, Any]]] = {}
    with runs.folder(options) as directory:
        for mode in chosen:
            console.print(f"{mode} ...")
            results[mode] = run(mode, options, directory, pool)
            runs.save(options, {"modes": results})  # a run that is cut short has something to show
    show(results)


if __name__ == "__main__":
    main()
