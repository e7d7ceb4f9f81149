"""Multi-turn conversations whose KV is larger than the GPU's, in a real SGLang engine, and prompts one at a time.

python -m benchmarks.sglang.chats --json chats.json     # on a GPU: all modes
python -m benchmarks.sglang.chats --tiny                # on the CPU: shows that everything works

Modes: `none` has the radix cache on the GPU alone. `kvsidecar` is this project's linker with a daemon of its own, and
`hicache` SGLang's own hierarchical cache with a pool of the same bytes. `resident` is the ceiling of the card: no
offload, and as much KV on the GPU as fits into its share of memory, whatever --gpu-tokens says.

Conversations (those of `benchmarks.vllm.throughput`) run twice: first the host's pool is empty, then it is full of the
first ones. The GPU is not flushed in between, because SGLang's flush also empties the pool of HiCache. After them
--prompts prompts are asked one at a time: computed (`cold`), from the radix cache (`radix`), and when other prompts
have evicted them from the GPU (`evicted`). A mode that fails is reported, and the next one runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.sglang.engine import engine_arguments, model_config, offload_arguments
from benchmarks.vllm import runs
from benchmarks.vllm.engine import kv_bytes_per_token
from benchmarks.vllm.runs import ask, console, p50, p90, p99
from benchmarks.vllm.throughput import WARM_SEED, refusals
from kvsidecar.bench.errors import BenchError
from kvsidecar.bench.processes import BenchChild, PrivateDaemon
from kvsidecar.client import Client

MODES = ("none", "kvsidecar", "hicache", "resident")
SHAPE = {
    "count": (40, 10),
    "turns": (5, 3),
    "concurrency": (16, 3),
    "first_tokens": (4096, 200),
    "turn_tokens": (512, 40),
    "output_tokens": (128, 8),
    "system_tokens": (512, 64),
}
OTHER = {"gpu_tokens": (131_072, 2_048), "page": (64, 16), "prompts": (10, 2), "prompt_tokens": (8192, 320)}
POOL = (60 << 30, 6 << 20)
ATTACH_SECONDS = 60.0
FIRST_OF_PHASES, FIRST_OF_OTHERS, FIRST_OF_ATTACH = 0, 10_000, 20_000
"""Names of prompts."""


def run(mode: str, options: argparse.Namespace, directory: Path, pool: int, save: Any) -> None:
    """Measure one engine, and save after each part: (name, what was found)."""
    with daemon(mode, options, directory, pool) as server, engine(mode, options, directory, pool, server) as child:
        facts = ask(child, "facts")
        if server is not None:
            wait_until_it_offloads(options, server, child)
        shape = {name: getattr(options, name) for name in SHAPE}
        # The engine's first steps compile and allocate; these conversations are others than those counted.
        ask(child, "converse", **{**shape, "count": options.concurrency // 2 + 1, "turns": 2}, seed=WARM_SEED)
        ask(child, "flush")
        for seed, name in enumerate(("empty", "full")):
            found = {"facts": facts, **ask(child, "converse", **shape, seed=seed)}
            save("modes", f"{mode}, {name}", {"summary": summary(found), **found, **daemon_facts(server)})
        if options.prompts:
            save("prompts", mode, prompts(options, child, 0 if mode == "resident" else facts["gpu_tokens"]))


def prompts(options: argparse.Namespace, child: BenchChild, evict_tokens: int) -> dict[str, Any]:
    """Time to the first token of each prompt.

    Args:
        evict_tokens: that others compute before the last phase; 0: there is no such phase.
    """
    # Half a page more: a last page that is whole would be recomputed.
    asked = {"first": FIRST_OF_PHASES, "count": options.prompts, "length": options.prompt_tokens + options.page // 2}
    phase = {"warm": ask(child, "phase", **{**asked, "first": FIRST_OF_OTHERS - 1, "count": 1})}
    phase["cold"] = ask(child, "phase", **asked)
    phase["radix"] = ask(child, "phase", **asked)
    if evict_tokens:
        others = evict_tokens // options.prompt_tokens + 2
        ask(child, "phase", **{**asked, "first": FIRST_OF_OTHERS, "count": others})
        phase["evicted"] = ask(child, "phase", **asked)
    for found in phase.values():
        found.update(p50=p50(found["ms"]), min=min(found["ms"]), max=max(found["ms"]))
    return {"tokens": asked["length"], "kv_bytes": asked["length"] * kv_bytes_per_token(options.tiny), **phase}


@contextmanager
def engine(
    mode: str, options: argparse.Namespace, directory: Path, pool: int, server: PrivateDaemon | None
) -> Iterator[BenchChild]:
    model = runs.model_folder(directory, model_config(options.tiny))
    arguments = {
        **engine_arguments(options.tiny, options.concurrency),
        "page_size": options.page,
        "mem_fraction_static": options.memory,
        "max_total_tokens": options.gpu_tokens,
        **offload_arguments(
            mode,
            gpu_tokens=options.gpu_tokens,
            pool_bytes=pool,
            tiny=options.tiny,
            socket=server.socket if server else None,
            extra=json.loads(options.extra),
        ),
    }
    if mode == "resident":
        if options.tiny:
            arguments["max_total_tokens"] *= runs.RESIDENT_TINY
        else:
            del arguments["max_total_tokens"]
    arguments |= json.loads(options.engine)
    config = {"model": str(model), "tiny": options.tiny, "arguments": arguments}
    child = BenchChild("benchmarks.sglang.engine", config, directory)
    try:
        yield child
        ask(child, "end")
    finally:
        try:
            child.close()
        except subprocess.TimeoutExpired:
            console.print(f"{mode}: the engine did not end, and was killed")


def daemon(mode: str, options: argparse.Namespace, directory: Path, pool: int) -> Any:
    return runs.daemon(options, directory, pool) if mode == "kvsidecar" else nullcontext()


def wait_until_it_offloads(options: argparse.Namespace, server: PrivateDaemon, child: BenchChild) -> None:
    """The engine serves without the daemon as long as it is not attached."""
    deadline = time.monotonic() + ATTACH_SECONDS
    first = FIRST_OF_ATTACH
    with Client(server.socket) as client:
        while not client.status().pool.blocks:
            if time.monotonic() > deadline:
                raise BenchError("the engine stores nothing in the daemon; its log says why")
            ask(child, "phase", first=first, count=1, length=2 * options.page + 1)
            first += 1
            time.sleep(0.2)


def daemon_facts(server: PrivateDaemon | None) -> dict[str, Any]:
    if server is None:
        return {}
    with Client(server.socket) as client:
        pool = client.status().pool
    held = {"blocks": pool.blocks, "used_bytes": pool.used_bytes, "evicted_blocks": pool.evicted_blocks}
    return {"daemon": held, "refusals": refusals(server.socket)}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of the table."""
    times = {name: found[name] for name in ("ttft_ms", "later_ttft_ms", "tpot_ms") if found[name]}
    return {
        "output_tokens_per_second": found["output_tokens"] / found["seconds"],
        "cached_share": found["cached_tokens"] / found["prompt_tokens"],
        **{name: {"p50": p50(each), "p90": p90(each), "p99": p99(each)} for name, each in times.items()},
    }


