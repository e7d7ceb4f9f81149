"""Recorded sessions as AIPerf reads them."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from benchmarks.vllm.aiperf import CONTEXT, command_of, weka_trace, write_traces
from kvsidecar.cli.size.agentic import read_sessions

EXCERPT = Path("tests/benchmarks/agentic_excerpt.jsonl")


def options(**given: object) -> Namespace:
    return Namespace(**{"trace": EXCERPT, "block_tokens": 1, "speed": 10.0, "sessions": 3, **given})


def test_a_session_keeps_its_blocks_and_its_pauses_are_shorter() -> None:
    _, (session, *_) = read_sessions(EXCERPT)
    trace = weka_trace("s", session, 2, 10.0, 1 << 30)
    assert trace is not None
    assert (trace["block_size"], trace["hash_id_scope"], len(trace["requests"])) == (2, "local", len(session.requests))
    first, second = trace["requests"][:2]
    assert first["t"] == 0
    assert len(first["hash_ids"]) * 2 == first["in"]
    assert second["hash_ids"][: len(first["hash_ids"])] == first["hash_ids"]
    recorded = session.requests[:2]
    assert second["think_time"] == round(recorded[1].think / 10, 3)
    assert second["t"] == round((recorded[0].api + recorded[1].think) / 10, 3)


def test_a_session_ends_before_a_prompt_that_is_too_long() -> None:
    _, (session, *_) = read_sessions(EXCERPT)
    longest = max(int(each.runs.lengths.sum()) for each in session.requests)
    whole, cut = weka_trace("s", session, 1, 1.0, longest), weka_trace("s", session, 1, 1.0, longest - 1)
    assert whole is not None
    assert cut is not None
    assert 0 < len(cut["requests"]) < len(whole["requests"]) == len(session.requests)
    assert weka_trace("s", session, 1, 1.0, 1) is None


def test_each_session_is_a_file_for_the_loader(tmp_path: Path) -> None:
    written = write_traces(options(), tmp_path / "traces")
    files = sorted((tmp_path / "traces").iterdir())
    assert len(files) == written == 3
    for file in files:
        trace = json.loads(file.read_text())
        assert trace["id"] == file.stem
        assert max(each["in"] for each in trace["requests"]) < CONTEXT
    command = command_of(
        options(aiperf="aiperf", concurrency=2, seconds=5, more=["--ui", "simple"]), "http://x", tmp_path / "traces",
        tmp_path / "out",
    )  # fmt: skip
    assert command[:2] == ["aiperf", "profile"]
    assert command[command.index("--custom-dataset-type") + 1] == "weka_trace"
    assert command[-2:] == ["--ui", "simple"]
