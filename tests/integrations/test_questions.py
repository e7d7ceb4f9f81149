"""Requests are asked for when they arrive: no step waits for each of them in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.client.types import GroupHits, LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.hits import limit, longest_hit, lookup_range, needed_blocks
from kvsidecar.integrations.vllm.lookups import OFFER_SECONDS
from kvsidecar.integrations.vllm.metadata import RankReport
from kvsidecar.integrations.vllm.questions import EARLY_REQUESTS, LEASED_PART, Question
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from kvsidecar.types import LookupMode
from tests.integrations.engine import (
    Allocated,
    Clock,
    Request,
    Step,
    TinyDaemon,
    TinyPool,
    attached,
    cases,
    full,
    group,
    side,
)


class Waited(TinyDaemon):
    """Counts the lookups that a step made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.in_step = True
        self.waited = 0

    def lookup(self, *args: Any, **options: Any) -> Any:
        self.waited += self.in_step
        return super().lookup(*args, **options)

    def arrives(self, engine: SchedulerSide, request: Request) -> None:
        self.in_step = False
        engine.on_new_request(request)
        self.in_step = True


@pytest.fixture
def daemon() -> Waited:
    return Waited()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(daemon: Waited, clock: Clock) -> SchedulerSide:
    made = attached(daemon=daemon, clock=clock, pool=TinyPool(64))
    daemon.waited = 0
    return made


def request(name: str, blocks: int = 4) -> Request:
    return Request(name, list(range(4 * blocks + 1)))


def test_a_wave_of_requests_waits_for_no_answer(engine: SchedulerSide, daemon: Waited) -> None:
    wave = [request(f"r{i}") for i in range(20)]
    daemon.put(0, wave[0].block_hashes[:3])
    for each in wave:
        daemon.arrives(engine, each)
    assert [engine.get_num_new_matched_tokens(each, 0) for each in wave] == [(12, True)] * 20
    assert daemon.waited == 0
    assert len(daemon.leases) == 20


