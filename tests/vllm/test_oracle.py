"""Answers under faults at random, each compared with that of an engine without a cache (`tests.vllm.oracle`)."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.marks import THOROUGH, long
from tests.vllm import oracle

ANSWERS = 10_000 if THOROUGH else 300


@long
@pytest.mark.usefixtures("by_name")
@pytest.mark.timeout(8 * 3600)
@pytest.mark.parametrize("model", ["full", "hybrid"])
def test_no_answer_is_wrong_whatever_happens(tmp_path: Path, model: str) -> None:
    counts = oracle.run(ANSWERS, secrets.randbelow(10**6), tmp_path, model)
    # Else equal answers would say nothing about the daemon.
    assert counts["vllm:kvsidecar_loads of a"] + counts["vllm:kvsidecar_loads of b"] > ANSWERS // 20
    assert counts["vllm:num_preemptions of a"] + counts["vllm:num_preemptions of b"] > 0
    assert counts["resets"] > ANSWERS // 50


RIGHT = oracle.Expected((2, 3, 4), [5, 6, 7], [-0.5, -0.25, -1.0])


@pytest.mark.parametrize("wrong", [{"tokens": [5, 6, 8]}, {"chosen": [-0.5, -0.25, -1.1]}, {"tokens": [5]}])
def test_the_oracle_sees_an_answer_that_is_wrong(tmp_path: Path, wrong: dict[str, Any]) -> None:
    said = {"tokens": [5, 6, 7, 9], "chosen": [-0.5, -0.25, -1.0, -2.0], "cached": 0, "finish": "length"}
    episode = oracle.Episode(oracle.Table([RIGHT.ids], {"full": [RIGHT]}), tmp_path, 0)
    episode.compare(RIGHT, {"tokens": 4}, said, judged=True)
    assert episode.counts["answers"] == 1
    with pytest.raises(AssertionError, match="after 1 answers"):
        episode.compare(RIGHT, {"tokens": 4}, {**said, **wrong}, judged=True)
