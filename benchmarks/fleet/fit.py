"""How generated requests compare with those of the real traces that they follow."""

from __future__ import annotations

from typing import Final

import numpy as np

from benchmarks.fleet.node import Kept
from benchmarks.fleet.trace import Mix, Trace
from kvsidecar.cli.size.hits import packed
from kvsidecar.types import LookupMode

FITTED: Final = {"conversation": Mix(1, 12031 / 3600, agents=0.0), "agent": Mix(1, 23608 / 3600, agents=1.0)}
"""The rate of the trace that each kind of generated request follows."""
TARGETS: Final[dict[str, dict[str, float]]] = {
    "conversation": {
        "requests": 12031,
        "blocks_mean": 22.98,
        "input_mean": 12035,
        "input_p90": 27367,
        "cacheable": 0.38,
        "used_once": 0.74,
        "lru_10000": 0.224,
    },
    "agent": {"requests": 23608, "input_mean": 8596, "output_mean": 182, "cacheable": 0.59},
}
"""Of an hour of Mooncake's traces: of the conversation trace what `statistics` and `lru_hits` count, of the tool and
agent trace what is published."""


def lru_hits(trace: Trace, blocks: int) -> float:
    """The share of the blocks of all prompts that one cache of this size hits."""
    kept, hits, asked = Kept(blocks), 0, 0
    for request in trace.requests:
        hashes = packed(request.blocks)
        hits += kept.find(hashes, LookupMode.PREFIX).count(True)
        asked += len(request.blocks)
        if (grant := kept.reserve(hashes)) is not None:
            kept.cache.seal_all(grant)
    return hits / asked


def statistics(trace: Trace) -> dict[str, float]:
    """What is compared with the published figures. Shares of blocks."""
    inputs = np.array([request.input_tokens for request in trace.requests])
    uses = np.zeros(trace.num_blocks, np.int64)
    hits = 0
    for request in trace.requests:
        seen = uses[request.blocks] > 0
        hits += int(np.logical_and.accumulate(seen).sum()) if len(seen) else 0
        uses[request.blocks] += 1
    used = uses[uses > 0]
    return {
        "requests": len(trace.requests),
        "hours": trace.seconds / 3600,
        "blocks": len(used),
        "blocks_mean": int(uses.sum()) / len(trace.requests),
        "input_mean": float(inputs.mean()),
        "input_p90": float(np.percentile(inputs, 90)),
        "output_mean": float(np.mean([request.output_tokens for request in trace.requests])),
        "cacheable": hits / int(uses.sum()),
        "used_once": float((used == 1).mean()),
    }
