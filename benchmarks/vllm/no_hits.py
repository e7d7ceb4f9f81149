"""What offload costs where it gains nothing: prompts that nobody asks twice, each block stored, none loaded.

python -m benchmarks.vllm.no_hits --json no_hits.json     # on a GPU: without a connector and with this project's
python -m benchmarks.vllm.no_hits --tiny                  # on the CPU: shows that everything works

All engines live at the same time and take turns round by round, so that a machine that slows down slows all. Only one
runs at a time. A loss is the median of what each round lost against the first mode's, with quartiles. The mode
``empty`` is a connector that does nothing: what vLLM itself spends on having one. ``--hooks`` times the
connectors' hooks; their median is that of steps in which nothing is stored or loaded, for these are the most.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.vllm import runs
from benchmarks.vllm.runs import ask, console, p50, p99

SHAPE = {"count": (64, 6), "concurrency": (32, 3), "first_tokens": (1024, 100), "output_tokens": (256, 8)}
GPU = {"gpu_tokens": (65_536, 1_024)}
"""Of KV on the GPU of each engine."""
MODES = ("none", "kvsidecar")


def measure(
    options: argparse.Namespace, modes: list[str], directory: Path, pool: int
) -> dict[str, list[dict[str, Any]]]:
    """By mode: what each round gave."""
    llm = runs.llm_options(options, max_model_len=4096)
    shape = {name: getattr(options, name) for name in SHAPE} | {"turns": 1, "turn_tokens": 2, "system_tokens": 0}
    results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    with ExitStack() as stack:
        daemon = stack.enter_context(runs.daemon(options, directory, pool)) if "kvsidecar" in modes else None
        engines = {}
        for mode in modes:  # one after the other: each looks at how much of the GPU is free
            console.print(f"{mode}: engine starts ...")
            engines[mode] = stack.enter_context(
                runs.engine(options, directory, mode, pool, daemon, time_hooks=options.hooks, **llm)
            )
            ask(engines[mode], "facts")
            ask(engines[mode], "converse", **shape, seed=1)
            ask(engines[mode], "drain")
        for number in range(options.rounds):
            for mode in modes if number % 2 == 0 else modes[::-1]:
                found = ask(engines[mode], "converse", **shape, seed=2 + number)
                ask(engines[mode], "drain")  # its last stores are not the other engine's
                results[mode].append(found)
                console.print(f"round {number} {mode:>9}: {_speed(found):,.1f} tok/s, TPOT {_tpot(found):.3f} ms")
    return results


def _speed(found: dict[str, Any]) -> float:
    return float(found["output_tokens"] / found["seconds"])


def _tpot(found: dict[str, Any]) -> float:
    return statistics.fmean(found["tpot_ms"])


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    runs.hooks_table(
        (mode, f"round {number}", found) for mode, rounds in results.items() for number, found in enumerate(rounds)
    )
    columns = ["mode", "rounds", "output tok/s", "TPOT mean ms", "TPOT p99 ms", "TTFT p50 ms", "prompt cached"]
    rows = []
    for mode, rounds in results.items():
        cached = sum(each["cached_tokens"] for each in rounds) / sum(each["prompt_tokens"] for each in rounds)
        speed = statistics.median(map(_speed, rounds))
        tpot = statistics.median(map(_tpot, rounds))
        late = statistics.median(p99(each["tpot_ms"]) for each in rounds)
        first = statistics.median(p50(each["ttft_ms"]) for each in rounds)
        rows.append([mode, len(rounds), speed, f"{tpot:.3f}", f"{late:.3f}", first, f"{100 * cached:.1f} %"])
    runs.table("No hits", columns, rows)
    base, *others = results
    for mode in others:
        for name, value, sign in (("output tok/s", _speed, 1), ("TPOT", _tpot, -1)):
            lost = [
                100 * sign * (1 - value(ours) / value(theirs))
                for ours, theirs in zip(results[mode], results[base], strict=True)
            ]
            low, middle, high = statistics.quantiles(lost, n=4)
            console.print(f"{mode} against {base}, {name}: {middle:+.2f} % lost ({low:+.2f} to {high:+.2f})")


def main() -> None:
    parser = runs.arguments(__doc__)
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU's memory for each engine")
    parser.add_argument("--hooks", action="store_true", help="time the hooks, which costs some microseconds a step")
    parser.add_argument("--rounds", type=int, default=8, help="of each engine, in turn")
    options = runs.parsed(parser, SHAPE, GPU)
    if options.rounds < 2:
        raise SystemExit("--rounds: two at least, to see what they differ by")
    modes = runs.modes(options, MODES)
    pool = runs.pool_bytes(options, 6 << 20 if options.tiny else 16 << 30)
    with runs.folder(options) as directory:
        results = measure(options, modes, directory, pool)
    runs.save(options, {"modes": results})
    show(results)


if __name__ == "__main__":
    main()
