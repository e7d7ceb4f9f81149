"""The fleet simulator: what it generates, and that its counts are those of the daemon's own decisions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.fleet import __main__ as command
from benchmarks.fleet.cases import ADMISSIONS, SECTIONS, plan
from benchmarks.fleet.fit import FITTED, TARGETS, lru_hits, statistics
from benchmarks.fleet.node import Hardware
from benchmarks.fleet.replay import Case, Router, replay
from benchmarks.fleet.trace import Mix, Request, Trace, generate, read
from kvsidecar.support.units import GiB, MiB, TiB

SMALL = Mix(hours=0.2, rate=0.42, returns=0.3)


def trace_of(*prompts: tuple[int, ...], seconds: float = 100.0) -> Trace:
    """Prompts of these blocks, one after the other."""
    requests = [Request(seconds * i, 512 * len(each), 1, np.array(each)) for i, each in enumerate(prompts)]
    return Trace("by hand", requests, 1 + max(max(each) for each in prompts))


def hits(trace: Trace, pool_blocks: int = 4, **hardware: Any) -> dict[str, float]:
    """Blocks that were hit, by level. The GPU has two blocks; to compute one takes 5 seconds."""
    case = Case(Hardware(MiB, 2 * MiB, pool_blocks * MiB, prefill_rate=100.0, **hardware), warm_share=0.0)
    counts = replay(trace, case)["counts"]
    assert counts["blocks"] == counts["misses"] + sum(counts.get(f"{level} hits", 0) for level in LEVELS)
    return {level: counts.get(f"{level} hits", 0) for level in LEVELS}


LEVELS = ("gpu", "pool", "disk", "cluster")
BY_HAND = trace_of(
    (0, 1),
    (0, 1),  # hits the GPU
    (2, 3),  # takes the place of the first prompt in the GPU
    (0, 1),  # hits the pool: its second use
    (4, 5),  # takes the place of (2, 3) in the pool
    (6, 7),  # takes that of (0, 1)
    (0, 1),  # on a disk if it was written at its second use, or before
    (2, 3),  # on a disk only if every block is written
)


@pytest.mark.parametrize(
    ("admission", "expected"),
    [("none", (2, 2, 0)), ("second_use", (2, 2, 2)), ("all", (2, 2, 4))],
)
def test_hits_by_level_are_those_counted_by_hand(admission: str, expected: tuple[int, ...]) -> None:
    found = hits(BY_HAND, disk_bytes=64 * MiB, admission=admission)
    assert tuple(found[level] for level in ("gpu", "pool", "disk")) == expected


def test_on_evict_writes_what_the_pool_has_used_longest_ago() -> None:
    """Two of eight blocks are kept free: (2, 3) make room behind (6, 7)."""
    found = hits(BY_HAND, pool_blocks=8, disk_bytes=64 * MiB, admission="on_evict")
    assert (found["gpu"], found["pool"], found["disk"]) == (2, 4, 2)


def test_a_disk_that_is_full_forgets_what_was_used_longest_ago() -> None:
    assert hits(BY_HAND, disk_bytes=2 * MiB, admission="all")["disk"] == 0


def test_what_is_computed_sooner_than_read_is_not_fetched() -> None:
    slow = {"disk_bytes": 64 * MiB, "admission": "all", "disk_read": MiB / 6}
    assert hits(BY_HAND, **slow)["disk"] == 0


def test_nodes_share_blocks_by_the_cluster_only() -> None:
    """Two prompts, each of which goes to one node first and to the other one then."""
    hardware = Hardware(MiB, 2 * MiB, 4 * MiB, cluster_bytes=64 * MiB, admission="all", prefill_rate=100.0)
    trace = trace_of(*[(0, 1)] * 8)
    case = Case(hardware, nodes=2, affinity=False, warm_share=0.0)
    router = Router(2, trace.num_blocks, affinity=False, seed=case.seed)
    assert len({router.choose(each) for each in trace.requests}) == 2
    counts = replay(trace, case)["counts"]
    assert (counts["misses"], counts["cluster hits"], counts["gpu hits"]) == (2, 2, 12)


def test_a_router_with_affinity_sends_what_continues_a_prompt_to_its_node() -> None:
    router = Router(4, 8, affinity=True, seed=0)
    first, other, more = trace_of((0, 1), (2, 3), (0, 1, 4)).requests
    assert router.choose(first) == router.choose(more) != router.choose(other)


def test_more_is_hit_and_more_is_written_the_more_a_tier_is_given() -> None:
    trace = generate(SMALL)
    hardware = {"block_bytes": 160 * MiB, "gpu_bytes": 16 * GiB, "pool_bytes": 32 * GiB, "disk_bytes": TiB}
    rows = {
        each: replay(trace, Case(Hardware(**hardware, admission=each, disk_read=50e9, prefill_rate=1e4)))
        for each in ("none", *ADMISSIONS)
    }
    hit, written = ({name: row[key] for name, row in rows.items()} for key in ("hit_rate", "written_a_day"))
    assert hit["none"] < hit["second_use"] < min(hit["all"], hit["on_evict"])
    assert 0 == written["none"]["disk"] < written["second_use"]["disk"] < written["on_evict"]["disk"]
    assert written["on_evict"]["disk"] <= written["all"]["disk"]


def test_a_thousand_nodes() -> None:
    trace = generate(Mix(hours=0.005, rate=100.0))
    hardware = Hardware(160 * MiB, 16 * GiB, 16 * GiB, cluster_bytes=TiB, admission="all")
    row = replay(trace, Case(hardware, nodes=1000, warm_share=0.0))
    assert row["counts"]["requests"] == len(trace.requests) > 1000
    assert 0 < row["hit_rate"] < 1


def test_a_replay_gives_the_same_again() -> None:
    case = Case(Hardware(160 * MiB, 16 * GiB, 32 * GiB, disk_bytes=TiB), nodes=3, affinity=False)
    first, second = (replay(generate(SMALL), case) for _ in range(2))
    assert first["counts"] == second["counts"]


# -- traces --------------------------------------------------------------------------------------------------------


def test_the_seed_decides_what_is_generated() -> None:
    def lines(seed: int) -> list[tuple[float, int, list[int]]]:
        trace = generate(Mix(0.1, 1.0, seed=seed))
        return [(each.at, each.input_tokens, each.blocks.tolist()) for each in trace.requests]

    assert lines(1) == lines(1) != lines(2)


def test_generated_conversations_are_like_those_of_the_real_trace() -> None:
    trace, target = generate(FITTED["conversation"]), TARGETS["conversation"]
    found = {**statistics(trace, curve=False), "lru_10000": lru_hits(trace, 10_000)}
    for name in ("requests", "blocks_mean", "input_mean", "input_p90", "cacheable", "used_once", "lru_10000"):
        assert found[name] == pytest.approx(target[name], rel=0.1), name


def test_generated_agents_have_the_published_means() -> None:
    found = statistics(generate(FITTED["agent"]), curve=False)
    for name, target in TARGETS["agent"].items():
        assert found[name] == pytest.approx(target, rel=0.15), name


def test_a_file_of_mooncake_is_read_without_blocks_that_are_not_full(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 2000, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]},
        {"timestamp": 500, "input_length": 512, "output_length": 4, "hash_ids": [7]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read(file)
    assert [(each.at, each.blocks.tolist()) for each in trace.requests] == [(0.5, [0]), (2.0, [0, 1])]
    assert lru_hits(trace, 8) == pytest.approx(1 / 3)


# -- the command ---------------------------------------------------------------------------------------------------


def test_each_section_has_cases() -> None:
    options = command.arguments().parse_args([])
    assert {task.section for task in plan(options)} == set(SECTIONS)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a row for each section that is drawn."""
    tasks = [task for task in plan(command.arguments().parse_args([])) if task.section in ("pool", "disk")]
    file = tmp_path_factory.mktemp("fleet") / "result.json"
    short = generate(Mix(hours=0.05, rate=0.42))
    file.write_text(json.dumps({"rows": [{"section": task.section, **replay(short, task.case)} for task in tasks]}))
    return file


def test_results_are_printed(result: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet", "--show", str(result)])
    command.main()
    printed = capsys.readouterr().out
    for row in json.loads(result.read_text())["rows"]:
        assert f"{row['hit_rate']:.1%}" in printed


def test_results_are_drawn(result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["fleet", "--show", str(result), "--plot", str(tmp_path / "plot.svg")])
    command.main()
    assert b"<svg" in (tmp_path / "plot.svg").read_bytes()
