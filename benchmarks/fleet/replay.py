"""A trace over some nodes: which node takes which request, and what is counted."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.fleet.node import Hardware, Kept, Loop, Node
from benchmarks.fleet.trace import Request, Trace

DAY: Final = 86400.0
KNOWN_SHARE: Final = 0.5
"""A request goes where at least so much of its prompt went before; another one where there is the least to do."""
OVERLOAD: Final = 2.0
"""Unless that node has had so many times the mean of the tokens of late."""
OF_LATE: Final = 60.0
"""Seconds in which what a node has had to do decays."""
MANY_NODES: Final = 64
"""From so many on a replay takes minutes, and says how far it is."""
REPORT_SHARE: Final = 0.1
LEVELS: Final = ("gpu", "pool", "disk", "cluster")


class Router:
    """Sends prompts that continue each other to the same node, with overflow; or each one to any."""

    def __init__(self, nodes: int, num_blocks: int, affinity: bool, seed: int) -> None:
        self._affinity = affinity
        self._rng = np.random.default_rng(seed)
        self._node_of = np.full(num_blocks, -1, np.int32)
        self._load = np.zeros(nodes)
        self._at = 0.0

    def choose(self, request: Request) -> int:
        if not self._affinity:
            return int(self._rng.integers(len(self._load)))
        self._load *= math.exp((self._at - request.at) / OF_LATE)
        self._at = request.at
        node = int(np.argmin(self._load))
        known = np.flatnonzero(self._node_of[request.blocks] >= 0)
        if len(known) and known[-1] + 1 >= KNOWN_SHARE * len(request.blocks):
            wanted = int(self._node_of[request.blocks[known[-1]]])
            if self._load[wanted] <= OVERLOAD * (self._load.mean() + request.input_tokens):
                node = wanted
        self._load[node] += request.input_tokens
        self._node_of[request.blocks] = node
        return node


@dataclass(frozen=True)
class Case:
    """What is simulated.

    Args:
        warm_share: share of the trace's time after which it is counted.
    """

    hardware: Hardware
    nodes: int = 1
    affinity: bool = True
    warm_share: float = 0.25
    seed: int = 0


def replay(trace: Trace, case: Case) -> dict[str, Any]:
    """The case, what was counted, and what follows from that."""
    began, loop, counts = time.process_time(), Loop(), Counter[str]()
    hardware = case.hardware
    warm = case.warm_share * trace.seconds

    def count(name: str, number: float) -> None:
        if loop.now >= warm:
            counts[name] += number  # type: ignore[assignment]  # seconds are no whole number

    cluster = Kept(max(1, hardware.cluster_bytes // hardware.block_bytes)) if hardware.cluster_bytes else None
    nodes = [Node(hardware, loop, cluster, count) for _ in range(case.nodes)]
    router = Router(case.nodes, trace.num_blocks, case.affinity, case.seed)
    arriving, next_report = iter(trace.requests), [REPORT_SHARE]

    def arrive(request: Request) -> None:
        nodes[router.choose(request)].arrive(request)
        expect_next()

    def expect_next() -> None:
        if (request := next(arriving, None)) is not None:
            if case.nodes >= MANY_NODES and loop.now > next_report[0] * trace.seconds:
                next_report[0] += REPORT_SHARE
                print(f"{case.nodes} nodes: {loop.now / trace.seconds:.0%} replayed", file=sys.stderr, flush=True)
            loop.at(request.at, lambda: arrive(request))

    expect_next()
    loop.run()
    return {
        **dataclasses.asdict(case),
        "trace": trace.name,
        "counts": dict(counts),
        **_figures(counts, case, trace.seconds - warm),
        "cpu_seconds": time.process_time() - began,
    }


def _figures(counts: Counter[str], case: Case, seconds: float) -> dict[str, Any]:
    blocks, requests = max(1, counts["blocks"]), max(1, counts["requests"])
    node_days = case.nodes * max(seconds, 1e-9) / DAY
    hits = {level: counts[f"{level} hits"] / blocks for level in LEVELS}
    tiers = LEVELS[2:]
    size = case.hardware.block_bytes
    return {
        "hit_rate": sum(hits.values()),
        "hits": hits,
        "saved_seconds": counts["saved seconds"] / requests,
        "prefill_seconds": counts["prefill seconds"] / requests,
        "waited_seconds": counts["waited seconds"] / max(1, counts["waits"]),
        "not_worth": sum(counts[f"{tier} unfetched slower"] for tier in tiers) / blocks,
        "fetch_lost": sum(
            number for name, number in counts.items() if " unfetched " in name and not name.endswith(" slower")
        )
        / blocks,
        "written_a_day": {tier: counts[f"{tier} written"] * size / node_days for tier in tiers},
        "hits_a_write": sum(counts[f"{tier} hits"] for tier in tiers)
        / max(1, sum(counts[f"{tier} written"] for tier in tiers)),
    }
