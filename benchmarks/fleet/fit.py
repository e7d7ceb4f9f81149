"""How generated requests compare with those of the real traces that they follow."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.fleet.node import Kept, pack
from benchmarks.fleet.trace import Mix, Trace, generate, read
from kvsidecar.types import LookupMode

FITTED: Final = {"conversation": Mix(1, 12031 / 3600, agents=0.0), "agent": Mix(1, 23608 / 3600, agents=1.0)}
"""The rate of the trace that each kind of generated request follows."""
CURVE: Final = (1000, 3000, 10_000, 30_000, 100_000)
"""Blocks of the caches whose hits `statistics` counts."""
TARGETS: Final[dict[str, dict[str, float]]] = {
    "conversation": {
        "requests": 12031,
        "blocks_mean": 22.98,
        "input_mean": 12035,
        "input_p50": 6909,
        "input_p90": 27367,
        "output_mean": 343,
        "cacheable": 0.38,
        "used_once": 0.74,
        "used_10": 0.008,
        "reuse_p50": 114,
        "reuse_p90": 519,
        "lru_1000": 0.047,
        "lru_3000": 0.070,
        "lru_10000": 0.224,
        "lru_30000": 0.344,
        "lru_100000": 0.380,
    },
    "agent": {"requests": 23608, "input_mean": 8596, "output_mean": 182, "cacheable": 0.59},
}
"""Of an hour of Mooncake's traces: of the conversation trace what `statistics` counts, of the
tool and agent trace what is published."""


def fit(trace: Path | None) -> dict[str, dict[str, dict[str, float]]]:
    """The statistics of an hour of each kind of generated request, beside those of the traces that they follow.

    Args:
        trace: a file whose statistics stand beside those of the conversations.
    """
    found = {name: {"published": TARGETS[name], "generated": statistics(generate(mix))} for name, mix in FITTED.items()}
    if trace is not None:
        found["conversation"][trace.stem] = statistics(read(trace))
    return found


def lru_hits(trace: Trace, blocks: int) -> float:
    """The share of the blocks of all prompts that one cache of this size hits."""
    kept, hits, asked = Kept(blocks), 0, 0
    for request in trace.requests:
        hashes = pack(request.blocks)
        hits += kept.find(hashes, LookupMode.PREFIX).count(True)
        asked += len(request.blocks)
        if (grant := kept.reserve(hashes)) is not None:
            kept.cache.seal_all(grant)
    return hits / asked


def statistics(trace: Trace, *, curve: bool = True) -> dict[str, float]:
    """What is compared with the published figures. Shares of blocks; reuse: seconds since a block's last use."""
    inputs = np.array([request.input_tokens for request in trace.requests])
    uses = np.zeros(trace.num_blocks, np.int64)
    last = np.full(trace.num_blocks, -np.inf)
    hits, gaps = 0, []
    for request in trace.requests:
        blocks = request.blocks
        seen = uses[blocks] > 0
        hits += int(np.logical_and.accumulate(seen).sum()) if len(seen) else 0
        gaps.append(request.at - last[blocks[seen]])
        uses[blocks] += 1
        last[blocks] = request.at
    used, reuse = uses[uses > 0], np.concatenate(gaps)
    return {
        "requests": len(trace.requests),
        "hours": trace.seconds / 3600,
        "blocks": len(used),
        "blocks_mean": int(uses.sum()) / len(trace.requests),
        "input_mean": float(inputs.mean()),
        "input_p50": float(np.percentile(inputs, 50)),
        "input_p90": float(np.percentile(inputs, 90)),
        "output_mean": float(np.mean([request.output_tokens for request in trace.requests])),
        "cacheable": hits / int(uses.sum()),
        "used_once": float((used == 1).mean()),
        "used_10": float((used >= 10).mean()),
        "reuse_p50": float(np.percentile(reuse, 50)),
        "reuse_p90": float(np.percentile(reuse, 90)),
        **{f"lru_{size}": lru_hits(trace, size) for size in (CURVE if curve else ())},
    }
