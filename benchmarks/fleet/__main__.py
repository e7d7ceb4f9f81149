"""What hit rate and how many saved seconds of prefill a pool, a disk and a cluster tier bring, by admission.

    python -m benchmarks.fleet [--quick] [--json FILE] [--plot FILE.svg]
    python -m benchmarks.fleet --trace conversation_trace.jsonl --nodes 8 --fleet 8
    python -m benchmarks.fleet --only fleet --fleet 1000 --fleet-hours 0.1 --gpu 96GiB --pool 128GiB --admissions all
    python -m benchmarks.fleet --agentic FILE --sessions N --pool-tokens M --policy NAME[,NAME...]
    python -m benchmarks.fleet --log FILE --pool-tokens M --policy NAME[,NAME...]
    python -m benchmarks.fleet --show FILE [--plot FILE.svg]

The trace is generated, unless a file in the format of Mooncake's traces is named: an object a line with timestamp
(ms), input_length, output_length and hash_ids of 512 tokens each. Sizes and rates are those of one node. No GPU, disk
or network is used: the daemon's code decides, and times follow from the rates given.

With --pool-tokens, the trace is replayed over one pool of so many tokens by each policy of eviction, and by one that
knows what comes, which no policy can exceed. --agentic names a file of recorded sessions of coding agents, of which so
many run at once, 4 hours by default and the first half hour not counted; --log names a log of requests, of vLLM or of a
gateway, of which the first quarter is not counted (kvsidecar/cli/size/agentic.py and log.py have the formats).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.fleet import report
from benchmarks.fleet.cases import ADMISSIONS, HOURS, MODELS, SECTIONS, load, mix_of, plan, run
from benchmarks.fleet.engine_cache import EAGER, MODES
from benchmarks.fleet.fit import statistics
from benchmarks.fleet.policies import CLAIRVOYANT, POLICIES, Log, Prefill, Source, Task, load_uses, run_policy
from benchmarks.fleet.trace import BLOCK_TOKENS
from kvsidecar.cli.size.agentic import WARM_SECONDS, SessionReplay
from kvsidecar.cli.size.json_lines import BadFile
from kvsidecar.support.units import GiB, TiB, parse_size


def sizes(text: str) -> list[int]:
    return [parse_size(each) for each in text.split(",")]


def counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def tokens(text: str) -> int:
    """A number, of thousands, millions or billions with k, M or G."""
    scale = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
    number = float(text[:-1] if scale > 1 else text) * scale
    if not 1 <= number < 1 << 48:
        raise ValueError(text)
    return round(number)


def policies(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in POLICIES]:
        raise argparse.ArgumentTypeError(f"there is no policy {unknown[0]!r}; there is {', '.join(POLICIES)}")
    return list(dict.fromkeys(names))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a file to replay instead of a generated trace")
    parser.add_argument("--agentic", type=Path, help="a file of recorded sessions to replay instead")
    parser.add_argument("--log", type=Path, help="a log of requests, of vLLM or a gateway, to replay instead")
    parser.add_argument("--sessions", type=int, help="of --agentic: how many run at once")
    parser.add_argument(
        "--hints", action="store_true", help="of --agentic: tell when a session ends or waits, and for whom"
    )
    parser.add_argument(
        "--half", type=int, choices=(1, 2), default=0, help="of --agentic: only the sessions of one half of the file"
    )
    parser.add_argument(
        "--uncounted",
        type=float,
        default=WARM_SECONDS / 60,
        help="of --agentic: the first minutes, which are not counted",
    )
    parser.add_argument(
        "--midway", action="store_true", help="of --agentic: the first sessions begin amid their requests"
    )
    parser.add_argument("--speed", type=float, default=1.0, help="of --agentic: all times are divided by it")
    parser.add_argument("--pool-tokens", type=tokens, help="a pool to replay the trace over, by policy; 500k, 2M")
    parser.add_argument("--policy", type=policies, default="lru", help=f"of --pool-tokens: {', '.join(POLICIES)}")
    parser.add_argument(
        "--store-tokens",
        type=tokens,
        default=0,
        help="of --pool-tokens: store what a prompt misses in such pieces, as an engine",
    )
    parser.add_argument(
        "--engine-tokens", type=tokens, default=0, help="of --pool-tokens: the cache of the engine in front of the pool"
    )
    parser.add_argument(
        "--store-mode", choices=MODES, help="of --engine-tokens: when the engine stores what it has; default: eager"
    )
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--admissions", type=lambda text: text.split(","), default=",".join(ADMISSIONS))
    parser.add_argument("--model", choices=MODELS, default="70b", help="bytes of a block, KV cache, prefill rate")
    parser.add_argument("--gpu", type=parse_size, help="KV cache of a node's engine")
    parser.add_argument("--pool", type=sizes, default="256GiB,512GiB,1TiB,2TiB")
    parser.add_argument("--disk", type=sizes, default="1TiB,2TiB,4TiB,8TiB,16TiB")
    parser.add_argument("--cluster", type=parse_size, default=str(2 * TiB), help="what each node gives to the cluster")
    parser.add_argument("--budget", type=sizes, default="5TB,20TB", help="bytes a day that may be written to a disk")
    parser.add_argument("--disk-read", type=float, default=6.5e9, help="bytes a second")
    parser.add_argument("--disk-write", type=float, default=3.5e9, help="bytes a second")
    parser.add_argument("--nodes", type=int, default=1, help="of all sections but fleet")
    parser.add_argument("--fleet", type=counts, default="8", help="numbers of nodes of the section fleet")
    parser.add_argument("--fleet-hours", type=float, default=3.0, help="of its generated trace")
    parser.add_argument("--hours", type=float, help=f"of the generated trace ({HOURS:g}) or of --agentic (4)")
    parser.add_argument("--rate", type=float, default=0.42, help="requests a second and node")
    parser.add_argument("--agents", type=float, default=0.5, help="their share of the requests")
    parser.add_argument("--returns", type=float, default=0.1, help="share of turns that come after hours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small sizes and short traces: that it works, not what")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="file for the results; - is stdout")
    parser.add_argument("--show", type=Path, help="print such a file again instead")
    parser.add_argument("--plot", type=Path, help="file; needs matplotlib")
    return parser


def simulate(options: argparse.Namespace) -> dict[str, Any]:
    if options.quick:
        options.hours, options.fleet_hours, options.fleet = 0.5, 0.1, [2]
        options.pool, options.disk, options.cluster = sizes("64GiB,128GiB"), sizes("256GiB,512GiB"), TiB
        options.budget, options.gpu = sizes("1TB"), options.gpu or 32 * GiB
    tasks = [task for task in plan(options) if options.only in (None, task.section)]
    rows: list[dict[str, Any]] = [{}] * len(tasks)
    began = time.monotonic()
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as processes:
        running = {processes.submit(run, task): number for number, task in enumerate(tasks)}
        for done, future in enumerate(as_completed(running), 1):
            number = running[future]
            rows[number] = future.result()
            took, so_far = rows[number]["cpu_seconds"], time.monotonic() - began
            print(f"{so_far:.0f} s: {done} of {len(tasks)}, {tasks[number].section}, {took:.0f} s", file=sys.stderr)
    traces = {}
    for source in () if options.only else dict.fromkeys(task.source for task in tasks):
        name = source.name if isinstance(source, Path) else f"generated, {json.dumps(dataclasses.asdict(source))}"
        traces[name] = statistics(load(source))
    return {"schema": 1, "model": options.model, "traces": traces, "rows": rows}


def refuse_mixtures(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Of options that exclude or need each other."""
    if options.log and (options.trace or options.agentic or options.pool_tokens is None):
        parser.error("--log needs --pool-tokens, and neither --trace nor --agentic")
    if options.agentic and (options.trace or options.sessions is None or options.pool_tokens is None):
        parser.error("--agentic needs --sessions and --pool-tokens, and no --trace")
    if options.half and not options.agentic:
        parser.error("--half needs --agentic")
    if options.engine_tokens and options.pool_tokens is None:
        parser.error("--engine-tokens needs --pool-tokens")
    if options.store_mode and not options.engine_tokens:
        parser.error("--store-mode needs --engine-tokens")
    if options.hints and not options.agentic:
        parser.error("--hints needs --agentic")
    if options.pool_tokens is None:
        return
    if options.plot or options.only:
        parser.error("--pool-tokens goes with neither --plot nor --only")
    if options.agentic and options.sessions < 1:
        parser.error("--sessions must be at least 1")
    if options.agentic and options.hours is not None and options.hours * 60 <= options.uncounted:
        parser.error(f"--hours must be more than {options.uncounted / 60:g}: --uncounted minutes are not counted")


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Policies over one pool, and what is possible. Raises BadFile: the trace is not what it should be."""
    if options.quick:
        options.hours = 0.75
    if options.agentic:
        hours = SessionReplay.hours if options.hours is None else options.hours
        source: Source = SessionReplay(
            options.agentic,
            options.sessions,
            hours,
            options.seed,
            options.half,
            options.hints,
            options.uncounted * 60,
            options.midway,
            options.speed,
        )
    else:
        source = Log(options.log) if options.log else options.trace or mix_of(options)
    uses = load_uses(source)  # here first: a file that is wrong is said once
    if options.pool_tokens < uses.block_tokens:
        raise BadFile(f"--pool-tokens is less than a block of {uses.block_tokens} tokens")
    model = MODELS[options.model]
    prefill = Prefill(model.prefill_rate, model.twice_at)
    names = [*options.policy, CLAIRVOYANT]
    tasks = [
        Task(
            source,
            name,
            options.pool_tokens,
            prefill,
            options.store_tokens,
            options.engine_tokens,
            options.store_mode or EAGER,
        )
        for name in names
    ]
    with ProcessPoolExecutor(min(options.jobs, len(tasks)), multiprocessing.get_context("spawn")) as processes:
        found = dict(zip(names, processes.map(run_policy, tasks), strict=True))
    best, block_bytes = found.pop(CLAIRVOYANT), model.block_bytes * uses.block_tokens // BLOCK_TOKENS
    return {
        "schema": 1,
        "model": options.model,
        "trace": uses.name,
        "pool_tokens": options.pool_tokens,
        "pool_bytes": options.pool_tokens // uses.block_tokens * block_bytes,
        "block_bytes": block_bytes,
        "policies": found,
        "clairvoyant": best["hits"],
        "best": best,
    }


def main() -> None:
    parser = arguments()
    options = parser.parse_args()
    refuse_mixtures(parser, options)
    try:
        if options.show:
            result = json.loads(options.show.read_text())
        elif options.pool_tokens is not None:
            result = compare(options)
        else:
            result = simulate(options)
    except BadFile as error:
        parser.error(str(error))
    to_stdout = options.json == Path("-")
    report.show(result, sys.stderr if to_stdout else None)
    if options.json:
        text = json.dumps(result, indent=1) + "\n"
        sys.stdout.write(text) if to_stdout else options.json.write_text(text)
    if options.plot:
        report.plot(result, options.plot)


if __name__ == "__main__":
    main()
