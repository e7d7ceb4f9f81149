"""Multi-turn conversations whose KV is larger than the GPU's: output tokens/s, time to first token, time per token.

python -m benchmarks.vllm.throughput --json throughput.json     # on a GPU: no connector, Simple, this project's
python -m benchmarks.vllm.throughput --tiny                     # on the CPU: shows that everything works
python -m benchmarks.vllm.throughput --model FOLDER --modes none,kvsidecar    # a model of yours, without and with

A closed loop with so many requests in flight; every conversation's next turn comes when all others had theirs, so its
history has left the GPU. All modes ask the same. With CUDA graphs, as one would serve. First the host's pool is empty,
then it is full of earlier conversations, which the new ones evict: --full times, with others each time. What the daemon
has refused is printed. `pegaflow` and `lmcache` are their servers with a pool of the same bytes, and their connectors.
`resident` is the ceiling of the card: no connector, and as many blocks as fit into --memory of the GPU, whatever
--gpu-tokens says, or --resident-tokens; each engine's `gpu_tokens`, in its `facts`, are printed.

Cores and neighbours change their speed from minute to minute: with --at-once 3, three engines share the GPUs and
take turns after every phase. Each has the memory that its tokens need, whatever --memory says.

At the end each conversation is asked one thing more, one prompt at a time: a hit in the connector, and for `resident`
one on the GPU. How fast the daemon's loads are then, and how fast beside a working engine, is told by its metrics.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.metrics import metric
from benchmarks.peers.servers import Server
from benchmarks.vllm import runs
from benchmarks.vllm.peers import PEERS
from benchmarks.vllm.runs import ask, console, p50, p99
from kvsidecar.bench.errors import BenchError
from kvsidecar.bench.processes import BenchChild, PrivateDaemon
from kvsidecar.client import Client

SHAPE = {
    "count": (40, 10),
    "turns": (6, 3),
    "concurrency": (16, 3),
    "first_tokens": (4096, 200),
    "turn_tokens": (512, 40),
    "output_tokens": (128, 8),
    "system_tokens": (512, 64),
}
GPU = {"gpu_tokens": (131_072, 1_024)}
"""Of KV on the GPU: about a third of the working set."""


WARM_SEED = 100
"""Of the conversations that nobody counts."""
READY = "ready"
"""An engine has started, and is warm."""
ALONE = "alone"
"""What follows the last conversations, one prompt at a time."""


LOST = ("given_up_blocks", "held_back_stores", "failed_stores", "refused_jobs", "unanswered_lookups", "gone_loads")
"""Of the connector's counters, what costs hits."""


@dataclass(frozen=True, slots=True)
class System:
    """An engine of a mode that starts, and what it offloads to, which is ready."""

    mode: str
    engine: BenchChild
    server: PrivateDaemon | Server | None


