"""Answers under faults at random, each compared with that of an engine without a cache (`tests.sglang.oracle`)."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.marks import THOROUGH, long
from tests.sglang import oracle

ANSWERS = 5000 if THOROUGH else 300


@long
@pytest.mark.timeout(4 * 3600)
def test_no_answer_is_wrong_whatever_happens(tmp_path: Path) -> None:
    counts = oracle.run(ANSWERS, secrets.randbelow(10**6), tmp_path)
    # Else equal answers would say nothing about the daemon.
    assert counts["tokens from the daemon"] > 5 * ANSWERS
    assert counts["flushes"] > ANSWERS // 20


RIGHT = oracle.Expected((2, 3, 4), [5, 6, 7], [-0.5, -0.25, -1.0])


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": [5, 6, 8]}, {"chosen": [-0.5, -0.25, -1.1]}, {"tokens": [5]}, {"status": 503, "finish": "abort"}],
)
def test_the_oracle_sees_an_answer_that_is_wrong(tmp_path: Path, wrong: dict[str, Any]) -> None:
    right = {"tokens": [5, 6, 7, 9], "chosen": [-0.5, -0.25, -1.0, -2.0], "cached": 0, "host": 0, "retractions": 0}
    said = {**right, "status": 200, "finish": "length"}
    episode = oracle.Episode(oracle.Table([RIGHT.ids], {"full": [RIGHT]}), tmp_path, 0)
    episode.compare(RIGHT, {"tokens": 4}, said, judged=True)
    assert episode.counts["answers"] == 1
    with pytest.raises(AssertionError, match="after 1 answers"):
        episode.compare(RIGHT, {"tokens": 4}, {**said, **wrong}, judged=True)
