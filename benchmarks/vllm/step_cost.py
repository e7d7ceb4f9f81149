"""What both sides of the connector cost the engine's thread in a step, with vLLM's own block pool and a real daemon.

python -m benchmarks.vllm.step_cost --socket /run/kvsidecar/kvsidecar.sock [--blocks 512] [--requests 256] [--parts]

The daemon must be ready, on the host device, and is asked for blocks that are stored here first. Needs vLLM, no model
and no GPU. One thing after another, without a pause: an engine that has slept pays more for each, which
`benchmarks.vllm.hits` shows.

One row is a loop of Python alone, taken between the others: where its p90 is far above its p10, the core was shared
with somebody, and the other rows say as much about that as about the connector.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from vllm.v1.core.block_pool import BlockPool

from benchmarks.vllm.engine import ADDITIONS, add_up
from benchmarks.vllm.step_parts import Parts
from kvsidecar.client import Client, GroupLayout, HostBuffer, Namespace, Region, pack_ids
from kvsidecar.integrations.namespace_facts import EngineIdentity
from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.metadata import GroupBlocks, RankReport, StepPlan, StoreJob
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.integrations.vllm.ranks import Place
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from kvsidecar.integrations.vllm.shared import EngineFacts
from kvsidecar.integrations.vllm.worker import WorkerSide

NAMESPACE = Namespace("step-cost", "bfloat16", "LBNHC", 16, 1, 1, "sha256")
TOKENS, ROW_BYTES = 16, 4096
PYTHON = f"{ADDITIONS:,} additions in Python"
GROUP = Group(0, GroupKind.FULL, ("layer",), TOKENS, TOKENS, TOKENS)

_numbers = itertools.count()


class Request:
    """What the scheduler's side uses of vLLM's; a prompt of so many full blocks and one token."""

    num_output_placeholders = 0
    skip_reading_prefix_cache = False
    num_computed_tokens = 0
    trace_headers = None
    lora_request = None
    output_token_ids = ()

    def __init__(self, name: str, blocks: int) -> None:
        self.request_id = name
        self.num_tokens = self.num_prompt_tokens = blocks * TOKENS + 1
        self.block_hashes = [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(blocks)]


def step(**scheduled: int) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        preempted_req_ids=set(),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None] * len(scheduled)),
    )


def allocated(blocks: Sequence[Any]) -> Any:
    """As vLLM's ``KVCacheBlocks``."""
    return SimpleNamespace(blocks=(blocks,), get_block_ids=lambda: ([each.block_id for each in blocks],))


