"""The fleet simulator: what it generates, and that its counts are those of the daemon's own decisions."""

from __future__ import annotations

import json
import lzma
import sys
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.fleet import __main__ as command
from benchmarks.fleet import cross_validate, prefetch
from benchmarks.fleet.cases import ADMISSIONS, SECTIONS, plan
from benchmarks.fleet.fit import FITTED, TARGETS, lru_hits, statistics
from benchmarks.fleet.node import Hardware
from benchmarks.fleet.policies import CLAIRVOYANT, POLICIES, Prefill
from benchmarks.fleet.policies import Task as PoolTask
from benchmarks.fleet.policies import replay as replay_pool
from benchmarks.fleet.replay import Case, Router, replay
from benchmarks.fleet.trace import Mix, Request, Trace, generate, read, uses_of
from kvsidecar.cache import eviction_rhythm
from kvsidecar.cli.size.agentic import PERSON_SECONDS, TOOL_SECONDS, SessionReplay, read_sessions, schedule
from kvsidecar.cli.size.hits import SimulatedPool
from kvsidecar.cli.size.json_lines import BadFile
from kvsidecar.cli.size.log import read_log
from kvsidecar.cli.size.uses import Uses, runs_of
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
    trace = generate(FITTED["conversation"])
    found = {**statistics(trace), "lru_10000": lru_hits(trace, 10_000)}
    for name, wanted in TARGETS["conversation"].items():
        assert found[name] == pytest.approx(wanted, rel=0.1), name


def test_generated_agents_have_the_published_means() -> None:
    found = statistics(generate(FITTED["agent"]))
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


def test_a_pool_of_one_policy_hits_what_is_counted_by_hand() -> None:
    """Four blocks, two prompts in turns. The oldest use goes first, of a prompt its tail: 0, 0, 2 and 1 hits. Who knows
    what comes keeps the first prompt whole and the head of the second one: 0, 0, 3 and 1. Who takes no block of one
    prompt for another that returns as soon has not even that head, as a step of an engine is stored whole or not."""
    uses = uses_of(trace_of((0, 1, 2), (3, 4), (0, 1, 2), (3, 4)), 0.0)
    assert shares(uses, 4 * 512) == {"lru": 0.3, "rhythm": 0.3, CLAIRVOYANT: 0.4}