def in_turns(
    modes: Sequence[str], options: argparse.Namespace, directory: Path, pool: int
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Mode, phase, and what its engine measured. The engines start side by side, and work one at a time.

    One that fails says so, and the others go on. Raises SystemExit at the end then.
    """
    with ExitStack() as stack:
        # Those first that need no pinned pool: they build while others pin.
        ordered = sorted(modes, key=lambda mode: mode == "kvsidecar" or mode in PEERS)
        systems = {mode: stack.enter_context(started(mode, options, directory, pool)) for mode in ordered}
        turns = {mode: measured(systems[mode], options) for mode in modes}
        failed: list[str] = []
        while turns:
            for mode in list(turns):
                try:
                    phase, found = next(turns[mode])
                    if phase is not READY:  # all are, before the first one measures
                        yield mode, phase, found
                except StopIteration:
                    del turns[mode]
                except BenchError as error:
                    console.print(f"{mode} failed: {error}")
                    failed.append(mode)
                    del turns[mode]
    if failed:
        raise SystemExit(f"{', '.join(failed)} failed")


@contextmanager
def started(mode: str, options: argparse.Namespace, directory: Path, pool: int) -> Iterator[System]:
    llm = runs.llm_options(options, max_model_len=16384, resident=mode == "resident")
    if getattr(options, "model", ""):
        llm |= {"load_format": "auto", "dtype": "auto"}  # it has weights of its own
    if options.tp > 1:
        llm["tensor_parallel_size"] = options.tp
    with (
        runs.offloads_to(options, directory, mode, pool) as server,
        runs.engine(options, directory, mode, pool, server, **llm) as child,
    ):
        yield System(mode, child, server)


def measured(system: System, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """After ``ready``, what one engine measured: with the pool ``empty``, ``full`` as often as wanted, ``alone``."""
    shape = {name: getattr(options, name) for name in SHAPE}  # that of the conversations
    facts = ask(system.engine, "facts")
    # The engine's first steps compile and allocate; these conversations are others than those counted.
    warm = {**shape, "count": 4, "turns": 2}
    ask(system.engine, "converse", **warm, seed=WARM_SEED)
    yield READY, facts
    for seed in range(1 + options.full):
        ask(system.engine, "reset")
        with loads(system.server) as loaded:
            found = {"facts": facts, **ask(system.engine, "converse", **shape, seed=seed)}
        if isinstance(system.server, PrivateDaemon):
            found |= {"refusals": refusals(system.server.socket), "loads": loaded}
        yield "full" if seed else "empty", found
    if system.mode in ("none", "empty"):
        return
    if system.mode != "resident":
        ask(system.engine, "reset")
    with loads(system.server) as loaded:
        found = ask(system.engine, "ask_again", computed=getattr(options, "checked", 0))
    yield ALONE, {"facts": facts, **found, "loads": loaded}


@contextmanager
def loads(server: object) -> Iterator[dict[str, float]]:
    """Jobs, bytes, and seconds in which bytes moved, of the daemon's loads in this block; known after it."""
    found: dict[str, float] = {}
    before = _loaded(server)
    yield found
    found.update({name: value - before[name] for name, value in _loaded(server).items()})


def _loaded(server: object) -> dict[str, float]:
    if not isinstance(server, PrivateDaemon):
        return {}
    names = {"jobs": "copy_seconds_count", "bytes": "copy_size_bytes_sum", "seconds": "copy_seconds_sum"}
    return {short: metric(server, f'kvsidecar_{name}{{direction="load"}}') for short, name in names.items()}


def refusals(socket: str) -> dict[str, int]:
    """Since the daemon started, by those reasons that it had."""
    with Client(socket) as client:
        return {reason: count for reason, count in client.status().refusals.items() if count}


def _row(mode: str, found: dict[str, Any]) -> list[object]:
    return [
        mode,
        found["output_tokens"] / found["seconds"],
        p50(found["ttft_ms"]),
        p99(found["ttft_ms"]),
        *((p50(later), p99(later)) if (later := found["later_ttft_ms"]) else ("-", "-")),
        f"{p50(found['tpot_ms']):.2f}",
        f"{p99(found['tpot_ms']):.2f}",
        f"{100 * found['cached_tokens'] / found['prompt_tokens']:.1f} %",
        found["seconds"],
    ]


def show_loads(results: dict[str, list[dict[str, Any]]]) -> None:
    """How fast the daemon's loads were, and what share that is of the same copies alone."""
    rates = {name: [_rate(each["loads"]) for each in found] for name, found in results.items() if found[0].get("loads")}
    alone = p50(rates.pop(f"kvsidecar, {ALONE}", [0.0]))
    for name, found in rates.items():
        share = f"; alone {alone:.1f}: {100 * p50(found) / alone:.0f} %" if alone else ""
        console.print(f"{name}: loads at {', '.join(f'{each:.1f}' for each in found)} GB/s of each rank{share}")


def show_alone(results: dict[str, list[dict[str, Any]]]) -> None:
    rows = [_row_alone(name, each) for name, found in results.items() for each in found]
    if rows:
        runs.table("One prompt at a time", ["mode", "TTFT p50 ms", "min", "max", "prompt cached"], rows)


def _row_alone(name: str, found: dict[str, Any]) -> list[object]:
    times = found["ttft_ms"]
    cached = f"{100 * sum(found['cached_tokens']) / sum(found['prompt_tokens']):.1f} %"
    return [name, p50(times), min(times), max(times), cached]


def _rate(loaded: dict[str, float]) -> float:
    """GB/s."""
    return loaded["bytes"] / loaded["seconds"] / 1e9 if loaded["seconds"] else 0.0


def show_lost(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """What each engine with this project's connector has counted that costs hits."""
    for mode, found in results.items():
        if counters := found[-1].get("counters"):
            console.print(f"{mode}, counted: " + ", ".join(f"{name} {counters[name]}" for name in LOST))


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    show_loads(results)
    show_alone({name: found for name, found in results.items() if name.endswith(ALONE)})
    results = {name: found for name, found in results.items() if not name.endswith(ALONE)}
    rows = [_row(mode, each) for mode, found in results.items() for each in found]
    show_lost(results)
    for mode, found in results.items():
        refused = [each["refusals"] for each in found if each.get("refusals")]
        if refused:
            console.print(f"{mode}: the daemon refused, by reason: {refused[-1]}")
    columns = ["mode", "output tok/s", "TTFT p50 ms", "p99", "later turns p50", "p99", "TPOT p50 ms", "p99"]
    runs.table("Conversations", [*columns, "prompt cached", "seconds"], rows)
    runs.hooks_table((mode, "", each) for mode, found in results.items() for each in found)
    last = next(iter(results.values()))[-1]
    console.print(
        f"{last['requests']} requests, {last['prompt_tokens']:,} prompt tokens, {last['output_tokens']:,} output "
        f"tokens; working set {last['working_set_tokens']:,} tokens"
    )
    runs.show_gpu_tokens({mode.partition(",")[0]: found[-1] for mode, found in results.items()})


def conversations_bytes(options: argparse.Namespace) -> int:
    """Room for all conversations at their end, and for those that warm up."""
    longest = options.system_tokens + options.first_tokens * 3 // 2
    longest += options.turns * (options.turn_tokens * 3 // 2 + options.output_tokens)
    return int(runs.bytes_per_token(options) * longest * (options.count + 4))


def main() -> None:
    parser = runs.arguments(__doc__, runs.WORKLOADS)
    parser.add_argument(
        "--model", default="", metavar="FOLDER", help="a model with its weights (random ones of Llama-3.1-8B)"
    )
    parser.add_argument("--memory", type=float, default=0.7, help="share of the GPU's memory for the engine")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument(
        "--full", type=int, default=1, help="times that new conversations evict earlier ones (%(default)s)"
    )
    parser.add_argument("--repeat", type=int, default=1, help="engines of every mode, in turn")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="engines on the same GPUs, which take turns after each phase (%(default)s)",
    )
    parser.add_argument(
        "--resident-tokens", type=int, default=0, help="of KV on the GPU, for resident (what fits into --memory)"
    )
    options = runs.parsed(parser, SHAPE, GPU)
    default = ("none", "kvsidecar") if options.tiny else ("none", "simple", "kvsidecar")
    chosen = runs.modes(options, default, runs.WORKLOADS)
    if options.at_once > 1 and "resident" in chosen and not options.resident_tokens and not options.tiny:
        parser.error("--at-once: with other engines on its GPU, resident needs --resident-tokens")
    if options.at_once > 1:  # engines that build side by side would write the same files of vLLM's cache
        os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    need = conversations_bytes(options)
    pool = runs.pool_bytes(options, (need // (1 << 30) + 1) * (1 << 30) if not options.tiny else 6 << 20)
    results: dict[str, list[dict[str, Any]]] = {}
    try:
        with runs.folder(options) as directory:
            for group in groups(chosen * options.repeat, options.at_once):
                console.print(f"{', '.join(group)} ...")
                for mode, phase, found in in_turns(group, options, directory, pool):
                    results.setdefault(f"{mode}, {phase}", []).append(found)
                    runs.save(options, {"modes": results})
    finally:
        if results:  # a run that is cut short has something to show, too
            show(results)


def groups(modes: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Modes that run at once: so many, and each of them only once."""
    group: list[str] = []
    for mode in modes:
        if len(group) == size or mode in group:
            yield group
            group = []
        group.append(mode)
    yield group


if __name__ == "__main__":
    main()
