"""Which events a topic has, as a router sees them that follows llm-d's and Dynamo's rules."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvsidecar.integrations.residency.known_blocks import BlockInfo
from kvsidecar.publisher.engine_dialects import SGLANG, VLLM
from kvsidecar.publisher.events import COUNTED_TOKENS, MAX_CHAIN, MAX_CHAIN_TOKENS, Topic
from tests.integrations.engine import chain
from tests.marks import examples
from tests.router import View

TOKENS = list(range(4 * 6))
CHAIN = chain(TOKENS)
CPU = "CPU"


class Held:
    """One namespace's blocks in a topic."""

    def __init__(self, topic: Topic | None = None) -> None:
        self.topic = Topic("t") if topic is None else topic
        self.holder = self.topic.hold(VLLM, 0)


def info(number: int, tokens: list[int] = TOKENS) -> BlockInfo:
    hashes = chain(tokens)
    return BlockInfo(array("i", tokens[4 * number : 4 * number + 4]).tobytes(), hashes[number - 1] if number else None)


def store(holder: Held, *numbers: int, medium: str = CPU) -> None:
    for each in numbers:
        holder.topic.stored(holder.holder, medium, CHAIN[each], info(each))


def remove(holder: Held, *numbers: int, medium: str = CPU) -> None:
    holder.topic.removed(holder.holder, medium, [CHAIN[each] for each in numbers])


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
    mine = Held(topic)
    topic.take()
    store(mine, 0, 1, 2)
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
    remove(mine, 2)
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
    mine = Held(topic)
    for i, each in enumerate(chain(tokens)):
        topic.stored(mine.holder, CPU, each, info(i, tokens))
    events = follow(topic, view)
    assert [len(each.get("block_hashes", ())) for each in events] == [0, MAX_CHAIN, 1]
    assert len(view.of(CPU)) == MAX_CHAIN + 1
    assert view.ignored == []


def test_what_two_namespaces_hold_is_said_once_and_taken_back_when_neither_does() -> None:
    topic, view = Topic("t"), View()
    first, second = Held(topic), Held(topic)
    store(first, 0, 0)
    store(second, 0)
    follow(topic, view)
    remove(first, 0)
    remove(first, 0)
    follow(topic, view)
    assert set(view.of(CPU)) == names(0)
    assert view.repeated == []
    remove(second, 0)
    follow(topic, view)
    assert view.of(CPU) == {}
    assert len(view.removed) == 1


def test_a_late_router_hears_everything_again_parents_first() -> None:
    topic, late = Topic("t"), View()
    mine = Held(topic)
    store(mine, 0, 1, 2, medium="STORAGE")
    store(mine, 0, 1)
    remove(mine, 0)
    store(mine, 0)  # behind its child now
    topic.take()
    topic.say_again()
    follow(topic, late)
    assert set(late.of(CPU)) == names(0, 1)
    assert set(late.of("STORAGE")) == names(0, 1, 2)
    assert late.ignored == []


def test_saying_all_again_takes_several_turns_and_heeds_what_happens_meanwhile() -> None:
    topic, early, late = Topic("t"), View(), View()
    mine = Held(topic)
    store(mine, *range(6))
    follow(topic, early)
    topic.say_again()
    first = topic.take(most=2)
    assert first[0] == {"type": "AllBlocksCleared"}
    remove(mine, 5)
    for view in (early, late):
        for event in first:
            view.take(event)
    follow(topic, early, late)
    assert set(early.of(CPU)) == set(late.of(CPU)) == names(0, 1, 2, 3, 4)


COLLIDING = [bytes([number]).rjust(24, b"x") + bytes(8) for number in range(4)]
"""Hashes with the same last 8 bytes."""


def note(parent: bytes | None, tokens: int = 4) -> BlockInfo:
    return BlockInfo(bytes(4 * tokens), parent)