def _row(mode: str, found: dict[str, Any]) -> list[object]:
    what = found["summary"]
    none = {"p50": "-", "p90": "-", "p99": "-"}
    return [
        mode,
        what["output_tokens_per_second"],
        *what["ttft_ms"].values(),
        *what.get("later_ttft_ms", none).values(),
        *(f"{each:.2f}" for each in what["tpot_ms"].values()),
        f"{100 * what['cached_share']:.1f} %",
        found["seconds"],
    ]


def show(results: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    rows: list[list[object]] = []
    for mode, found in results["modes"].items():
        for each in found:
            rows.append(_row(mode, each))
            if each["failed_requests"]:
                console.print(f"{mode}: {each['failed_requests']} requests failed")
            if "daemon" in each:
                console.print(f"{mode}: the daemon holds {each['daemon']}, refused {each['refusals'] or 'nothing'}")
    if rows:
        columns = ["mode", "output tok/s", "TTFT p50 ms", "p90", "p99", "later p50", "p90", "p99"]
        runs.table("Conversations", [*columns, "TPOT p50 ms", "p90", "p99", "cached", "seconds"], rows)
        last = list(results["modes"].values())[-1][-1]
        console.print(
            f"{last['requests']} requests, {last['prompt_tokens']:,} prompt tokens, {last['output_tokens']:,} output "
            f"tokens; working set {last['working_set_tokens']:,} tokens"
        )
        runs.show_gpu_tokens({mode.partition(",")[0]: found[-1] for mode, found in results["modes"].items()})
    rows = [
        [mode, name, each[name]["p50"], each[name]["min"], each[name]["max"], str(p50(each[name]["cached"]))]
        for mode, found in results["prompts"].items()
        for each in found
        for name in ("cold", "radix", "evicted")
        if name in each
    ]
    if rows:
        columns = ["mode", "prompts", "TTFT p50 ms", "min", "max", "tokens cached"]
        runs.table("Prompts, one at a time", columns, rows)
    for mode in results["errors"]:
        console.print(f"{mode} has failed, see above")


def main() -> int:
    parser = runs.common_arguments(__doc__, ", ".join(MODES))
    parser.add_argument("--extra", default="{}", help="JSON: options of this project's linker")
    parser.add_argument("--engine", default="{}", help="JSON: further arguments of sglang.Engine")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory for the engine")
    parser.add_argument("--repeat", type=int, default=1, help="runs of every mode, in turn")
    options = runs.parsed(parser, SHAPE, OTHER)
    default = ("none", "kvsidecar", "resident") if options.tiny else MODES
    chosen = runs.modes(options, default, MODES)
    if options.tiny and "hicache" in chosen:
        raise SystemExit("--modes: hicache needs a GPU, so it cannot be with --tiny")
    if importlib.util.find_spec("sglang") is None:
        raise SystemExit("needs SGLang: make venv-sglang, or a bundle of benchmarks/bundles on PYTHONPATH")
    pool = runs.pool_bytes(options, POOL[options.tiny])
    results: dict[str, dict[str, Any]] = {"modes": {}, "prompts": {}, "errors": {}}

    def save(part: str, name: str, found: dict[str, Any]) -> None:
        results[part].setdefault(name, []).append(found)
        runs.save(options, results)  # a run that is cut short has something to show

    with runs.folder(options) as directory:
        for _ in range(options.repeat):
            for mode in chosen:
                console.print(f"{mode} ...")
                began = time.monotonic()
                try:
                    run(mode, options, directory, pool, save)
                    console.print(f"{mode}: {time.monotonic() - began:.0f} s")
                except Exception as error:  # noqa: BLE001 (time on a GPU is dear: the other modes are measured)
                    console.print(f"{mode} failed: {type(error).__name__}: {error}", markup=False)
                    save("errors", mode, {"error": str(error).partition("\n")[0]})
    show(results)
    return int(bool(results["errors"]))


if __name__ == "__main__":
    sys.exit(main())
