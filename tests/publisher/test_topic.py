"""Which events a topic has, as a router sees them that follows llm-d's and Dynamo's rules."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvsidecar.integrations.residency.known_blocks import BlockInfo
from kvsidecar.publisher.topic import MAX_CHAIN, SGLANG, VLLM, Topic
from tests.integrations.engine import chain
from tests.router import View

TOKENS = list(range(4 * 6))
CHAIN = chain(TOKENS)
CPU = "CPU"


def info(number: int, tokens: list[int] = TOKENS) -> BlockInfo:
    hashes = chain(tokens)
    return BlockInfo(array("i", tokens[4 * number : 4 * number + 4]).tobytes(), hashes[number - 1] if number else None)


def store(topic: Topic, *numbers: int, medium: str = CPU) -> None:
    for each in numbers:
        topic.stored(VLLM, medium, 0, CHAIN[each], info(each))


def names(*numbers: int) -> set[int]:
    return {VLLM.number(CHAIN[each]) for each in numbers}


def follow(topic: Topic, *views: View) -> list[dict[str, Any]]:
    everything = []
    while events := topic.take():
        everything += events
        for view in views:
            for event in events:
                view.take(event)
    return everything


def test_a_topic_begins_with_clearing_what_an_earlier_publisher_has_said() -> None:
    assert Topic("t").take() == [{"type": "AllBlocksCleared"}]


def test_a_chain_is_one_event_with_all_fields_of_vllm() -> None:
    topic = Topic("t", "kvsidecar")
    topic.take()
    store(topic, 0, 1, 2)
    (event,) = topic.take()
    assert event == {
        "type": "BlockStored",
        "block_hashes": [VLLM.number(each) for each in CHAIN[:3]],
        "parent_block_hash": None,
        "token_ids": TOKENS[:12],
        "block_size": 4,
        "lora_id": None,
        "lora_name": None,
        "medium": CPU,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "locality": "LOCAL",
        "ownership": "kvsidecar",
    }
    topic.removed(VLLM, CPU, 0, CHAIN[2:3])
    (removed,) = topic.take()
    assert removed == {
        "type": "BlockRemoved", "block_hashes": [VLLM.number(CHAIN[2])], "medium": CPU, "group_idx": 0,
        "locality": "LOCAL", "ownership": "kvsidecar",
    }  # fmt: skip


def test_the_engines_name_blocks_as_in_their_own_events() -> None:
    block = bytes([0x80, *range(1, 32)])
    assert VLLM.number(block) == int.from_bytes(block[24:], "big")
    assert SGLANG.number(block) == int.from_bytes(block[:8], "big", signed=True) < 0


def test_an_event_has_a_limited_number_of_blocks() -> None:
    tokens = list(range(4 * (MAX_CHAIN + 1)))
    topic, view = Topic("t"), View()
    for i, each in enumerate(chain(tokens)):
        topic.stored(VLLM, CPU, 0, each, info(i, tokens))
    events = follow(topic, view)
    assert [len(each.get("block_hashes", ())) for each in events] == [0, MAX_CHAIN, 1]
    assert len(view.of(CPU)) == MAX_CHAIN + 1
    assert view.ignored == []


def test_what_two_namespaces_hold_is_said_once_and_taken_back_when_neither_does() -> None:
    topic, view = Topic("t"), View()
    store(topic, 0)
    store(topic, 0)
    topic.removed(VLLM, CPU, 0, CHAIN[:1])
    follow(topic, view)
    assert set(view.of(CPU)) == names(0)
    assert view.repeated == []
    topic.removed(VLLM, CPU, 0, CHAIN[:1])
    topic.removed(VLLM, CPU, 0, CHAIN[:1])  # more often than it was stored
    follow(topic, view)
    assert view.of(CPU) == {}
    assert len(view.removed) == 1


def test_a_late_router_hears_everything_again_parents_first() -> None:
    topic, late = Topic("t"), View()
    store(topic, 0, 1, 2, medium="STORAGE")
    store(topic, 0, 1)
    topic.removed(VLLM, CPU, 0, CHAIN[:1])
    store(topic, 0)  # behind its child now
    topic.take()
    topic.say_again()
    follow(topic, late)
    assert set(late.of(CPU)) == names(0, 1)
    assert set(late.of("STORAGE")) == names(0, 1, 2)
    assert late.ignored == []


def test_saying_all_again_takes_several_turns_and_heeds_what_happens_meanwhile() -> None:
    topic, early, late = Topic("t"), View(), View()
    store(topic, *range(6))
    follow(topic, early)
    topic.say_again()
    first = topic.take(most=2)
    assert first[0] == {"type": "AllBlocksCleared"}
    topic.removed(VLLM, CPU, 0, CHAIN[5:])
    for view in (early, late):
        for event in first:
            view.take(event)
    follow(topic, early, late)
    assert set(early.of(CPU)) == set(late.of(CPU)) == names(0, 1, 2, 3, 4)


class Routers(RuleBasedStateMachine):
    """One that listens all the time, and one that comes late again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.topic, self.early, self.late = Topic("t"), View(), View()
        self.held: dict[tuple[str, int], int] = {}

    @rule(number=st.integers(0, 5), medium=st.sampled_from([CPU, "STORAGE"]))
    def store(self, number: int, medium: str) -> None:
        others = [(each, number - 1) in self.held for each in (CPU, "STORAGE")]
        if number == 0 or any(others):
            self.held[medium, number] = self.held.get((medium, number), 0) + 1
            store(self.topic, number, medium=medium)

    @rule(number=st.integers(0, 5), medium=st.sampled_from([CPU, "STORAGE"]))
    def remove(self, number: int, medium: str) -> None:
        left = self.held.pop((medium, number), 0) - 1
        if left > 0:
            self.held[medium, number] = left
        self.topic.removed(VLLM, medium, 0, [CHAIN[number]])

    @rule(most=st.integers(1, 4))
    def read(self, most: int) -> None:
        for event in self.topic.take(most):
            self.early.take(event)
            self.late.take(event)

    @rule(lost=st.booleans())
    def come_late(self, lost: bool) -> None:
        """A new router, or the one that has missed something."""
        for event in self.topic.take():
            self.early.take(event)
        self.late = self.late if lost else View()
        self.topic.say_again()

    @rule()
    def agree(self) -> None:
        follow(self.topic, self.early, self.late)
        for medium in (CPU, "STORAGE"):
            held = names(*[number for place, number in self.held if place == medium])
            for view in (self.early, self.late):
                assert self.usable(medium) <= set(view.of(medium)) <= held

    def usable(self, medium: str) -> set[int]:
        """Blocks whose prefix is held in some medium."""
        anywhere = {number for _, number in self.held}
        whole = [each for each in range(6) if all(before in anywhere for before in range(each + 1))]
        return names(*[each for each in whole if (medium, each) in self.held])

    @invariant()
    def no_more_is_announced_than_is_held(self) -> None:
        assert len(self.topic) == len(self.held)


TestRouters = pytest.mark.filterwarnings("ignore")(Routers.TestCase)
TestRouters.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
