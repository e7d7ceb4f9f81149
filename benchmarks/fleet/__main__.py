"""What hit rate and how many saved seconds of prefill a pool, a disk and a cluster tier bring, by admission.

    python -m benchmarks.fleet [--quick] [--json FILE] [--plot FILE.svg]
    python -m benchmarks.fleet --trace conversation_trace.jsonl --nodes 8 --fleet 8
    python -m benchmarks.fleet --only fleet --fleet 1000 --fleet-hours 0.1 --gpu 96GiB --pool 128GiB --admissions all
    python -m benchmarks.fleet --fit [--trace conversation_trace.jsonl]
    python -m benchmarks.fleet --show FILE [--plot FILE.svg]

The trace is generated, unless a file in the format of Mooncake's traces is named: an object a line with timestamp
(ms), input_length, output_length and hash_ids of 512 tokens each. Sizes and rates are those of one node. No GPU, disk
or network is used: the daemon's code decides, and times follow from the rates given.
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
from benchmarks.fleet.cases import ADMISSIONS, MODELS, SECTIONS, load, plan, run
from benchmarks.fleet.fit import fit, statistics
from kvsidecar.support.units import GiB, TiB, parse_size


def sizes(text: str) -> list[int]:
    return [parse_size(each) for each in text.split(",")]


def counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a file to replay instead of a generated trace")
    parser.add_argument("--fit", action="store_true", help="only compare generated requests with what they follow")
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
    parser.add_argument("--hours", type=float, default=12.0, help="of the generated trace")
    parser.add_argument("--rate", type=float, default=0.42, help="requests a second and node")
    parser.add_argument("--agents", type=float, default=0.5, help="their share of the requests")
    parser.add_argument("--returns", type=float, default=0.1, help="share of turns that come after hours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small sizes and short traces: that it works, not what")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="file for the results")
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
        traces[name] = statistics(load(source), curve=False)
    return {"schema": 1, "model": options.model, "traces": traces, "rows": rows}


def main() -> None:
    options = arguments().parse_args()
    if options.show:
        result = json.loads(options.show.read_text())
    else:
        result = {"schema": 1, "fit": fit(options.trace), "rows": []} if options.fit else simulate(options)
    report.show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        report.plot(result, options.plot)


if __name__ == "__main__":
    main()
