"""What files of every format hit in pools of several sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsidecar.cli.size.hits import hit_rate, most_hits, read
from kvsidecar.cli.size.json_lines import BadFile
from kvsidecar.types import Eviction
from tests.cli.size.support import alternating
from tests.marks import long

EXCERPT = Path("tests/benchmarks/agentic_excerpt.jsonl")


def test_a_trace_hits_what_the_pool_has_room_for(tmp_path: Path) -> None:
    uses = read(alternating(tmp_path / "trace.jsonl"), 1)
    total = sum(use.tokens for use in uses.uses) // 512
    best = pytest.approx(1 - 2 * 49 / total)
    assert hit_rate(uses, 200 * 512) == best == most_hits(uses), "every block but the first time"
    assert hit_rate(uses, 45 * 512) < 0.1, "each session evicts the other"
    assert 0.1 < hit_rate(uses, 80 * 512) < most_hits(uses) - 0.1, "most of both sessions stay"
    assert hit_rate(uses, 45 * 512, Eviction.RHYTHM) > 0.3, "one of them stays"


@long
def test_recorded_sessions_run_so_many_at_once() -> None:
    few, many = read(EXCERPT, 2), read(EXCERPT, 6)
    assert len(many.uses) > 2 * len(few.uses)
    assert (few.block_tokens, few.warm) == (64, 1800)
    assert 0 < hit_rate(few, 100_000) <= most_hits(few) < 1
    assert hit_rate(many, 100_000) < hit_rate(few, 100_000)


def test_anything_else_is_a_log(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    lines = [{"timestamp": at, "prompt_token_ids": [7] * 128} for at in range(5)]
    file.write_text("a line of something else\n" + "".join(json.dumps(line) + "\n" for line in lines))
    assert most_hits(read(file, 1)) == hit_rate(read(file, 1), 1000) == 1.0, "what comes first is not counted"
    file.write_text("nothing\n")
    with pytest.raises(BadFile, match="there is no prompt"):
        read(file, 1)