@pytest.mark.parametrize(
    ("mode", "prompts", "hit", "stored"),
    [
        # Two prompts in turns, and room for one in the engine and one in the pool: if each is stored when it is
        # computed, both have the last one. If it is stored when the engine evicts it, all but the first two are hit;
        # the first prompt is not stored again when the engine evicts it once more: it was loaded.
        ("eager", ((0, 1), (2, 3), (0, 1), (2, 3)), 0, 8),
        ("lazy", ((0, 1), (2, 3), (0, 1), (2, 3)), 4, 4),
        ("eager", ((0, 1), (0, 1), (0, 1)), 4, 2),
        ("lazy", ((0, 1), (0, 1), (0, 1)), 4, 2),
    ],
)
def test_an_engine_in_front_of_the_pool_stores_eagerly_or_lazily(
    mode: str, prompts: tuple[tuple[int, ...], ...], hit: int, stored: int
) -> None:
    task = PoolTask(Path(), "lru", 2 * 512, Prefill(1.0, 1.0), engine_tokens=2 * 512, store_mode=mode)
    found = replay_pool(uses_of(trace_of(*prompts), 0.0), task)
    assert (found["hit_tokens"] // 512, found["stored_blocks"]) == (hit, stored)


def test_what_is_stored_in_pieces_and_touched_loses_its_tail_first() -> None:
    """As by an engine: of the second prompt 2 was stored last, and makes room for (7, 8) all the same."""
    uses = uses_of(trace_of((0, 1), (0, 1, 2), (7, 8), (0, 1, 2)), 0.0)
    assert shares(uses, 4 * 512)["lru"] == pytest.approx(4 / 10)
    assert shares(uses, 4 * 512, store_tokens=512)["lru"] == pytest.approx(4 / 10)


def test_of_a_prompt_that_is_declined_as_a_whole_the_head_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that takes a step of the engine, 16 blocks, at most, and nothing from block 32 on."""
    put = SimulatedPool.put

    def put_some(pool: SimulatedPool, hashes: bytes) -> Any:
        declined = len(hashes) > 16 * 16 or int.from_bytes(hashes[:8], "little") >= 32
        return None if declined else put(pool, hashes)

    monkeypatch.setattr(SimulatedPool, "put", put_some)
    uses = uses_of(trace_of(tuple(range(40)), tuple(range(40))), 0.0)
    assert shares(uses, 64 * 512)["lru"] == 32 / 80


def shares(uses: Uses, pool_tokens: int, **task: Any) -> dict[str, float]:
    """Hits of each policy."""
    prefill = Prefill(rate=1000.0, twice_at=1000.0)
    return {
        name: replay_pool(uses, PoolTask(Mix(1, 1), name, pool_tokens, prefill, **task))["hits"]
        for name in (*POLICIES, CLAIRVOYANT)
        if name in ("lru", CLAIRVOYANT) or not task
    }


def test_later_tokens_of_a_prompt_take_longer_to_compute() -> None:
    prefill = Prefill(rate=1000.0, twice_at=2000.0)
    assert prefill.seconds(2000) == 3.0
    assert prefill.seconds(2001) - prefill.seconds(2000) == pytest.approx(0.002, rel=1e-3)


def test_runs_spell_the_blocks_of_a_prompt() -> None:
    for numbers in ([], [7], [0, 1, 2, 9, 10, 4], [5, 4, 3], [3, 3]):
        runs = runs_of(np.array(numbers, np.int64))
        assert runs.numbers().tolist() == numbers
    assert runs_of(np.array([0, 1, 2, 9, 10])).lengths.tolist() == [3, 2]


# -- sessions of coding agents -------------------------------------------------------------------------------------

EXCERPT = Path(__file__).with_name("agentic_excerpt.jsonl")
"""Of the traces of github.com/callanjfox/kv-cache-tester, Apache-2.0."""


ONE_SESSION = ["--agentic", str(EXCERPT), "--sessions", "1"]


def session(*requests: list[Any], block: int = 64) -> str:
    return json.dumps({"id": "one", "block": block, "requests": requests}) + "\n"


def test_an_answer_is_stored_as_far_as_a_later_prompt_names_it(tmp_path: Path) -> None:
    """130 tokens with an answer of 70 are three whole blocks, of which the prompt has two. Another prompt, which does
    not continue the first one, comes between."""
    file = tmp_path / "sessions.jsonl"
    file.write_text(
        session([0, 130, 70, 0, 2.5, [0, 2]], [9, 70, 9, 4000, 1, [9, 1]], [20, 330, 9, 20, 1, [0, 2, 4, 3]])
    )
    uses = schedule(SessionReplay(file, 1, hours=0.2))
    first, answer, other, later = uses.uses[:4]
    blocks = [each.runs.numbers().tolist() for each in (first, answer, other, later)]
    assert blocks == [[0, 1], [4], [9], [0, 1, 4, 5, 6]]
    assert (first.tokens, answer.tokens, answer.depth) == (130, 0, 2)
    assert answer.at - first.at == pytest.approx(2.5)
    assert other.at - answer.at == pytest.approx(300.0)  # the longest pause that counts
    found = shares(replace(uses, uses=uses.uses[:4], warm=0.0), 64 * 10)
    assert found["lru"] == pytest.approx(3 * 64 / (130 + 70 + 330))
    assert found["lru"] == found[CLAIRVOYANT]


def test_at_the_end_of_each_request_it_may_be_said_what_comes(tmp_path: Path) -> None:
    file = tmp_path / "sessions.jsonl"
    file.write_text(
        session([0, 130, 70, 0, 2, [0, 2]], [9, 330, 9, 29, 1, [0, 2, 4, 3]], [20, 330, 9, 31, 1, [0, 2, 4, 3]])
    )
    silent, uses = (schedule(SessionReplay(file, 1, hours=0.2, hints=hints)).uses for hints in (False, True))
    assert {each.pause for each in silent} == {0.0}
    assert [(each.tokens, each.pause) for each in uses[:6]] == [
        (130, 0.0),
        (0, TOOL_SECONDS),
        (330, 0.0),
        (0, PERSON_SECONDS),
        (330, 0.0),
        (0, inf),
    ]
    assert uses[5].prompt.numbers().tolist() == [0, 1, 4, 5, 6]


def test_what_is_said_is_worth_hits_to_rhythm() -> None:
    silent, said = (
        shares(schedule(SessionReplay(EXCERPT, 4, hours=1.0, hints=hints)), 40_000) for hints in (False, True)
    )
    assert said["rhythm"] > silent["rhythm"] + 0.01
    assert said[CLAIRVOYANT] == silent[CLAIRVOYANT] > said["rhythm"]


def test_sessions_that_follow_each_other_share_nothing() -> None:
    uses = schedule(SessionReplay(EXCERPT, 3, hours=1.0))
    prompts = [each for each in uses.uses if each.tokens]
    assert [each.at for each in uses.uses] == sorted(each.at for each in uses.uses)
    assert len({int(each.runs.starts[0]) for each in prompts if len(each.runs.starts)}) > 3 * 7
    assert schedule(SessionReplay(EXCERPT, 3, hours=1.0, seed=1)).uses[0] != uses.uses[0]


def test_a_cold_start_amid_sessions_is_counted_from_when_it_is_said() -> None:
    usual = schedule(SessionReplay(EXCERPT, 3, hours=1.0))
    cold = schedule(SessionReplay(EXCERPT, 3, hours=0.1, warm_seconds=24.0, midway=True, speed=10.0))
    assert (usual.warm, cold.warm) == (1800.0, 24.0)
    assert max(each.at for each in cold.uses) < 360.0
    assert cold.uses[0].at == pytest.approx(usual.uses[0].at / 10)
    assert cold.uses[0].tokens != usual.uses[0].tokens
    fast = schedule(SessionReplay(EXCERPT, 3, hours=0.1, speed=10.0))
    assert [each.at * 10 for each in fast.uses] == pytest.approx([each.at for each in usual.uses])


def test_each_session_is_in_one_half() -> None:
    halves = [read_sessions(EXCERPT, half)[1] for half in (0, 1, 2)]
    sizes = [sorted(session.num_blocks for session in each) for each in halves]
    assert sizes[0] == sorted(sizes[1] + sizes[2])
    assert sizes[1]
    assert sizes[2]
    assert (
        schedule(SessionReplay(EXCERPT, 2, hours=0.2, half=1)).uses
        != schedule(SessionReplay(EXCERPT, 2, hours=0.2)).uses
    )


def test_a_setting_is_chosen_on_one_half_and_judged_on_the_other() -> None:
    """On half 1 "CLEARLY 2" is best, on half 2 "patience halved": neither is on the other. Of those in which all
    constants differ, two corners are."""
    of_half = {
        1: {"lru": 0.1, CLAIRVOYANT: 0.9, "CLEARLY 2": 0.5, "patience halved": 0.3, "corner 011": 0.45},
        2: {"lru": 0.2, CLAIRVOYANT: 0.8, "CLEARLY 2": 0.35, "patience halved": 0.6, "corner 100": 0.55},
    }
    names = (*cross_validate.SETTINGS, "lru", CLAIRVOYANT)
    found = {
        (seed, half, cell, name): of_half[half].get(name, 0.4) + more
        for seed, half, name in product((0, 1), (1, 2), names)
        for cell, more in (("1/1k", 0.01), ("2/1k", -0.03))
    }
    first, second, third, fourth = "\n".join(cross_validate.report(found, ("1/1k", "2/1k"))).split("\nof ")[1:]
    assert first.startswith("all settings: chosen by half 1: CLEARLY 2; best on half 2: patience halved")
    assert "1/1k      LRU 0.2100  shipped 0.4100  chosen 0.3600  best 0.6100  possible 0.8100" in first
    assert "mean      LRU 0.1900  shipped 0.3900  chosen 0.3400  best 0.5900  possible 0.7900" in first
    assert second.startswith("all settings: chosen by half 2: patience halved; best on half 1: CLEARLY 2")
    assert "mean      LRU 0.0900  shipped 0.3900  chosen 0.2900  best 0.4900  possible 0.8900" in second
    assert "differ: chosen by half 1: corner 011; best on half 2: corner 100" in third
    assert "mean      LRU 0.1900  shipped 0.3900  chosen 0.3900  best 0.5400  possible 0.7900" in third
    assert "differ: chosen by half 2: corner 100; best on half 1: corner 011" in fourth


def test_each_setting_differs_from_what_is_shipped_only_while_it_runs() -> None:
    before = dict(vars(eviction_rhythm))
    for name, constants in cross_validate.SETTINGS.items():
        different = [each for each, value in constants.items() if value != before[each]]
        assert len(different) == (0 if name == cross_validate.SHIPPED else len(constants)), name
    assert {len(constants) for constants in cross_validate.ALL_DIFFER.values()} == {5}
    found = {
        name: cross_validate.hits((0, 2, "4/40k", name), EXCERPT, 1.0)
        for name in (cross_validate.SHIPPED, "patience doubled", CLAIRVOYANT)
    }
    assert len(set(found.values())) == 3, found
    assert dict(vars(eviction_rhythm)) == before


def test_runs_that_the_file_has_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, few = tmp_path / "hits.json", (cross_validate.SHIPPED, "CLEARLY 2")
    settings = {name: cross_validate.SETTINGS[name] for name in few}
    monkeypatch.setattr(cross_validate, "SETTINGS", settings)
    monkeypatch.setattr(cross_validate, "GROUPS", {"of few": settings})
    options = ["--agentic", str(EXCERPT), "--cells", "2/20k", "--hours", "0.6", "--seeds", "3", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["cross_validate", *options])
    cross_validate.main()
    printed, rows = capsys.readouterr().out, json.loads(file.read_text())
    assert len(rows) == 2 * (len(few) + 2)
    assert all(0 < row[-1] < 1 for row in rows)
    lost, rows[0][-1] = rows.pop(), 0.987
    file.write_text(json.dumps(rows))
    cross_validate.main()
    assert json.loads(file.read_text()) == [*rows, lost]
    assert "0.9870" in capsys.readouterr().out
    assert "0.9870" not in printed


@pytest.mark.parametrize("pool_tokens", [10_000, 40_000, 100_000])
def test_no_policy_hits_more_than_one_that_knows_what_comes(pool_tokens: int) -> None:
    found = shares(schedule(SessionReplay(EXCERPT, 4, hours=1.0)), pool_tokens)
    best = found.pop(CLAIRVOYANT)
    assert all(0.05 < each < best < 0.9 for each in found.values()), found


def test_what_is_prefetched_is_hit_in_the_pool_instead_of_read() -> None:
    uses = schedule(SessionReplay(EXCERPT, 4, hours=1.0))
    found = {way: prefetch.Replay(uses, 40_000, way, ahead).run() for way, ahead in prefetch.WAYS}
    none, foreseen = found["none"], found["foreseen"]
    assert none.prefetched == 0 < found["predicted"].prefetched
    assert len({each.asked for each in found.values()}) == 1
    assert len({each.hit + each.read for each in found.values()}) == 1, "what the disk has is hit or read"
    assert foreseen.hit > none.hit
    assert foreseen.hit - none.hit <= foreseen.prefetched


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (session([0, 64, 1, 0, 0, [0, 1]]) + "{", "line 2: it is not JSON"),
        ("[]\n", "line 1: it is not a JSON object"),
        ('{"block": 64}\n', "line 1: there is no 'requests'"),
        ('{"block": 64, "requests": []}\n', "line 1: 'requests' must be a list of requests"),
        (session([0, 64, 1, 0, [0, 1]]), "line 1: a request is a list of 6"),
        (session([0, 64, 1, -1, 0, [0, 1]]), "line 1: a request begins with its time, tokens and seconds"),
        (session([0, 64, 1, 0, 0, [0]]), "line 1: runs are pairs"),
        (session([0, 64, 1, 0, 0, [0, 2]]), "line 1: 2 blocks of 64 tokens are more than the prompt's 64 tokens"),
        (session([0, 64, 1, 0, 0, [0, 1]]) + session([0, 64, 1, 0, 0, [0, 1]], block=32), "line 2: 'block'"),
        ("\xff", "after line 0"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sessions.jsonl"
    file.write_bytes(text.encode("latin-1"))
    agentic = ["--agentic", str(file), "--sessions", "1", "--pool-tokens", "1k"]
    monkeypatch.setattr(sys, "argv", ["fleet", *agentic])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    error = capsys.readouterr().err
    assert str(file) in error
    assert said in error


def test_a_trace_of_mooncake_that_is_wrong_is_refused_by_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": ["a"]}\n')
    with pytest.raises(BadFile, match=r"trace\.jsonl, line 1: 'hash_ids' must be a list of non-negative whole numbers"):
        read(file)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--agentic", str(EXCERPT)], "--agentic needs --sessions and --pool-tokens"),
        (["--agentic", str(EXCERPT), "--sessions", "0", "--pool-tokens", "1M"], "--sessions must be at least 1"),
        (
            ["--agentic", str(EXCERPT), "--sessions", "1", "--pool-tokens", "1M", "--hours", "0.5"],
            "--hours must be more",
        ),
        ([*ONE_SESSION, "--pool-tokens", "63"], "less than a block of 64 tokens"),
        (["--pool-tokens", "1M", "--policy", "lru,oldest"], "there is no policy 'oldest'; there is lru"),
        (["--hints"], "--hints needs --agentic"),
        (["--half", "1"], "--half needs --agentic"),
        (["--log", str(EXCERPT)], "--log needs --pool-tokens"),
        (["--pool-tokens", "1M", "--only", "disk"], "--pool-tokens goes with neither"),
        (["--engine-tokens", "1M"], "--engine-tokens needs --pool-tokens"),
        (["--pool-tokens", "1M", "--store-mode", "lazy"], "--store-mode needs --engine-tokens"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet", *options])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("compressed", [False, True])
def test_policies_are_compared_in_json_and_in_a_table(
    compressed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = EXCERPT
    if compressed:
        file = tmp_path / "sessions.jsonl.xz"
        file.write_bytes(lzma.compress(EXCERPT.read_bytes()))
    agentic = ["--agentic", str(file), "--sessions", "2", "--pool-tokens", "20k", "--hours", "0.6"]
    monkeypatch.setattr(sys, "argv", ["fleet", *agentic, "--policy", "lru", "--json", "-"])
    command.main()
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert 0 < result["policies"]["lru"]["hits"] < result["clairvoyant"] < 1
    saved = (result["policies"]["lru"]["saved_seconds"], result["best"]["saved_seconds"])
    assert 0 < saved[0] < saved[1] < result["best"]["prefill_seconds"]
    assert f"{result['clairvoyant']:.3f}" in printed.err


def test_a_generated_trace_is_replayed_by_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    pool = ["--pool-tokens", "500k", "--hours", "0.1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["fleet", *pool])
    command.main()
    result = json.loads(file.read_text())
    assert result["policies"]["lru"]["hits"] <= result["clairvoyant"]
    monkeypatch.setattr(sys, "argv", ["fleet", "--show", str(file)])
    printed = capsys.readouterr().out
    command.main()
    assert capsys.readouterr().out == printed


# -- logs of requests ----------------------------------------------------------------------------------------------

VLLM_LINE = (
    "(APIServer pid=7) DEBUG {at} [entrypoints/.../utils/request_logger.py:55] Request cmpl-1 details: prompt: "
    "'12-31 00:00:00 [prompt_token_ids: [9, 9]', prompt_token_ids: {ids}, prompt_embeds shape: None.\n"
)


def test_prompts_of_a_log_of_vllm_are_read(tmp_path: Path) -> None:
    """Past the end of a year. Of the second prompt the first block is the same, and so is the second one's content,
    which stands behind another block then."""
    first, second = [1] * 64 + [2] * 64 + [3], [1] * 64 + [4] * 64 + [2] * 64
    file = tmp_path / "vllm.log"
    file.write_text(
        "INFO 12-31 23:59:00 [api_server.py:1] started\n"
        + VLLM_LINE.format(at="12-31 23:59:58", ids=first)
        + "(APIServer pid=7) INFO 12-31 23:59:58 [request_logger.py:65] Received request cmpl-1: params: None.\n"
        + VLLM_LINE.format(at="01-01 00:00:03", ids=second)
    )
    uses = read_log(file)
    assert [(each.at, each.tokens, each.runs.numbers().tolist()) for each in uses.uses] == [
        (0.0, 129, [0, 1]),
        (5.0, 192, [0, 2, 3]),
    ]
    assert uses.num_blocks == 4


def test_prompts_of_a_log_of_a_gateway_are_read(tmp_path: Path) -> None:
    file = tmp_path / "gateway.jsonl"
    rows: list[dict[str, Any]] = [
        {"timestamp": 1_800_000_001_500, "input_tokens": 40, "block_tokens": 16, "hash_ids": ["a", "b", "c"]},
        {"timestamp": "2027-01-15T08:00:00Z", "input_tokens": 16, "block_tokens": 16, "hash_ids": ["a"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    uses = read_log(file)
    assert (uses.block_tokens, [each.at for each in uses.uses]) == (16, [0.0, 1.5])
    assert [each.runs.numbers().tolist() for each in uses.uses] == [[0], [0, 1]]
    assert shares(replace(uses, warm=0.0), 160) == dict.fromkeys((*POLICIES, CLAIRVOYANT), 16 / 56)
    file.write_text(json.dumps({"timestamp": 1.0, "prompt_token_ids": [5] * 130}) + "\n")
    assert [each.tokens for each in read_log(file).uses] == [130]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("INFO nothing\n", "there is no prompt; vLLM logs them with"),
        ('{"timestamp": 1, "hash_ids": []}\n', "line 1: there is no 'block_tokens'"),
        ('{"timestamp": "noon", "prompt_token_ids": [1]}\n', "line 1: 'timestamp' must be"),
        ('{"timestamp": 1, "prompt_token_ids": ["a"]}\n', "line 1: 'prompt_token_ids' must be"),
        ('{"timestamp": 1, "block_tokens": 0, "input_tokens": 1, "hash_ids": []}\n', "line 1: 'block_tokens'"),
        (
            '{"timestamp": 1, "prompt_token_ids": [1]}\n'
            '{"timestamp": 1, "block_tokens": 8, "input_tokens": 8, "hash_ids": [1]}\n',
            "line 2: its blocks are made from hashes, those before from tokens",
        ),
    ],
)
def test_a_log_that_is_wrong_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "requests.log"
    file.write_text(text)
    with pytest.raises(BadFile) as refused:
        read_log(file)
    assert str(file) in str(refused.value)
    assert said in str(refused.value)


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
