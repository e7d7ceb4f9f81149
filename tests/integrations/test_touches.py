"""Blocks of a request that has ended are used once more, when its last ones are stored."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import pytest

from kvsidecar.client.types import NO_ANSWER
from kvsidecar.errors import ClientError
from kvsidecar.integrations.vllm import touches
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from tests.integrations.engine import (
    EPOCH,
    Allocated,
    Clock,
    Request,
    Step,
    TinyDaemon,
    TinyPool,
    attached,
    full,
    group,
    run,
)


@dataclass(eq=False)
class Said(Request):
    """As vLLM's request."""

    kv_transfer_params: Any = None


def ended(count: int) -> tuple[SchedulerSide, TinyDaemon, Clock, list[Request]]:
    """Requests that have ended."""
    pool, daemon, clock = TinyPool(64), TinyDaemon(), Clock()
    made = attached(pool=pool, daemon=daemon, clock=clock)
    requests = [Request(f"r{number}", list(range(9 + 4 * number))) for number in range(count)]
    for request in requests:
        run(made, pool, request, 8)
        made.request_finished(request)
    return made, daemon, clock, requests


def later(made: SchedulerSide, clock: Clock) -> None:
    """A step as the touches are due."""
    clock.now += touches.AFTER_SECONDS
    made.build_plan(Step())


def test_all_blocks_of_a_request_are_touched_once_a_while_after_its_end() -> None:
    made, daemon, clock, (request,) = ended(1)
    made.build_plan(Step())
    assert daemon.touched == []
    clock.now += touches.AFTER_SECONDS
    for _ in range(3):
        made.build_plan(Step())
    assert daemon.touched == [{0: b"".join(request.block_hashes[:2])}]


@pytest.mark.parametrize(
    ("other", "touched"),
    [
        (group(1, GroupKind.SLIDING_WINDOW, 4, window=6), [2, 3, 5, 6]),
        (group(1, GroupKind.CHUNKED_LOCAL, 4, window=12), [3, 6]),
        (group(1, GroupKind.STATE, 4), [3, 6]),
    ],
    ids=lambda each: each.kind if isinstance(each, Group) else "",
)
def test_of_groups_that_need_the_end_of_a_prefix_what_was_needed_earlier_is_not_touched(
    other: Group, touched: list[int]
) -> None:
    """A prompt of 17 tokens, that is four blocks, and an answer of 12."""
    daemon, clock = TinyDaemon(), Clock()
    made = attached([full(), other], TinyPool(64), daemon=daemon, clock=clock)
    request = Request("r", list(range(17)))
    made.update_state_after_alloc(request, Allocated([*range(1, 9)], [*range(11, 19)]), 0)
    request.append(range(12))
    made.request_finished(request)
    later(made, clock)
    names = request.block_hashes
    assert daemon.touched == [{0: b"".join(names[:7]), 1: b"".join(names[each] for each in touched)}]


def test_a_step_touches_one_request_and_of_very_many_those_that_ended_first_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(touches, "MAX_WAITING", 2)
    made, daemon, clock, requests = ended(3)
    later(made, clock)
    assert len(daemon.touched) == 1
    made.build_plan(Step())
    made.build_plan(Step())
    assert [len(each[0]) // 32 for each in daemon.touched] == [
        (len(request.all_token_ids) - 1) // 4 for request in requests[1:]
    ]


def test_of_a_long_request_the_head_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "MAX_HASHES", 1)
    made, daemon, clock, (request,) = ended(1)
    later(made, clock)
    assert daemon.touched == [{0: request.block_hashes[0]}]


def test_a_touch_that_is_refused_disturbs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made, daemon, clock, _ = ended(1)
    clock.now += touches.AFTER_SECONDS

    def refuse(*_: object) -> None:
        raise ClientError("refused")

    monkeypatch.setattr(daemon, "touch_nowait", refuse)
    made.build_plan(Step())
    assert daemon.epoch == EPOCH
    assert made.counters.unsent_touches == 1


def test_touches_that_nobody_hears_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "MAX_WAITING", 2)
    made, daemon, clock, _ = ended(3)
    assert made.counters.unsent_touches == 1, "more ended than are remembered"
    later(made, clock)
    assert made.counters.unsent_touches == 1
    daemon.reason = NO_ANSWER
    made.build_plan(Step())
    assert made.counters.unsent_touches == 2


TOOL = 7


@pytest.mark.parametrize(
    ("said", "answer", "pause"),
    [
        (None, [], None),
        ({"pause": 120, "tool_pause": 5}, [1, TOOL, 2], 5.0),
        ({"over": True}, [], inf),
    ],
)
def test_what_a_request_says_of_its_next_use_goes_with_its_touch(
    said: Any, answer: list[int], pause: float | None
) -> None:
    """`test_next_use` has what can be said."""
    pool, daemon, clock = TinyPool(64), TinyDaemon(), Clock()
    made = attached(pool=pool, daemon=daemon, clock=clock, tool_tokens=[TOOL])
    request = Said("said", list(range(9)), kv_transfer_params={"kvsidecar": said})
    run(made, pool, request, 8)
    request.append(answer)
    made.request_finished(request)
    later(made, clock)
    assert (len(daemon.touched), daemon.pauses) == (1, [pause])
    assert made.counters.pauses == (said is not None)


def test_after_a_reset_nothing_of_before_is_touched() -> None:
    made, daemon, clock, _ = ended(1)
    made.reset_cache()
    later(made, clock)
    assert daemon.touched == []