@pytest.mark.parametrize("local", [0, 4, 8, 12])
def test_the_answer_is_right_wherever_the_gpus_own_hit_ends(engine: SchedulerSide, daemon: Waited, local: int) -> None:
    asked = request("r")
    daemon.put(0, asked.block_hashes[1:3])  # the first was evicted; the GPU may have it
    daemon.arrives(engine, asked)
    tokens, _ = engine.get_num_new_matched_tokens(asked, local)
    assert tokens == {0: 0, 4: 8, 8: 4, 12: 0}[local]
    assert daemon.waited == 0
    engine.update_state_after_alloc(asked, Allocated([5, 6, 7, 8]), tokens)
    orders = engine.build_plan(Step())
    loaded = [each.hashes for job in orders.loads for each in job.blocks]
    assert loaded == ([b"".join(asked.block_hashes[local // 4 : 3])] if tokens else [])


def test_an_answer_that_is_too_old_is_given_up_and_asked_for_again(
    engine: SchedulerSide, daemon: Waited, clock: Clock
) -> None:
    asked, other = request("r"), request("s")
    daemon.put(0, asked.block_hashes[:2])
    daemon.arrives(engine, asked)
    daemon.arrives(engine, other)
    clock.now += LEASED_PART * OFFER_SECONDS
    daemon.put(0, asked.block_hashes[2:3])
    assert engine.get_num_new_matched_tokens(asked, 0) == (12, True)
    assert daemon.waited == 1
    engine.build_plan(Step())
    assert len(daemon.leases) == 1, "that of the request that vLLM has not asked for is dropped"


def test_a_request_that_goes_before_its_first_step_leaves_no_lease(engine: SchedulerSide, daemon: Waited) -> None:
    asked = request("r")
    daemon.put(0, asked.block_hashes)
    daemon.arrives(engine, asked)
    assert daemon.leases
    engine.request_finished(asked)
    assert not daemon.leases


def test_nothing_is_taken_over_from_another_run_of_the_daemon_or_other_weights(
    engine: SchedulerSide, daemon: Waited
) -> None:
    asked = request("r")
    daemon.put(0, asked.block_hashes)
    daemon.arrives(engine, asked)
    daemon.epoch += 1
    daemon.blocks.clear()
    engine.take_report(RankReport(attached={0: daemon.epoch}))
    assert not daemon.leases
    assert engine.get_num_new_matched_tokens(asked, 0) == (0, False)
    daemon.put(0, asked.block_hashes)
    again = request("s")
    engine.on_new_request(again)
    assert engine.reset_cache()
    assert engine.get_num_new_matched_tokens(again, 0) == (0, False)
    assert not daemon.leases


def test_a_request_that_has_grown_is_asked_for_again(engine: SchedulerSide, daemon: Waited) -> None:
    asked = request("r")
    daemon.arrives(engine, asked)
    asked.append(range(4))
    daemon.put(0, asked.block_hashes)
    assert engine.get_num_new_matched_tokens(asked, 0) == (20, True)


def test_only_so_many_are_asked_ahead(engine: SchedulerSide, daemon: Waited) -> None:
    wave = [request(f"r{i}") for i in range(EARLY_REQUESTS + 3)]
    for each in wave:
        daemon.arrives(engine, each)
        daemon.arrives(engine, each)
    for each in wave:
        engine.get_num_new_matched_tokens(each, 0)
    assert daemon.waited == 3


def test_a_daemon_that_cannot_be_asked_at_once_is_asked_in_the_step(
    engine: SchedulerSide, daemon: Waited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "begin_lookup", lambda *_, **__: None)
    asked = request("r")
    daemon.put(0, asked.block_hashes)
    daemon.arrives(engine, asked)
    assert engine.get_num_new_matched_tokens(asked, 0) == (16, True)
    assert daemon.waited == 1


def test_one_that_refuses_is_a_miss_that_the_step_counts(
    engine: SchedulerSide, daemon: Waited, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise ClientError("too many hashes")

    monkeypatch.setattr(daemon, "begin_lookup", refuses)
    asked = request("r")
    daemon.arrives(engine, asked)
    assert engine.counters.refused_lookups == 0
    assert engine.get_num_new_matched_tokens(asked, 0) == (0, False)
    assert engine.counters.refused_lookups == 1


def test_a_request_that_must_not_read_or_has_no_whole_block_is_not_asked_for(
    engine: SchedulerSide, daemon: Waited
) -> None:
    daemon.asked.clear()
    engine.on_new_request(Request("r", list(range(9)), skip_reading_prefix_cache=True))
    engine.on_new_request(Request("s", list(range(4))))
    side(daemon=daemon).on_new_request(request("not attached"))
    assert not daemon.asked


# -- rounds ------------------------------------------------------------------------------------------------------------


def ask_all(
    question: Question, local: int, found: Mapping[int, Sequence[bool]], held: Mapping[int, Sequence[bool]]
) -> int:
    """Answer every round of a question. The request's hashes are their own numbers. Returns how many were asked, not
    counting those that are asked again to lease them."""
    asked: list[tuple[int, int]] = []
    leased: set[tuple[int, int]] = set()
    while packed := question.next_round(local):
        answers, run = {}, 10**9
        for index, joined in packed.items():
            numbers, first = [int.from_bytes(joined[i : i + 32], "big") for i in range(0, len(joined), 32)], 0
            if (tail := question.tails.get(index)) is None:
                run = min(run, [*(found[index][each] for each in numbers), False].index(False))
            elif tail < len(numbers):
                first = max(0, run - tail)
                numbers = numbers[first : run + 1]
            there = [(index, each) for each in numbers if found[index][each]]
            asked += [(index, each) for each in numbers if (index, each) not in asked or (index, each) not in there]
            leased.update(there[-question.lease_last.get(index, 0) :])
            flags = tuple(bool(found[index][each]) for each in numbers)
            elsewhere = tuple(bool(held[index][each]) and not flag for each, flag in zip(numbers, flags, strict=True))
            if question.mode is LookupMode.PREFIX:
                answers[index] = GroupHits((*flags, False).index(False))
            else:
                answers[index] = GroupHits(
                    sum(flags), flags, held=elsewhere if any(elsewhere) else (), first=min(first, len(joined) // 32)
                )
        question.take(LookupResult(True, answers))
    assert len(set(asked)) == len(asked), "nothing is asked twice"
    assert leased.issuperset(needed_of(question, local)), "what the hit loads is leased"
    return len(asked)


def needed_of(question: Question, local: int) -> Iterator[tuple[int, int]]:
    """Group and number of each block of the hit."""
    groups = question._groups
    hit = longest_hit(groups, question.found(local), local, question.end - local)
    end, inside = question.end_inside()
    if end > local + hit:
        hit = end - local
        yield from ((index, int.from_bytes(name, "big")) for index, name in inside.items())
    for each in groups if hit else ():
        for block in needed_blocks(each, hit, local):
            yield each.index, (block + 1) * each.hashes_per_block - 1


def numbered(count: int) -> Any:
    return SimpleNamespace(block_hashes=[number.to_bytes(32, "big") for number in range(count)])


def by_hash(
    groups: Sequence[Group], flags: Mapping[int, Sequence[bool]], local: int, hashes: int
) -> dict[int, list[bool]]:
    """For each hash, whether the block that ends with it is there."""
    result = {}
    for each in groups:
        result[each.index] = [False] * hashes
        for block, flag in enumerate(flags[each.index], start=local // each.block_tokens):
            result[each.index][(block + 1) * each.hashes_per_block - 1] = flag
    return result


@given(cases(), st.data())
def test_a_question_in_rounds_finds_what_one_about_everything_does(
    case: tuple[list[Group], dict[int, list[bool]], int, int], data: st.DataObject
) -> None:
    groups, found, local, most = case
    if not most:
        return
    held = {
        index: data.draw(st.lists(st.booleans(), min_size=len(each), max_size=len(each)))
        for index, each in found.items()
    }
    # As many hashes as the shortest group has blocks for: a request's hashes end for all groups at the same token.
    hashes = max((local // each.block_tokens + len(found[each.index])) * each.hashes_per_block for each in groups)
    for each in groups:
        missing = min(hashes // each.hashes_per_block, lookup_range(each, local, most).stop)
        missing -= local // each.block_tokens + len(found[each.index])
        found[each.index] += [False] * missing
        held[each.index] += [False] * missing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsidecar.integrations.vllm.questions.PART_HASHES", data.draw(st.sampled_from([0, 2048])))
        question = Question(groups, numbered(hashes), local, most, prefix=data.draw(st.booleans()))
        count = ask_all(question, local, by_hash(groups, found, local, hashes), by_hash(groups, held, local, hashes))
    assert count <= sum(map(len, found.values()))
    there = {i: [a or b for a, b in zip(found[i], held[i], strict=True)] for i in found}
    assert longest_hit(groups, question.found(local), local, most) == longest_hit(groups, found, local, most)
    if question.mode is LookupMode.BITMAP:
        assert longest_hit(groups, question.there(local), local, most) == longest_hit(groups, there, local, most)


def test_of_sliding_windows_only_those_are_asked_for_that_count() -> None:
    groups = [
        group(0, GroupKind.SLIDING_WINDOW, 4, window=40),
        full(1),
        group(2, GroupKind.SLIDING_WINDOW, 4, window=80),
    ]
    whole = {index: [True] * 3000 for index in range(3)}
    nothing = {index: [False] * 3000 for index in range(3)}
    question = Question(groups, numbered(3000), 0, 12_000, prefix=True)
    assert ask_all(question, 0, whole, nothing) == 3000 + 11 + 21
    assert longest_hit(groups, question.found(0), 0, 12_000) == 12_000
    assert not question.missing
    assert set(question.packed(0, 32)) == {0, 1, 2}
    short = {**whole, 1: [True] * 2000 + [False] * 1000}
    question = Question(groups, numbered(3000), 0, 12_000, prefix=True)
    assert ask_all(question, 0, short, nothing) == 3000 + 12 + 22
    assert longest_hit(groups, question.found(400), 400, 11_600) == 7600
    assert {index: len(each) for index, each in question.missing.items()} == {1: 1000}
    # A request may end in a block that its windows do not have yet: the hit ends one block before, in the same answer.
    behind = {**short, **{index: [each != 1999 for each in range(3000)] for index in (0, 2)}}
    question = Question(groups, numbered(3000), 0, 12_000, prefix=True)
    assert ask_all(question, 0, behind, nothing) == 3000 + 12 + 22
    assert longest_hit(groups, question.found(0), 0, 12_000) == 7996
    gone = {**short, 2: [each < 1000 or each > 1990 for each in range(3000)]}
    question = Question(groups, numbered(3000), 0, 12_000, prefix=True)
    assert ask_all(question, 0, gone, nothing) == 9000
    assert longest_hit(groups, question.found(0), 0, 12_000) == 4000


def test_the_state_of_a_hit_whose_later_windows_are_gone_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsidecar.integrations.vllm.questions.PART_HASHES", 0)  # as of a prompt for several messages
    groups = [full(0), group(1, GroupKind.SLIDING_WINDOW, 4, window=2), group(2, GroupKind.STATE, 4)]
    found = {0: [True] * 3, 1: [True, False, False], 2: [True] * 3}
    question = Question(groups, numbered(3), 0, 12, prefix=True)
    ask_all(question, 0, found, {index: [False] * 3 for index in found})
    assert longest_hit(groups, question.found(0), 0, 12) == 4


def test_a_hit_ends_where_the_windows_have_hashes() -> None:
    """The eagle group's hit needs one more block, and the last one has no hash yet."""
    groups = [full(0), group(1, GroupKind.SLIDING_WINDOW, 4, window=1, eagle=True)]
    found = {0: [True] * 3000, 1: [True] * 3000}
    question = Question(groups, numbered(3000), 0, 12_000, prefix=True)
    assert ask_all(question, 0, found, {index: [False] * 3000 for index in found}) == 3000 + 3
    assert longest_hit(groups, question.found(0), 0, 12_000) == 11_996


@given(st.data())
def test_a_hit_inside_a_block_is_the_longest_that_brute_force_finds(data: st.DataObject) -> None:
    hash_tokens, block = 2, 8
    kinds = [
        GroupKind.FULL,
        GroupKind.STATE,
        *data.draw(st.lists(st.sampled_from([GroupKind.FULL, GroupKind.STATE]), max_size=1)),
    ]
    sizes = {"hash_tokens": hash_tokens, "alignment": block, "grain": hash_tokens}
    groups = [group(index, kind, block, **sizes) for index, kind in enumerate(kinds)]
    num_tokens = data.draw(st.integers(1, 50))
    local = data.draw(st.integers(0, (num_tokens - 1) // block)) * block
    ends = range(hash_tokens, num_tokens + 1, hash_tokens)
    request = SimpleNamespace(block_hashes=numbered(len(ends)).block_hashes, num_tokens=num_tokens)
    stored = {each.index: [data.draw(st.integers(0, 3).map(bool)) for _ in ends] for each in groups}

    def has(each: Group, end: int) -> bool:
        return stored[each.index][end // hash_tokens - 1]

    def can_go_on(each: Group, end: int) -> bool:
        if each.kind is GroupKind.STATE:
            return has(each, end)
        whole = (end // block + 1) * block
        inside = end % block == 0 or has(each, end) or (whole < num_tokens and has(each, whole))
        return inside and all(has(each, full_end) for full_end in range(local + block, end + 1, block))

    most = (num_tokens - 1) // hash_tokens * hash_tokens
    longest = next(
        (end for end in range(most, local, -hash_tokens) if all(can_go_on(each, end) for each in groups)), local
    )
    question = Question(groups, request, local, limit(groups, num_tokens, local), prefix=True)
    ask_all(question, local, stored, {each.index: [False] * len(ends) for each in groups})
    hit = local + longest_hit(groups, question.found(local), local, limit(groups, num_tokens, local))
    end, blocks = question.end_inside()
    assert max(hit, end) == longest
    if end > hit:
        for each in groups:
            number = int.from_bytes(blocks[each.index], "big")
            assert stored[each.index][number]
            assert number == end // hash_tokens - 1 or (each.kind is GroupKind.FULL and (number + 1) % 4 == 0)


def test_what_can_be_hit_inside_a_block_of_a_long_prompt_is_asked_for_within_a_bound() -> None:
    sizes = {"hash_tokens": 4, "alignment": 4000, "grain": 4}
    groups = [full(0, 4000, **sizes), group(1, GroupKind.STATE, 4000, **sizes)]
    whole = [(number + 1) % 1000 == 0 for number in range(10_000)]
    states = [number == 9_500 for number in range(10_000)]
    request = SimpleNamespace(block_hashes=numbered(10_000).block_hashes, num_tokens=40_001)
    question = Question(groups, request, 0, 40_000, prefix=True)
    assert ask_all(question, 0, {0: whole, 1: states}, {0: [False] * 10_000, 1: [False] * 10_000}) < 1100
    assert question.end_inside()[0] == 9_501 * 4


def test_of_states_the_last_one_is_leased_and_that_of_a_shorter_hit() -> None:
    groups = [full(), group(1, GroupKind.SLIDING_WINDOW, 4, window=9), group(2, GroupKind.STATE, 4)]
    whole = [True] * 20
    question = Question(groups, numbered(20), 0, 80, prefix=True)
    ask_all(question, 0, {0: whole, 1: whole, 2: whole}, {index: [False] * 20 for index in range(3)})
    short = [True] * 10 + [False] * 10
    question = Question(groups, numbered(20), 0, 80, prefix=True)
    rounds = []
    while packed := question.next_round(0):
        rounds.append({index: (len(each) // 32, question.lease_last.get(index, 0)) for index, each in packed.items()})
        firsts = {1: 6} if 1 in question.tails else {}
        numbers = {index: [each[i + 31] for i in range(0, len(each), 32)] for index, each in packed.items()}
        numbers |= {index: each[first:11] for index, each in numbers.items() if (first := firsts.get(index))}
        flags = {index: tuple((short if index == 0 else whole)[i] for i in each) for index, each in numbers.items()}
        answers = {index: GroupHits(sum(each), each, first=firsts.get(index, 0)) for index, each in flags.items()}
        question.take(LookupResult(True, answers))
    assert rounds == [{0: (20, 0), 1: (20, 0), 2: (20, 1)}, {2: (1, 0)}]
