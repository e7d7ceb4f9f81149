"""What requests say of when their prompts are used next."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import pytest

from kvsidecar.integrations.next_use import KEY, pause_after, said_in

TOOL = 7


@dataclass
class Counted:
    pauses: int = 0
    bad_pauses: int = 0


@pytest.mark.parametrize(
    ("said", "answer", "pause"),
    [
        ({"pause": "2min"}, [TOOL], 120.0),
        ({"pause": 120, "tool_pause": 5}, [1, 2], 120.0),
        ({"pause": 120, "tool_pause": 5}, [1, TOOL, 2], 5.0),
        ({"tool_pause": 5}, [1], None),
        ({"pause": 120, "over": True}, [TOOL], inf),
        ({"pause": 120, "over": False, "ttl": 600}, [], 120.0),
    ],
)
def test_a_request_says_when_its_prompt_is_used_next(said: Any, answer: list[int], pause: float | None) -> None:
    counters = Counted()
    assert pause_after(said_in({KEY: said, "another's": 5}), answer, counters, frozenset((TOOL,))) == pause
    assert counters == Counted(1, 0)


@pytest.mark.parametrize("params", [None, {}, [KEY], {KEY: None}, {KEY: {"ttl": 60}}, {KEY: ["pause"]}])
def test_most_requests_say_nothing(params: Any) -> None:
    counters = Counted()
    assert pause_after(said_in(params), [], counters, frozenset()) is None
    assert counters == Counted(0, 0)


@pytest.mark.parametrize(
    "said", [{"pause": 0}, {"pause": "soon"}, {"tool_pause": [5]}, {"over": 1}, {"pause": 10**400}]
)
def test_a_pause_that_cannot_be_read_is_ignored_and_counted(said: Any) -> None:
    counters = Counted()
    assert pause_after({**said, "ttl": 60}, [], counters, frozenset()) is None
    assert counters == Counted(1, 1)
