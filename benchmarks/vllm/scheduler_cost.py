"""What the connector's scheduler side costs the engine's thread in a step, with vLLM's own block pool and a daemon.

python -m benchmarks.vllm.scheduler_cost --socket /run/kvsidecar/kvsidecar.sock [--blocks 512] [--requests 256]

The daemon must be ready, and is asked for blocks that are stored here first. Needs vLLM, no model and no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from vllm.v1.core.block_pool import BlockPool

from kvsidecar.client import Blocks, Client, GroupLayout, HostBuffer, Namespace, Region
from kvsidecar.integrations.vllm.groups import Group, Kind
from kvsidecar.integrations.vllm.metadata import RankReport
from kvsidecar.integrations.vllm.options import Options
from kvsidecar.integrations.vllm.scheduler import SchedulerSide

NAMESPACE = Namespace("scheduler-cost", "bfloat16", "LBNHC", 16, 1, 1, "sha256")
TOKENS, ROW_BYTES = 16, 4096
GROUP = Group(0, Kind.FULL, ("layer",), TOKENS, TOKENS, TOKENS)


class Request:
    """What the scheduler's side uses of vLLM's; a prompt of so many full blocks and one token."""

    num_output_placeholders = 0
    skip_reading_prefix_cache = False
    num_computed_tokens = 0

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


def allocated(ids: Sequence[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (ids,))


class Times:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def take(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        result = call(*args)
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def table(self) -> Table:
        table = Table("in the engine's thread", "p50 µs", "p90 µs", title="Scheduler's side of the connector")
        for name, seconds in self.seconds.items():
            table.add_row(name, *(f"{np.percentile(seconds, at) * 1e6:.0f}" for at in (50, 90)))
        return table


def store_prompt(socket: str, request: Request) -> Client:
    """As an engine does, so that there is something to hit. The client keeps the run's buffer attached."""
    count = len(request.block_hashes)
    client = Client(socket, timeout=60.0)
    buffer = HostBuffer(count * ROW_BYTES)
    layout = GroupLayout(0, count, 0, 1, (Region(0, 0, 0, ROW_BYTES, ROW_BYTES, 1),))
    client.attach(instance="scheduler-cost", namespace=NAMESPACE, buffers=buffer.kv_buffers(), groups=[layout])
    client.wait_ready(60.0)
    job = client.store([Blocks(0, request.block_hashes, range(count))])
    client.wait([job], 60.0)
    return client


def measure(socket: str, rounds: int, blocks: int, requests: int) -> Times:
    times, hit = Times(), Request("hit", blocks)
    rank = store_prompt(socket, hit)
    client = Client(socket, timeout=5.0, step_budget=1.0)
    side = SchedulerSide(Options(lookup_budget=1.0), NAMESPACE, (GROUP,), 1, client)
    pool = BlockPool(num_gpu_blocks=4 * blocks, enable_caching=True, hash_block_size=TOKENS)
    side.bind_block_pool(pool)
    client.lookup(NAMESPACE, {}, timeout=5.0)
    side.take_report(RankReport(attached={0: client.epoch}))

    decoding = [Request(f"decoding {i}", 8) for i in range(requests)]
    for request in decoding:
        side.update_state_after_alloc(request, allocated([]), 0)
        request.num_computed_tokens = 8 * TOKENS - 1
    for label, idle in (
        ("a step with nothing to do, no request", step()),
        (f"a step with nothing to do, {requests} requests", step(**{each.request_id: 1 for each in decoding})),
    ):
        side.build_orders(idle)
        for _ in range(20 * rounds):
            times.take(label, side.build_orders, idle)

    for i in range(rounds):
        new = Request(f"new {i}", blocks)
        held = pool.get_new_blocks(blocks)
        for block, block_hash in zip(held, new.block_hashes, strict=True):
            key = block_hash + bytes(4)
            block.set_block_hash(key)
            pool.cached_block_hash_to_block.insert(key, block)
        side.update_state_after_alloc(new, allocated([]), 0)
        new.num_computed_tokens = blocks * TOKENS
        side.build_orders(step())  # the budget for questions is full again
        tokens, _ = times.take(f"lookup of {blocks} blocks", side.get_num_new_matched_tokens, hit, 0)
        if tokens != blocks * TOKENS:
            raise RuntimeError(f"the daemon has {tokens} of {blocks * TOKENS} tokens; is its pool large enough?")
        table = allocated([block.block_id for block in held])
        label = f"load of {blocks} blocks: plan; the lease is another thread's"
        times.take(label, side.update_state_after_alloc, hit, table, tokens)
        label = f"store of {blocks} blocks: plan, and the step's orders"
        orders = times.take(label, side.build_orders, step(**{new.request_id: 1}))
        ((store,), (load,)) = orders.stores, orders.loads
        loaded, stored = RankReport(loaded={load.number: 1}), RankReport(stored={store.number: 1})
        times.take("end of the load", side.take_report, loaded)
        times.take("end of the store", side.take_report, stored)
        side.request_finished(new)
        side.request_finished(hit)
        pool.free_blocks(held)
    side.shutdown()
    rank.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--requests", type=int, default=256)
    args = parser.parse_args()
    Console(width=120).print(measure(args.socket, args.rounds, args.blocks, args.requests).table())


if __name__ == "__main__":
    main()
