"""The load of the throughput benchmark: all turns of all conversations, the same in every run, and their times."""

from __future__ import annotations

import pytest

from benchmarks.vllm import throughput
from benchmarks.vllm.conversations import Conversations


def run(concurrency: int, answer: int = 7) -> tuple[Conversations, list[tuple[str, list[int]]]]:
    """An engine that answers one request after the other; the clock counts its tokens."""
    talks = Conversations(
        count=5,
        turns=3,
        concurrency=concurrency,
        first_tokens=20,
        turn_tokens=6,
        output_tokens=4,
        system_tokens=8,
        vocabulary=1000,
    )
    sent: list[tuple[str, list[int]]] = []
    open_requests: list[str] = []
    now = 0.0
    while not talks.over:
        for name, tokens in talks.next_requests():
            talks.sent(name, now)
            sent.append((name, tokens))
            open_requests.append(name)
        assert len(open_requests) <= concurrency
        name = open_requests.pop(0)
        for count in range(1, 5):
            now += 1.0
            talks.answered(name, [answer] * count, now, count == 4, cached=2)
    return talks, sent


def test_every_conversation_has_its_turns_and_others_come_in_between() -> None:
    _, sent = run(1)
    assert [name for name, _ in sent] == [f"{number}-{turn}" for turn in range(3) for number in range(5)]


def test_a_turn_begins_with_all_that_was_said() -> None:
    _, sent = run(2)
    prompts = dict(sent)
    for number in range(5):
        for turn in (1, 2):
            before, now = prompts[f"{number}-{turn - 1}"], prompts[f"{number}-{turn}"]
            assert now[: len(before) + 4] == [*before, 7, 7, 7, 7]
            assert 3 <= len(now) - len(before) - 4 <= 9
    assert len({tuple(tokens[:8]) for tokens in prompts.values()}) == 1
    assert len({tuple(tokens[:12]) for tokens in prompts.values()}) == 5


def test_all_runs_ask_the_same_whatever_the_order_of_the_answers() -> None:
    assert dict(run(1)[1]) == dict(run(4)[1])


def test_times_are_those_of_each_request() -> None:
    result = run(1)[0].result()
    assert (result["requests"], result["output_tokens"], result["cached_tokens"]) == (15, 60, 30)
    assert result["ttft_ms"] == [1000.0] * 15
    assert result["tpot_ms"] == [1000.0] * 15
    assert len(result["later_ttft_ms"]) == 10
    assert result["prompt_tokens"] == sum(len(tokens) for _, tokens in run(1)[1])


def test_a_conversation_of_one_turn_has_no_later_ones(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "output_tokens": 10, "seconds": 1.0, "ttft_ms": [5.0], "later_ttft_ms": [], "tpot_ms": [1.0],
        "cached_tokens": 0, "prompt_tokens": 8, "requests": 1, "working_set_tokens": 8,
        "facts": {"gpu_blocks": 4, "block_size": 16},
    }  # fmt: skip
    throughput.show({"empty": [found]})
    assert "1 requests, 8 prompt tokens" in capsys.readouterr().out