class Times:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def take(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        result = call(*args)
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def table(self) -> Table:
        percentiles = (10, 50, 90)
        table = Table(
            "in the engine's thread, µs", *(f"p{at}" for at in percentiles), title="The connector, both sides"
        )
        for name, seconds in self.seconds.items():
            table.add_row(name, *(f"{np.percentile(seconds, at) * 1e6:.0f}" for at in percentiles))
        return table


class Rank:
    """A worker's side with a buffer on the host."""

    def __init__(self, socket: str, blocks: int) -> None:
        buffer = HostBuffer(blocks * ROW_BYTES)
        layout = GroupLayout(0, blocks, 0, 1, (Region(0, 0, 0, ROW_BYTES, ROW_BYTES, 1),))
        self.client = Client(socket, timeout=60.0)
        self.side = WorkerSide(EngineIdentity(NAMESPACE, {}), "step-cost", Place(), lambda: self.client)
        self.side.register(RankMemory(buffer.kv_buffers(), (layout,)))
        if not self.side.wait_attached(60.0) or not self.client.wait_ready(60.0).ready:
            raise RuntimeError("the daemon is not ready")

    def step(self, orders: StepPlan) -> RankReport | None:
        """What vLLM's hooks call in a step."""
        self.side.bind(orders)
        self.side.submit_loads()
        self.side.submit_stores()
        self.side.poll()
        self.side.take_loads()
        report = self.side.take_report()
        self.side.take_transfers()
        self.side.submit_rest()
        return report

    def settle(self) -> RankReport:
        """Until the copies have ended: outside of what is timed."""
        found = RankReport()
        while self.client.outstanding:
            found = found.merged(self.step(StepPlan()) or RankReport())
        return found.merged(self.step(StepPlan()) or RankReport())


def measure(socket: str, rounds: int, blocks: int, requests: int, parts: Parts | None = None) -> Times:
    times, hit = Times(), Request("hit", blocks)
    rank = Rank(socket, 4 * blocks)
    stored = GroupBlocks(0, b"".join(hit.block_hashes), pack_ids(range(blocks)))
    attached = rank.step(StepPlan(stores=(StoreJob(1 << 30, (stored,)),)))
    rank.settle()
    client = Client(socket, timeout=60.0, step_budget=60.0)  # a daemon that is kept waiting is not one that hangs
    side = SchedulerSide(
        ConnectorOptions(lookup_budget=60.0, store_interval=1e-9),
        EngineFacts(NAMESPACE.hash_bytes, (GROUP,), 1),
        client,
    )
    side.take_namespace(NAMESPACE)
    pool = BlockPool(num_gpu_blocks=4 * blocks, enable_caching=True, hash_block_size=TOKENS)
    side.bind_block_pool(pool)
    client.lookup(NAMESPACE, {}, timeout=60.0)
    assert attached is not None
    side.take_report(attached)

    def both(scheduler_output: Any) -> Any:
        orders = side.build_plan(scheduler_output)
        report = rank.step(orders)
        side.begin_output(scheduler_output, ())
        if report is not None:
            side.take_report(report)
        side.end_output()
        return orders

    def busy(table: Any, tokens: int, scheduled: Any) -> None:
        side.update_state_after_alloc(hit, table, tokens)
        both(scheduled)

    decoding = [Request(f"decoding {i}", 8) for i in range(requests)]
    for request in decoding:
        side.update_state_after_alloc(request, allocated([]), 0)
        request.num_computed_tokens = 8 * TOKENS - 1
    for label, idle in (
        ("a step with nothing to do, no request", step()),
        (f"a step with nothing to do, {requests} requests", step(**{each.request_id: 1 for each in decoding})),
    ):
        both(idle)
        for _ in range(rounds):
            times.take(PYTHON, add_up)
            for _ in range(20):
                times.take(label, both, idle)

    for _ in range(rounds):
        new = Request(f"{os.getpid()} {next(_numbers)}", blocks)
        held = pool.get_new_blocks(blocks)
        for block, block_hash in zip(held, new.block_hashes, strict=True):
            key = block_hash + bytes(4)
            block.set_block_hash(key)
            pool.cached_block_hash_to_block.insert(key, block)
        side.update_state_after_alloc(new, allocated(held), 0)
        new.num_computed_tokens = blocks * TOKENS
        times.take(PYTHON, add_up)
        both(step())  # the budget for questions is full again
        tokens, _ = times.take(f"lookup of {blocks} blocks", side.get_num_new_matched_tokens, hit, 0)
        if tokens != blocks * TOKENS:
            raise RuntimeError(f"the daemon has {tokens} of {blocks * TOKENS} tokens; is its pool large enough?")
        arguments = allocated(held), tokens, step(**{new.request_id: 1})
        with parts.step() if parts is not None else nullcontext():
            times.take(f"a step with one store and one load of {blocks} blocks", busy, *arguments)
        times.take("the end of both", side.take_report, rank.settle())
        side.request_finished(new)
        side.request_finished(hit)
        pool.free_blocks(held)
    side.shutdown()
    rank.side.unregister()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--parts", action="store_true", help="what of the step takes how long; it all takes longer then"
    )
    args = parser.parse_args()
    parts = Parts() if args.parts else None
    console = Console(width=120)
    console.print(measure(args.socket, args.rounds, args.blocks, args.requests, parts).table())
    if parts is not None:
        console.print(parts.table())


if __name__ == "__main__":
    main()