def test_blocks_whose_names_collide_are_no_circle_for_anyone() -> None:
    """Announced blocks are each other's parents by their names: each comes to rest, and hides no honest block."""
    topic, view = Topic("t"), View()
    attacker, honest = Held(topic), Held(topic)
    child = b"c" * 32
    topic.stored(attacker.holder, CPU, COLLIDING[0], note(None))
    topic.stored(attacker.holder, CPU, child, note(COLLIDING[0]))
    topic.take()
    topic.removed(attacker.holder, CPU, [COLLIDING[0]])
    topic.stored(attacker.holder, CPU, COLLIDING[1], note(child))
    topic.stored(attacker.holder, CPU, COLLIDING[2], note(COLLIDING[3]))  # its own parent
    store(honest, 0, 1, 2)
    for _ in range(2):
        topic.say_again()
        follow(topic, view)
        assert set(view.of(CPU)) == names(0, 1, 2)
        assert not topic.pending
    topic.stored(honest.holder, CPU, COLLIDING[3], note(None))
    follow(topic, view)
    assert set(view.of(CPU)) == names(0, 1, 2) | {VLLM.number(each) for each in (child, COLLIDING[3])}
    topic.release(attacker.holder)
    follow(topic, view)
    assert set(view.of(CPU)) == names(0, 1, 2) | {VLLM.number(COLLIDING[3])}


def test_a_chain_of_any_length_is_said_a_little_at_a_time() -> None:
    topic = Topic("t")
    mine = Held(topic)
    long = [number.to_bytes(32, "big") for number in range(20_000)]
    for number in reversed(range(len(long))):
        topic.stored(mine.holder, CPU, long[number], note(long[number - 1] if number else None))
    seen = 0
    while topic.pending:
        seen += (said := sum(len(each.get("block_hashes", ())) for each in topic.take(100)))
        assert said <= 100
    assert seen == len(long)


def test_blocks_that_wait_for_one_parent_again_and_again_take_no_more_memory() -> None:
    topic = Topic("t")
    mine = Held(topic)
    for _ in range(100):
        store(mine, 3)
        topic.take()
        remove(mine, 3)
    assert topic._waiting == {}
    assert not topic.take()
    assert not topic.pending


def test_blocks_with_many_tokens_are_few_in_an_event_and_in_what_is_taken_at_once() -> None:
    topic = Topic("t")
    mine = Held(topic)
    long = [number.to_bytes(32, "big") for number in range(200)]
    for number, each in enumerate(long):
        topic.stored(mine.holder, CPU, each, note(long[number - 1] if number else None, 4085))
    seen = 0
    while topic.pending:
        events = [each for each in topic.take(512) if each["type"] == "BlockStored"]
        sizes = [len(each["token_ids"]) for each in events]
        seen += sum(len(each["block_hashes"]) for each in events)
        assert max(sizes, default=0) <= MAX_CHAIN_TOKENS
        assert sum(sizes) <= (512 + 64) * COUNTED_TOKENS
    assert seen == len(long)


class Routers(RuleBasedStateMachine):
    """One that listens all the time, and one that comes late again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.topic, self.early, self.late = Topic("t"), View(), View()
        self.namespaces = [Held(self.topic), Held(self.topic)]
        self.held: dict[tuple[str, int], set[int]] = {}

    @rule(number=st.integers(0, 5), medium=st.sampled_from([CPU, "STORAGE"]), who=st.integers(0, 1))
    def store(self, number: int, medium: str, who: int) -> None:
        self.held.setdefault((medium, number), set()).add(who)
        store(self.namespaces[who], number, medium=medium)

    @rule(number=st.integers(0, 5), medium=st.sampled_from([CPU, "STORAGE"]), who=st.integers(0, 1))
    def remove(self, number: int, medium: str, who: int) -> None:
        left = self.held.pop((medium, number), set()) - {who}
        if left:
            self.held[medium, number] = left
        remove(self.namespaces[who], number, medium=medium)

    @rule(who=st.integers(0, 1))
    def end(self, who: int) -> None:
        self.topic.release(self.namespaces[who].holder)
        self.namespaces[who] = Held(self.topic)
        self.held = {key: left for key, holders in self.held.items() if (left := holders - {who})}

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
TestRouters.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
