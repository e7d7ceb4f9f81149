from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsidecar.client import BreakerState, LeaseRenewal
from kvsidecar.client.types import BREAKER_OPEN, DAEMON_LOST, NO_ANSWER
from kvsidecar.core.layout_checks import check_block_ids
from kvsidecar.errors import ClientError
from kvsidecar.integrations.offload_condition import GAUGES, WhyNot
from kvsidecar.integrations.vllm import stores
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.lookups import AGAIN_SECONDS, FRESH_SECONDS, UNCLAIMED_SECONDS
from kvsidecar.integrations.vllm.metadata import RankReport
from kvsidecar.integrations.vllm.running_stores import GIVE_UP_SECONDS, HUNG_SECONDS, REPORT_STEPS, SOON_SECONDS
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from kvsidecar.integrations.vllm.scheduler_hooks import tell_of_sleep
from tests.integrations.engine import (
    ATTACHED,
    EPOCH,
    Allocated,
    CachedRequests,
    Clock,
    LiveTables,
    NewRequest,
    Request,
    Step,
    TinyDaemon,
    TinyPool,
    attached,
    beside,
    chain,
    computed,
    full,
    group,
    planned_load,
    pooled,
    run,
    side,
    stored_hashes,
    with_stored,
)

SECONDS = 30.0


# -- hits ----------------------------------------------------------------------------------------------------------


def test_a_hit_is_offered_loaded_under_a_lease_and_the_lease_released_when_every_rank_has_reported() -> None:
    made, daemon = beside(world_size=2)
    request = Request("r", list(range(14)))
    daemon.put(0, request.block_hashes)
    assert made.get_num_new_matched_tokens(request, 4) == (8, True)
    assert (list(daemon.leases), daemon.kept) == ([1], set())  # a short one
    load = planned_load(made, request, Allocated([5, 9, 3, 8]), 8)
    (blocks,) = load.blocks
    assert (load.request_id, blocks.hashes) == ("r", b"".join(request.block_hashes[1:3]))
    assert blocks.ids() == [9, 3]
    assert (daemon.leases, daemon.kept) == ({1: {0: blocks.hashes}}, {1})
    assert made.has_pending_push_work()
    made.take_report(RankReport(loaded={load.number: 1}))
    assert daemon.leases
    made.take_report(RankReport(loaded={load.number: 2}))
    assert not daemon.leases
    assert not made.has_pending_push_work()


def test_the_same_question_is_not_asked_twice_within_a_tenth_of_a_second() -> None:
    daemon, clock = TinyDaemon(), Clock()
    made = attached(daemon=daemon, clock=clock)
    request = Request("r", list(range(9)))
    for now in (100.0, 100.05, 100.2):
        clock.now = now
        assert made.get_num_new_matched_tokens(request, 0) == (0, False)
        made.build_plan(Step())
    assert len(daemon.asked) == 2
    made.get_num_new_matched_tokens(request, 4)  # another question
    assert len(daemon.asked) == 3


def test_nothing_is_offered_before_every_rank_is_attached_to_the_daemon_that_is_asked() -> None:
    daemon = TinyDaemon()
    made = side(daemon=daemon, world_size=2)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    for ranks in ({0: EPOCH}, {1: 5}, {1: 0}):
        made.take_report(RankReport(attached=ranks))
        assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not daemon.asked
    made.take_report(RankReport(attached={0: 8, 1: 8}))  # the daemon that answers is another one
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    made.take_report(RankReport(attached={0: EPOCH, 1: EPOCH}))
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)


def test_a_request_waits_for_an_answer_only_so_long() -> None:
    daemon, clock = TinyDaemon(), Clock()
    made = attached(daemon=daemon, clock=clock)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    daemon.reason = NO_ANSWER
    assert made.get_num_new_matched_tokens(request, 0) == (None, False)
    clock.now += 0.05
    assert made.get_num_new_matched_tokens(request, 0) == (None, False)
    clock.now += 0.06
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    other = Request("s", list(range(9)))
    assert made.get_num_new_matched_tokens(other, 0) == (None, False)
    daemon.reason = ""
    assert made.get_num_new_matched_tokens(other, 0) == (8, True)


def test_a_request_does_not_wait_for_what_an_earlier_run_of_the_daemon_had() -> None:
    """A model with a window chooses what is fetched. Its lookup was answered before the daemon was restarted."""
    daemon, request = TinyDaemon(), Request("r", list(range(14)))
    made = attached([full(), group(1, GroupKind.SLIDING_WINDOW, 4, window=5)], daemon=daemon)
    for index in (0, 1):
        daemon.put(index, request.block_hashes)
    made.on_new_request(request)
    daemon.epoch += 1
    daemon.blocks.clear()
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_request_waits_for_blocks_from_a_slower_tier_and_takes_them_all_when_they_are_there() -> None:
    daemon, clock = TinyDaemon(), Clock()
    made = attached(daemon=daemon, clock=clock)
    request = Request("r", list(range(17)))
    daemon.asking = True
    assert made.get_num_new_matched_tokens(request, 0) == (None, False)
    daemon.asking, daemon.coming = False, 4
    clock.now += AGAIN_SECONDS
    daemon.put(0, request.block_hashes[:1])
    assert made.get_num_new_matched_tokens(request, 0) == (None, False), "of a prefix that grows"
    daemon.put(0, request.block_hashes)
    daemon.coming = 0
    clock.now += AGAIN_SECONDS
    assert made.get_num_new_matched_tokens(request, 0) == (16, True)
    assert made.counters.fetch_waits == 1
    assert len(daemon.leases) == 1, "those of the questions before are released"


def test_a_waiting_request_asks_no_more_often_than_makes_sense() -> None:
    daemon, clock = TinyDaemon(), Clock()
    made = attached(daemon=daemon, clock=clock)
    request = Request("r", list(range(9)))
    daemon.coming = 2
    for _ in range(5):
        assert made.get_num_new_matched_tokens(request, 0) == (None, False)
    assert len(daemon.asked) == 1


def test_what_is_there_when_the_patience_ends_is_loaded() -> None:
    daemon, clock = TinyDaemon(), Clock()
    made = attached(daemon=daemon, clock=clock, fetch_patience=0.5)
    request = Request("r", list(range(17)))
    daemon.put(0, request.block_hashes[:2])
    daemon.coming = 2
    assert made.get_num_new_matched_tokens(request, 0) == (None, False)
    clock.now += 0.6
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)


HYBRID = (full(0), group(1, GroupKind.SLIDING_WINDOW, 4, window=5), group(2, GroupKind.STATE, 4))


def hybrid_on_disk(request: Request, window: int, state: int) -> TinyDaemon:
    """A daemon with the first of four blocks in its pool; on disk the other blocks of full attention, of the window
    those up to this block, and of the state this one."""
    daemon = TinyDaemon()
    names = request.block_hashes
    daemon.put(0, names[:1])
    daemon.disk = {(0, each) for each in names[1:4]} | {(1, each) for each in names[:window]} | {(2, names[state])}
    return daemon


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("window", "state", "hit"), [(4, 3, 16), (4, 2, 12), (3, 2, 12), (3, 3, 0)])
def test_of_windows_and_states_that_is_fetched_which_the_longest_hit_needs(
    window: int, state: int, hit: int, early: bool
) -> None:
    request = Request("r", list(range(17)))
    names = request.block_hashes
    daemon, clock = hybrid_on_disk(request, window, state), Clock()
    made = attached(HYBRID, daemon=daemon, clock=clock)
    if early:
        made.on_new_request(request)
    if hit:
        for _ in range(2):  # what there is, and what comes of it
            assert made.get_num_new_matched_tokens(request, 0) == (None, False)
            clock.now += AGAIN_SECONDS
    assert made.get_num_new_matched_tokens(request, 0) == (hit, hit > 0)
    last = hit // 4
    needs = {(0, each) for each in names[1:last]} | {(1, names[last - 1]), (2, names[last - 1])}
    assert set(daemon.fetched) == (needs if hit else set())
    assert made.counters.fetch_waits == (hit > 0)
    assert len(daemon.leases) == (hit > 0)


def test_what_fails_to_come_is_not_waited_for() -> None:
    request = Request("r", list(range(17)))
    daemon, clock = hybrid_on_disk(request, 4, 3), Clock()
    daemon.fails = True
    made = attached(HYBRID, daemon=daemon, clock=clock)
    assert made.get_num_new_matched_tokens(request, 0) == (None, False)
    clock.now += AGAIN_SECONDS
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)


FINE: dict[str, Any] = {"block_tokens": 8, "hash_tokens": 4, "alignment": 8, "grain": 4}
FINE_GROUPS = [full(0, **FINE), group(1, GroupKind.STATE, **FINE)]


@pytest.mark.parametrize("whole", [False, True], ids=["as far as the hit", "the full block"])
@pytest.mark.parametrize("local", [0, 8])
def test_a_hit_inside_a_block_loads_the_state_there_and_the_block_around_it(local: int, whole: bool) -> None:
    """20 of 31 tokens: two blocks, and four tokens of the third one."""
    request = Request("r", list(range(31)))
    names = request.block_hashes
    daemon = TinyDaemon()
    daemon.put(0, [names[1], names[3], names[5] if whole else names[4]])
    daemon.put(1, [names[1], names[4]])
    made = attached(FINE_GROUPS, TinyPool(20), daemon=daemon)
    assert made.get_num_new_matched_tokens(request, local) == (20 - local, True)
    made.update_state_after_alloc(request, Allocated([1, 2, 3, 4], [0, 0, 7, 8]), 20 - local)
    (job,) = made.build_plan(Step()).loads
    first = local // 8
    blocks = [names[1], names[3], names[5] if whole else names[4]][first:]
    assert [(each.group, each.split(), each.ids()) for each in job.blocks] == [
        (0, blocks, [1, 2, 3][first:]),
        (1, [names[4]], [7]),
    ]
    assert len(daemon.leases) == 1


def test_a_prompt_that_is_shorter_than_a_block_is_hit_inside_it() -> None:
    request = Request("r", list(range(7)))
    daemon = TinyDaemon()
    for index in range(2):
        daemon.put(index, request.block_hashes[:1])
    made = attached(FINE_GROUPS, TinyPool(20), daemon=daemon)
    made.on_new_request(request)
    assert made.get_num_new_matched_tokens(request, 0) == (4, True)


def test_of_a_hit_inside_a_block_the_last_block_is_fetched_as_well() -> None:
    request = Request("r", list(range(31)))
    names = request.block_hashes
    daemon, clock = TinyDaemon(), Clock()
    daemon.disk = {(0, names[1]), (0, names[3]), (0, names[4]), (1, names[3]), (1, names[4])}
    made = attached(FINE_GROUPS, TinyPool(20), daemon=daemon, clock=clock)
    for _ in range(2):
        assert made.get_num_new_matched_tokens(request, 0) == (None, False)
        clock.now += AGAIN_SECONDS
    assert made.get_num_new_matched_tokens(request, 0) == (20, True)
    assert set(daemon.fetched) == {(0, names[1]), (0, names[3]), (0, names[4]), (1, names[4])}


@pytest.mark.parametrize("reason", [DAEMON_LOST, BREAKER_OPEN])
def test_a_lost_daemon_is_not_waited_for(reason: str) -> None:
    made, daemon = beside()
    daemon.reason = reason
    assert made.get_num_new_matched_tokens(Request("r", list(range(9))), 0) == (0, False)


def test_a_step_asks_only_as_long_as_its_budget_lasts() -> None:
    clock = Clock()

    class Slow(TinyDaemon):
        def lookup(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
            clock.now += 0.003
            return super().lookup(*args, **kwargs)  # type: ignore[arg-type]

    daemon = Slow()
    made = attached(daemon=daemon, clock=clock, lookup_budget="5ms")
    made.build_plan(Step())
    answers = [made.get_num_new_matched_tokens(Request(str(i), list(range(9))), 0)[0] for i in range(4)]
    assert answers == [0, 0, None, None]
    made.build_plan(Step())
    assert made.get_num_new_matched_tokens(Request("2", list(range(9))), 0) == (0, False)


def test_refused_lookups_are_no_hits_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(TinyDaemon):
        def lookup(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
            raise ClientError("too many hashes")

    made = attached(daemon=Refusing())
    for name in "ab":
        assert made.get_num_new_matched_tokens(Request(name, list(range(9))), 0) == (0, False)
    assert caplog.text.count("too many hashes") == 1
    assert made.counters.refused_lookups == 3, "the first one only connects"


def test_requests_that_must_not_read_the_cache_and_unaligned_local_hits_get_nothing() -> None:
    made, _, request = with_stored(9)
    assert made.get_num_new_matched_tokens(request, 2) == (0, False)
    request.skip_reading_prefix_cache = True
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_request_whose_load_failed_is_computed() -> None:
    made, daemon, request = with_stored(9)
    made.get_num_new_matched_tokens(request, 0)
    load = planned_load(made, request, Allocated([1, 2, 3]), 8)
    made.take_report(RankReport(loaded={load.number: 1}, not_loaded=frozenset({load.number})))
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    assert made.get_num_new_matched_tokens(Request("s", list(range(9))), 0) == (8, True)
    assert made.counters.failed_loads == 1
    assert not daemon.kept & daemon.leases.keys()

    # It is computed; if it is preempted it has nothing against loads any more.
    made.update_state_after_alloc(request, Allocated([1, 2, 3]), 0)
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)


@pytest.mark.parametrize("failed", [False, True])
def test_vllm_is_told_the_end_of_a_load_that_it_has_not_heard_of(failed: bool) -> None:
    made, _, request = with_stored(9)
    made.get_num_new_matched_tokens(request, 0)
    load = planned_load(made, request, Allocated([1, 2, 3]), 8)
    assert made.loads_unheard(()) == {}
    made.take_report(RankReport(loaded={load.number: 1}, not_loaded=frozenset([load.number] * failed)))
    assert made.loads_unheard(()) == {"r": failed}
    assert made.loads_unheard(()) == {}


def test_vllm_is_not_told_the_end_of_a_load_again() -> None:
    made, _, request = with_stored(9)
    made.get_num_new_matched_tokens(request, 0)
    load = planned_load(made, request, Allocated([1, 2, 3]), 8)
    made.take_report(RankReport(loaded={load.number: 1}))
    assert made.loads_unheard({"r"}) == {}


def test_blocks_that_are_gone_at_allocation_are_asked_for_all_the_same() -> None:
    made, daemon, request = with_stored(9)
    made.get_num_new_matched_tokens(request, 0)
    daemon.blocks.clear()
    daemon.expire()
    load = planned_load(made, request, Allocated([1, 2, 3]), 8)
    assert [len(each) for each in load.blocks] == [2]
    made.take_report(RankReport(loaded={load.number: 1}, not_loaded=frozenset({load.number})))
    assert (made.counters.failed_loads, made.counters.gone_loads) == (1, 1)


def test_a_hit_that_cannot_be_leased_at_once_is_loaded_all_the_same_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, daemon, request = with_stored(9)
    made.get_num_new_matched_tokens(request, 0)
    monkeypatch.setattr(daemon, "renew_nowait", lambda *_: LeaseRenewal(None))
    load = planned_load(made, request, Allocated([1, 2, 3]), 8)
    made.take_report(RankReport(loaded={load.number: 1}))
    assert (made.counters.unleased_loads, made.counters.gone_loads, made.counters.failed_loads) == (1, 0, 0)


def test_a_load_without_a_lease_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon gives a user only so many."""
    made, daemon, request = with_stored(9)
    lookup = daemon.lookup
    monkeypatch.setattr(daemon, "lookup", lambda *a, **k: replace(lookup(*a, **k), lease=None))
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)
    load = planned_load(made, request, Allocated([1, 2, 3]), 8)
    made.take_report(RankReport(loaded={load.number: 1}))
    assert (made.counters.unleased_loads, made.counters.failed_loads) == (1, 0)


def test_an_offer_that_is_not_taken_holds_nothing_for_long() -> None:
    daemon, clock = TinyDaemon(), Clock()
    made = attached(daemon=daemon, clock=clock)
    requests = [Request(name, list(range(9))) for name in "abc"]
    daemon.put(0, requests[0].block_hashes)

    # One lease for a request, however often vLLM asks for it, and it changes hands without a gap.
    for _ in range(20):
        assert made.get_num_new_matched_tokens(requests[0], 0) == (8, True)
        assert len(daemon.leases) == 1
        made.build_plan(Step())
        clock.now += FRESH_SECONDS
    assert made.get_num_new_matched_tokens(requests[0], 4) == (4, True)
    assert list(daemon.leases.values()) == [{0: requests[0].block_hashes[1]}]
    # It was computed instead, has ended, or others go first.
    made.update_state_after_alloc(requests[0], Allocated([1, 2, 3]), 0)
    assert not daemon.leases
    made.get_num_new_matched_tokens(requests[1], 0)
    made.request_finished(requests[1])
    assert not daemon.leases
    made.get_num_new_matched_tokens(requests[2], 0)
    clock.now += UNCLAIMED_SECONDS / 2
    made.get_num_new_matched_tokens(requests[0], 0)
    clock.now += UNCLAIMED_SECONDS / 2
    made.build_plan(Step())
    assert len(daemon.leases) == 1
    # It is not lost: what is taken late is loaded, and the daemon says whether it is still there.
    made.update_state_after_alloc(requests[2], Allocated([1, 2, 3]), 8)
    assert made.counters.unleased_loads == 1
    made.reset_cache()
    assert not daemon.leases


def test_what_is_loaded_is_what_the_request_needs_at_its_allocation() -> None:
    made, daemon = beside()
    request, other = Request("r", list(range(9))), Request("r", [9, *range(8)])
    daemon.put(0, request.block_hashes)
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)
    load = planned_load(made, other, Allocated([1, 2, 3]), 8)
    assert load.blocks[0].split() == other.block_hashes[:2]


def hybrid() -> tuple[object, ...]:
    return (
        full(0, 4, alignment=8),
        group(1, GroupKind.SLIDING_WINDOW, 4, alignment=8, window=5),
        group(2, GroupKind.STATE, 8, alignment=8),
    )


def test_a_hybrid_load_skips_null_blocks_and_takes_the_last_hash_of_a_coarse_block() -> None:
    daemon = TinyDaemon()
    made = attached(hybrid(), daemon=daemon)
    request = Request("r", list(range(17)))
    hashes = request.block_hashes
    daemon.put(0, hashes)
    daemon.put(1, hashes[3:4])
    daemon.put(2, hashes[3:4])
    assert made.get_num_new_matched_tokens(request, 0) == (16, True)
    load = planned_load(made, request, Allocated([1, 2, 3, 4, 5], [0, 0, 0, 6, 7], [0, 8, 9]), 16)
    loaded = {each.group: (each.hashes, each.ids()) for each in load.blocks}
    assert loaded == {0: (b"".join(hashes[:4]), [1, 2, 3, 4]), 1: (hashes[3], [6]), 2: (hashes[3], [8])}


def test_a_load_whose_needed_block_is_null_fails_instead_of_going_on_without_it() -> None:
    daemon = TinyDaemon()
    made = attached(hybrid(), daemon=daemon)
    request = Request("r", list(range(17)))
    for index in range(3):
        daemon.put(index, request.block_hashes)
    made.get_num_new_matched_tokens(request, 0)
    load = planned_load(made, request, Allocated([1, 2, 3, 4, 5], [0, 0, 0, 6, 7], [0, 0, 9]), 16)
    (state,) = (each for each in load.blocks if each.group == 2)
    assert state.hashes == bytes(32)  # which nobody has
    made.take_report(RankReport(loaded={load.number: 1}, not_loaded=frozenset({load.number})))
    assert (made.counters.failed_loads, made.counters.gone_loads) == (1, 0)


# -- stores --------------------------------------------------------------------------------------------------------


def test_full_blocks_of_confirmed_tokens_are_stored_once_and_held_until_every_rank_has_reported() -> None:
    made, pool = pooled(16, world_size=2)
    request, blocks = computed(made, pool, 14)
    (job,) = made.build_plan(Step({"r": 1})).stores
    assert stored_hashes((job,)) == request.block_hashes[:3]
    assert job.blocks[0].ids() == [each.block_id for each in blocks[:3]]
    assert [each.ref_cnt for each in blocks] == [2, 2, 2, 1]
    assert made.build_plan(Step({"r": 1})).stores == ()
    pool.free_blocks(blocks)
    assert made.has_pending_block_frees()
    made.take_report(RankReport(stored={job.number: 1}))
    made.take_report(RankReport(stored={job.number: 1}))
    assert pool.num_free == 15 - 3, "the same rank has said it twice"
    made.take_report(RankReport(stored={job.number: 2}))
    assert pool.num_free == 15
    assert pool.free_block_queue.blocks[-3:] == blocks[2::-1], "vLLM evicts the first of these first"
    assert not made.has_pending_push_work()
    assert not made.has_pending_block_frees()


def test_blocks_of_running_requests_are_stored_together_and_those_of_one_that_ends_at_once() -> None:
    clock = Clock()
    made, pool = pooled(32, clock=clock, store_interval="50ms")
    one, other, third = (
        Request(name, [*range(first, first + 8)]) for name, first in (("a", 0), ("b", 100), ("c", 200))
    )
    run(made, pool, one, 8)
    (job,) = made.build_plan(Step({"a": 1})).stores
    assert stored_hashes((job,)) == one.block_hashes
    run(made, pool, other, 8)
    run(made, pool, third, 8)
    assert made.build_plan(Step({"b": 1, "c": 1})).stores == ()
    made.request_finished(other)
    (job,) = made.build_plan(Step({"c": 1})).stores
    assert stored_hashes((job,)) == other.block_hashes
    clock.now += 0.05
    (job,) = made.build_plan(Step({"c": 1})).stores
    assert stored_hashes((job,)) == third.block_hashes


def test_tokens_in_flight_are_not_stored() -> None:
    """As with asynchronous scheduling, where a step is scheduled before the output of the last one is processed."""
    made, pool = pooled(16)
    request, blocks = computed(made, pool, 7)
    request.append([7])
    steps: list[Step] = []

    def stored() -> list[bytes]:
        """By one more step of a token, of which the one before is in flight."""
        if request.num_computed_tokens == 7:
            pool.cache_full_blocks(request, blocks, 1, 2)
        steps.append(Step({"r": 1}))
        jobs = SchedulerSide.build_plan(made, steps[-1]).stores
        request.num_computed_tokens += 1
        for step in steps[:-1]:
            made.begin_output(step, ())
            made.end_output()
            steps.remove(step)
        return stored_hashes(jobs)

    assert stored() == request.block_hashes[:1]
    assert stored() == [], "the step before may be writing the last token of the block"
    assert stored() == request.block_hashes[1:]


def test_tokens_that_a_draft_model_may_write_again_are_not_stored() -> None:
    pool = TinyPool(16)
    made = attached((full(eagle=True, lag_tokens=3),), pool)
    request, _ = computed(made, pool, 10)
    assert stored_hashes(made.build_plan(Step({"r": 1})).stores) == request.block_hashes[:1]


def test_what_another_request_has_stored_is_not_stored_again_unless_that_failed() -> None:
    made, pool = pooled(16)
    for name, expected in (("a", 2), ("b", 0)):
        request = Request(name, list(range(8)))
        run(made, pool, request, 8)
        jobs = made.build_plan(Step({name: 1})).stores
        assert len(stored_hashes(jobs)) == expected
    number = 1
    made.take_report(RankReport(stored={number: 1}, not_stored=frozenset({number})))
    request, _ = computed(made, pool, 8, "c")
    assert len(stored_hashes(made.build_plan(Step({"c": 1})).stores)) == 2
    assert made.counters.failed_stores == 1


@pytest.mark.parametrize("failed", [False, True])
def test_what_was_loaded_is_not_stored_unless_the_load_failed(failed: bool) -> None:
    pool = TinyPool(16)
    made, daemon = beside(pool=pool)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    made.get_num_new_matched_tokens(request, 0)
    blocks = pool.take(3)
    load = planned_load(made, request, Allocated([each.block_id for each in blocks]), 8)
    made.take_report(RankReport(loaded={load.number: 1}, not_loaded=frozenset([load.number] * failed)))
    for block, each in zip(blocks, request.block_hashes, strict=False):
        pool.cache(block, each + bytes(4))
    request.num_computed_tokens = 8
    assert len(stored_hashes(made.build_plan(Step({"r": 1})).stores)) == 2 * failed


def test_a_load_that_fails_or_that_a_request_waits_for_is_needed_once() -> None:
    daemon = TinyDaemon()
    made, _ = pooled(16, daemon=daemon)
    for number, failed in enumerate((True, False)):
        request = Request(str(number), list(range(9)))
        daemon.put(0, request.block_hashes)
        assert made.get_num_new_matched_tokens(request, 0) == (8, True)
        made.update_state_after_alloc(request, Allocated([1, 2, 3]), 8)
        (load,) = made.build_plan(Step()).loads
        made.take_report(RankReport(loaded={load.number: 1}, not_loaded=frozenset([load.number] * failed)))
        # vLLM asks again for what has failed, and allocates the rest of what was loaded.
        assert not failed or made.get_num_new_matched_tokens(request, 0) == (0, False)
        made.update_state_after_alloc(request, Allocated([1, 2, 3]), 0)
        made.build_plan(Step({request.request_id: 1}))
    assert daemon.gains == [(8, 0), (8, 8)]


def test_what_a_lookup_misses_is_stored_again() -> None:
    made, pool = pooled(16)
    request = Request("a", list(range(9)))
    run(made, pool, request, 8)
    (job,) = made.build_plan(Step({"a": 1})).stores
    made.take_report(RankReport(stored={job.number: 1}))
    other = Request("b", list(range(9)))
    assert made.get_num_new_matched_tokens(other, 0) == (0, False)  # the daemon has evicted them
    run(made, pool, other, 8)
    assert stored_hashes(made.build_plan(Step({"b": 1})).stores) == other.block_hashes


def test_prompt_only_stores_no_answer() -> None:
    made, pool = pooled(16, store_prompt_only=True)
    request = Request("r", list(range(6)))
    request.append(range(6, 12))
    run(made, pool, request, 12)
    assert stored_hashes(made.build_plan(Step({"r": 1})).stores) == request.block_hashes[:1]


def test_another_run_of_the_daemon_gets_everything_again() -> None:
    made, pool = pooled(16)
    request, _ = computed(made, pool, 8)
    (job,) = made.build_plan(Step({"r": 1})).stores
    made.take_report(RankReport(stored={job.number: 1}, attached={0: 0}))
    made.take_report(RankReport(attached={0: 8}))
    assert stored_hashes(made.build_plan(Step({"r": 1})).stores) == request.block_hashes


@pytest.mark.parametrize(
    ("longest", "most"),
    [
        (0, 8),
        (8, 8),
        (9, 7),  # the longest request fits beside them
        (13, 3),
        (16, 2),  # it does not: stores are made all the same, an eighth of the blocks at a time
    ],
)
def test_where_vllm_cannot_wait_stores_leave_the_engine_room_for_its_longest_request(longest: int, most: int) -> None:
    made, pool = pooled(17, longest_blocks=longest, waits=False)
    computed(made, pool, 64)
    (job,) = made.build_plan(Step({"r": 1})).stores
    assert len(stored_hashes((job,))) == most


def test_no_block_is_waited_for_that_a_daemon_does_not_give_back_soon() -> None:
    pool, clock, daemon = TinyPool(32), Clock(), TinyDaemon()
    made = attached(pool=pool, clock=clock, daemon=daemon)
    requests = [Request(f"r{i}", list(range(100 * i, 100 * i + 14))) for i in range(3)]
    tables = [run(made, pool, each, 14) for each in requests[:2]]
    (job,) = made.build_plan(Step({"r0": 1})).stores
    pool.free_blocks(tables[0])
    assert made.has_pending_block_frees()
    for _ in range(REPORT_STEPS - 1):
        clock.now += HUNG_SECONDS  # steps take as long as they take: the end of a store is known only after some
        made.build_plan(Step())
        assert made.has_pending_block_frees()
    made.build_plan(Step())
    assert not made.has_pending_block_frees()

    # Nor is it given more of them, by no way of selection.
    before = made.counters.held_back_stores
    assert made.build_plan(Step({"r1": 1})).stores == ()
    made.request_finished(requests[1])
    assert made.build_plan(Step()).stores == ()
    assert made.counters.held_back_stores > before
    assert made.has_pending_push_work(), "the engine goes on asking whether it has come back"
    made.take_report(RankReport(stored={job.number: 1}))
    (late,) = made.build_plan(Step()).stores
    assert stored_hashes((late,)) == requests[1].block_hashes[:3], "what was due meanwhile is stored"
    made.take_report(RankReport(stored={late.number: 1}))
    assert not made.has_pending_push_work()
    blocks = run(made, pool, requests[2], 14)
    assert made.build_plan(Step({"r2": 1})).stores
    pool.free_blocks(blocks)
    assert made.has_pending_block_frees()
    daemon.breaker_state = BreakerState.OPEN
    assert not made.has_pending_block_frees(), "lookups have found out already"


def test_a_reset_does_not_make_the_engine_wait_for_a_daemon_that_hangs() -> None:
    clock = Clock()
    made, pool = pooled(32, clock=clock)
    _, blocks = computed(made, pool, 14)
    made.build_plan(Step({"r": 1}))
    pool.free_blocks(blocks)
    assert made.reset_cache() is False
    for _ in range(REPORT_STEPS):
        clock.now += SOON_SECONDS
        made.build_plan(Step())
    assert not made.has_pending_block_frees()


@pytest.mark.parametrize("longest", [0, 8, 16])
def test_stores_that_end_may_hold_all_blocks_so_that_none_is_overwritten(longest: int) -> None:
    made, pool = pooled(17, longest_blocks=longest)
    request, blocks = computed(made, pool, 64)
    made.request_finished(request)
    pool.free_blocks(blocks)
    (job,) = made.build_plan(Step()).stores
    assert stored_hashes((job,)) == request.block_hashes
    assert pool.num_free == 0
    assert made.has_pending_block_frees(), "the next request waits"
    made.take_report(RankReport(stored={job.number: 1}))
    assert (pool.num_free, made.counters.given_up_blocks) == (16, 0)


def test_a_slow_daemon_gets_no_more_blocks_than_one_that_hangs() -> None:
    clock = Clock()
    made, pool = pooled(17, clock=clock, longest_blocks=13)
    jobs = []
    for i in range(4):
        request = Request(f"r{i}", [i] * 8)
        run(made, pool, request, 8)
        jobs += made.build_plan(Step({request.request_id: 1})).stores
    assert len(jobs) == 4
    for job in jobs[1:]:
        clock.now += HUNG_SECONDS / 2
        made.take_report(RankReport(stored={job.number: 1}))
        for _ in range(REPORT_STEPS):
            made.build_plan(Step())
    late = Request("late", [9] * 16)
    run(made, pool, late, 16)
    (job,) = made.build_plan(Step({"late": 1})).stores
    assert len(stored_hashes((job,))) == 1, "three may be held, and two are"


def test_a_daemon_that_ends_no_store_is_given_up_when_it_holds_what_the_engine_needs() -> None:
    clock = Clock()
    made, pool = pooled(17, clock=clock, longest_blocks=8)
    computed(made, pool, 64)
    (job,) = made.build_plan(Step({"r": 1})).stores

    def steps() -> list[bool]:
        return [made.build_plan(Step()).give_up for _ in range(REPORT_STEPS + 1)]

    assert not any(steps())
    clock.now += GIVE_UP_SECONDS
    assert steps() == [True] + REPORT_STEPS * [False], "once"
    assert made.counters.given_up_daemons == 1
    clock.now += GIVE_UP_SECONDS
    assert any(steps()), "again, if the ranks still hold them"
    made.take_report(RankReport(attached={0: 0}, stored={job.number: 1}, not_stored=frozenset([job.number])))
    clock.now += GIVE_UP_SECONDS
    assert not any(steps())


def test_a_daemon_that_hangs_with_few_blocks_is_not_given_up() -> None:
    clock = Clock()
    made, pool = pooled(17, clock=clock, longest_blocks=8)
    computed(made, pool, 32)
    assert made.build_plan(Step({"r": 1})).stores
    clock.now += 10 * GIVE_UP_SECONDS
    assert not any(made.build_plan(Step()).give_up for _ in range(2 * REPORT_STEPS))


def test_a_request_that_ends_with_all_of_it_considered_asks_for_no_room() -> None:
    """Every refusal of room is counted."""
    made, pool = pooled(9, waits=False)
    request, _ = computed(made, pool, 16)
    assert len(stored_hashes(made.build_plan(Step({"r": 1})).stores)) == 4
    before = made.counters.held_back_stores
    made.request_finished(request)
    assert made.counters.held_back_stores == before


def test_where_vllm_cannot_wait_stores_leave_the_engine_half_of_its_blocks() -> None:
    made, pool = pooled(9, waits=False)
    computed(made, pool, 24)
    (job,) = made.build_plan(Step({"r": 1})).stores
    assert len(stored_hashes((job,))) == 4
    assert made.build_plan(Step({"r": 1})).stores == ()
    assert made.counters.held_back_stores
    made.take_report(RankReport(stored={job.number: 1}))
    assert len(stored_hashes(made.build_plan(Step({"r": 1})).stores)) == 2


def test_blocks_that_vllm_does_not_cache_are_not_stored() -> None:
    made, pool = pooled(16)
    request, blocks = computed(made, pool, 12)
    pool.uncache(blocks[1])
    jobs = made.build_plan(Step({"r": 1})).stores
    assert stored_hashes(jobs) == [request.block_hashes[0], request.block_hashes[2]]


def test_without_a_block_pool_nothing_is_stored() -> None:
    made = attached()
    request = Request("r", list(range(8)))
    made.update_state_after_alloc(request, Allocated([1, 2]), 0)
    request.num_computed_tokens = 8
    assert made.build_plan(Step({"r": 1})).stores == ()
    made.request_finished(request)
    assert not made.has_pending_push_work()


# -- lazy ----------------------------------------------------------------------------------------------------------


def test_lazy_mode_stores_what_is_evicted_next_before_it_is() -> None:
    made, pool = pooled(13, store_mode="lazy", lazy_watermark=8)
    request, blocks = computed(made, pool, 16)
    assert made.build_plan(Step({"r": 1})).stores == ()
    pool.free_blocks(reversed(blocks))  # behind the 8 that were never used
    made.build_plan(Step())
    other = pool.take(3)
    step = Step(scheduled_new_reqs=[NewRequest("s", ([each.block_id for each in other],))])
    (job,) = made.build_plan(step).stores
    assert set(stored_hashes((job,))) == set(request.block_hashes[1:])
    assert {each.ref_cnt for each in blocks} == {0, 1}
    made.take_report(RankReport(stored={job.number: 1}))
    assert {each.ref_cnt for each in blocks} == {0}


def test_lazy_mode_does_not_walk_while_nothing_is_allocated() -> None:
    made, pool = pooled(13, store_mode="lazy", lazy_watermark=8)
    made.build_plan(Step())
    del pool.free_block_queue  # a walk would miss it
    cached = CachedRequests(["r"], [None])
    made.build_plan(Step({"r": 1}, scheduled_cached_reqs=cached))


# -- resets --------------------------------------------------------------------------------------------------------


def gpu_reset(pool: TinyPool) -> None:
    for block in pool.blocks:
        pool.uncache(block)


def store_all(made: SchedulerSide, daemon: TinyDaemon, *names: str) -> None:
    """Let the ranks store what these requests have."""
    (job,) = made.build_plan(Step(dict.fromkeys(names, 1))).stores
    daemon.put(0, stored_hashes((job,)))
    made.take_report(RankReport(stored={job.number: 1}))


def test_after_a_reset_nothing_of_before_is_offered_and_others_keep_theirs() -> None:
    daemon = TinyDaemon()
    made, other = attached(pool=TinyPool(16), daemon=daemon), attached(pool=TinyPool(16), daemon=daemon)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)
    assert made.reset_cache() is True
    daemon.put(0, request.block_hashes)  # another engine, which has the old weights still, goes on storing
    assert made.get_num_new_matched_tokens(Request("s", list(range(9))), 0) == (0, False)
    assert other.get_num_new_matched_tokens(request, 0) == (8, True)


def test_what_is_stored_after_a_reset_is_this_engines_alone() -> None:
    pool, daemon = TinyPool(16), TinyDaemon()
    made, other = attached(pool=pool, daemon=daemon), attached(pool=TinyPool(16), daemon=daemon)
    assert made.reset_cache() is True
    assert other.reset_cache() is True
    request = Request("r", list(range(9)))
    blocks = run(made, pool, request, 8)
    store_all(made, daemon, "r")
    made.request_finished(request)
    pool.free_blocks(blocks)
    assert made.get_num_new_matched_tokens(Request("s", list(range(9))), 0) == (8, True)
    assert other.get_num_new_matched_tokens(Request("s", list(range(9))), 0) == (0, False)
    loading = Request("t", list(range(9)))
    assert made.get_num_new_matched_tokens(loading, 0) == (8, True)
    load = planned_load(made, loading, Allocated([14, 15, 13]), 8)
    assert set(daemon.blocks) == {(0, each) for each in load.blocks[0].split()}
    (lease,) = daemon.kept
    assert daemon.leases[lease] == {0: load.blocks[0].hashes}


def test_a_reset_that_vllm_refuses_keeps_the_cache_shut_until_one_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    """The GPU's own cache keeps KV of the old weights then, and requests make more of it."""
    pool = TinyPool(16)
    made, daemon = beside(pool=pool)
    _, blocks = computed(made, pool, 8)
    (job,) = made.build_plan(Step({"r": 1})).stores
    for _ in range(2):
        assert made.reset_cache() is False
    assert caplog.text.count("refused to reset its prefix cache") == 1
    assert made.has_pending_push_work()  # vLLM goes on stepping: the job ends, and its blocks are free
    made.take_report(RankReport(stored={job.number: 1}))
    assert not made.has_pending_push_work()
    daemon.put(0, chain(range(8)))
    other = Request("s", list(range(8)))
    run(made, pool, other, 8)
    assert made.build_plan(Step({"r": 1, "s": 1})).stores == ()
    assert made.get_num_new_matched_tokens(Request("t", list(range(9))), 0) == (0, False)
    pool.free_blocks(blocks)
    assert made.reset_cache() is False  # a request goes on
    made.request_finished(other)
    pool.free_blocks([block for block in pool.blocks[1:] if block.ref_cnt])
    assert made.reset_cache() is False  # vLLM could still hit
    gpu_reset(pool)
    assert made.reset_cache() is True
    assert (made.counters.resets, made.counters.refused_resets, made.counters.unnamed_resets) == (5, 4, 1)
    assert made.get_num_new_matched_tokens(Request("t", list(range(9))), 0) == (0, False)
    run(made, pool, Request("u", list(range(8))), 8)
    assert made.build_plan(Step({"u": 1})).stores != ()


def asleep_and_awake(*woken: dict[int, bool], resets: bool = True) -> tuple[int, SchedulerSide]:
    """Hits on what was stored before an engine of two ranks slept, after these reports of its ranks."""
    daemon = TinyDaemon()
    made = attached(pool=TinyPool(16), daemon=daemon, world_size=2)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)
    made.request_finished(request)
    assert not resets or made.reset_cache() is True
    for each in woken:
        made.take_report(RankReport(woken=each))
    found, _ = made.get_num_new_matched_tokens(Request("s", list(range(9))), 0)
    assert found is not None
    return found, made


@pytest.mark.parametrize("woken", [({0: True, 1: True},), ({0: True}, {1: True})])
def test_blocks_of_before_hit_when_every_rank_wakes_with_the_weights_of_the_start(
    woken: tuple[dict[int, bool], ...],
) -> None:
    assert asleep_and_awake(*woken)[0] == 8


@pytest.mark.parametrize("woken", [({0: True},), ({0: True, 1: False},), ({0: False}, {1: True})])
def test_blocks_of_before_do_not_hit_while_a_rank_may_have_other_weights(woken: tuple[dict[int, bool], ...]) -> None:
    assert asleep_and_awake(*woken)[0] == 0


def test_waking_with_other_weights_is_a_reset_where_vllm_told_of_none() -> None:
    found, made = asleep_and_awake({0: True, 1: False}, resets=False)
    assert (found, made.counters.unnamed_resets) == (0, 1)
    made.take_report(RankReport(woken={0: True, 1: True}))  # the next time
    assert made.get_num_new_matched_tokens(Request("t", list(range(9))), 0) == (8, True)


@pytest.mark.parametrize(("level", "includes", "resets"), [(0, False, 0), (1, False, 1), (2, False, 1), (2, True, 1)])
def test_falling_asleep_is_one_reset_whether_or_not_vllm_includes_the_connector(
    level: int, includes: bool, resets: int
) -> None:
    made = attached(pool=TinyPool(16))

    class EngineCore:
        def sleep(self, level: int = 1) -> None:
            if level and includes:
                made.reset_cache()

    core = EngineCore()
    end = tell_of_sleep(core, made)
    core.sleep(level=level)
    assert made.counters.resets == resets
    end()
    core.sleep()
    assert made.counters.resets == resets + includes


def test_a_request_from_before_the_engine_woke_with_other_weights_is_not_stored() -> None:
    made, pool = pooled(16)
    computed(made, pool, 8)
    made.take_report(RankReport(woken={0: False}))
    assert made.build_plan(Step({"r": 1})).stores == ()
    made.end_step()
    run(made, pool, Request("s", list(range(8))), 8)
    assert made.build_plan(Step({"s": 1})).stores != ()


def test_engines_share_again_when_their_weights_have_the_same_new_name(tmp_path: Path) -> None:
    daemon, pools, names = TinyDaemon(), [TinyPool(16), TinyPool(16)], [tmp_path / "a", tmp_path / "b"]
    names[0].write_text("before the start")
    one, other = (
        attached(pool=pool, daemon=daemon, weights_version_file=str(name))
        for pool, name in zip(pools, names, strict=True)
    )
    request = Request("r", list(range(9)))
    assert one.reset_cache() is True  # nobody has changed the file
    assert one.counters.unnamed_resets == 1
    names[0].write_text("step 1\n")
    assert one.reset_cache() is True
    assert one.counters.unnamed_resets == 1
    run(one, pools[0], request, 8)
    store_all(one, daemon, "r")
    assert other.get_num_new_matched_tokens(Request("s", list(range(9))), 0) == (0, False)
    names[1].write_text("step 1")
    assert other.reset_cache() is True
    assert other.get_num_new_matched_tokens(Request("t", list(range(9))), 0) == (8, True)
    assert other.reset_cache() is True  # somebody forgot to change the name
    assert other.counters.unnamed_resets == 1
    assert other.get_num_new_matched_tokens(Request("u", list(range(9))), 0) == (0, False)


def test_engines_that_are_started_with_another_name_of_their_weights_share_nothing() -> None:
    daemon = TinyDaemon()
    named = [attached(pool=TinyPool(16), daemon=daemon, weights_version=name) for name in ("1", "1", "2")]
    pool, request = TinyPool(16), Request("r", list(range(9)))
    one = attached(pool=pool, daemon=daemon, weights_version="1")
    run(one, pool, request, 8)
    store_all(one, daemon, "r")
    found = [made.get_num_new_matched_tokens(Request("s", list(range(9))), 0)[0] for made in named]
    assert found == [8, 8, 0]
    assert attached(daemon=daemon).get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_reset_gives_back_what_was_planned_and_not_sent() -> None:
    made, pool = pooled(16)
    request, blocks = computed(made, pool, 8)
    made.request_finished(request)
    pool.free_blocks(blocks)
    assert pool.num_free < 15
    assert made.reset_cache() is False  # vLLM was asked before
    assert pool.num_free == 15
    gpu_reset(pool)
    assert made.reset_cache() is True
    assert made.build_plan(Step()).stores == ()


def test_after_a_reset_that_vllm_raised_an_error_for_nothing_is_offloaded_until_one_succeeds() -> None:
    made, pool = pooled(16)
    made.reset_failed()
    assert made.why_not is WhyNot.RESET_REFUSED
    _, blocks = computed(made, pool, 8)
    assert made.build_plan(Step({"r": 1})).stores == ()
    made.request_finished(made._requests["r"].request)
    pool.free_blocks(blocks)
    for block in blocks:
        pool.uncache(block)
    assert made.reset_cache()
    computed(made, pool, 8, "s")
    assert made.build_plan(Step({"s": 1})).stores


def test_shutdown_closes_the_client() -> None:
    daemon = TinyDaemon()
    side(daemon=daemon).shutdown()
    assert daemon.closed


# -- traces --------------------------------------------------------------------------------------------------------


def test_a_load_carries_its_requests_traceparent_and_a_store_that_of_its_first_sampled_request() -> None:
    pool = TinyPool(64)
    made, daemon = beside(pool=pool)
    loaded = Request("l", list(range(500, 509)), trace_headers={"traceparent": "t-l", "tracestate": "x"})
    daemon.put(0, loaded.block_hashes)
    made.get_num_new_matched_tokens(loaded, 0)
    load = planned_load(made, loaded, Allocated([14, 15, 13]), 8)
    assert load.traceparent == "t-l"
    headers = (None, {"traceparent": "t-b-00"}, {"traceparent": "t-c-01"}, {"traceparent": "t-d-01"})
    requests = [
        Request(name, [*range(first, first + 8)], trace_headers=each)
        for name, first, each in zip("abcd", (0, 100, 200, 300), headers, strict=True)
    ]
    for request in requests:
        run(made, pool, request, 8)
    (store,) = made.build_plan(Step(dict.fromkeys("abcd", 1))).stores
    assert store.traceparent == "t-c-01"
    more = pool.take(1)
    requests[1].append(range(900, 904))
    pool.cache(more[0], requests[1].block_hashes[2] + bytes(4))
    requests[1].num_computed_tokens = 12
    (store,) = made.build_plan(Step({"b": 1})).stores
    assert store.traceparent is None  # what came before does not stay


def test_blocks_that_are_known_take_no_room_from_another_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STEP_BLOCKS", 4)
    made, pool = pooled(40)
    first = Request("a", list(range(16)))
    run(made, pool, first, 16)
    (job,) = made.build_plan(Step({"a": 1})).stores
    made.take_report(RankReport(stored={job.number: 1}))
    made.request_finished(first)
    known, new = Request("b", list(range(16))), Request("c", list(range(100, 116)))
    for request in (known, new):
        run(made, pool, request, 16)
    (job,) = made.build_plan(Step({"b": 1, "c": 1})).stores
    assert stored_hashes((job,)) == new.block_hashes


def test_no_job_names_a_block_twice_whatever_the_filter_of_stored_blocks_forgets() -> None:
    """The daemon declines such a job as a whole."""
    made, pool = pooled(40)
    first, second = Request("a", list(range(16))), Request("b", list(range(16)))
    between = Request("c", list(range(100, 116)))
    # Other hashes, at the same places of a table of any size.
    between.block_hashes = [each[:4] + bytes(28) for each in first.block_hashes]
    for request in (first, between):
        run(made, pool, request, 16)
    table = [pool.cached_block_hash_to_block.get_one_block(each + bytes(4)) for each in first.block_hashes]
    pool.touch(table)  # the second request has hit all of it
    made.update_state_after_alloc(second, LiveTables([table]), 0)
    second.num_computed_tokens = 16
    for request in (first, between, second):
        made.request_finished(request)  # each is planned by itself
    (job,) = made.build_plan(Step()).stores
    for part in job.blocks:
        check_block_ids(np.array(part.ids()), pool.num_gpu_blocks)
    assert sorted(stored_hashes((job,))) == sorted(first.block_hashes + between.block_hashes)

    # Neither does another job while the first one runs, and no block is lost or given up.
    made.on_new_request(third := Request("d", list(range(16))))
    made.update_state_after_alloc(third, LiveTables([table]), 0)
    third.num_computed_tokens = 16
    made.request_finished(third)
    assert not made.build_plan(Step()).stores
    made.take_report(RankReport(stored={job.number: 1}))
    assert made.counters.given_up_blocks == 0
    assert all(block.ref_cnt == 2 for block in table)  # the test's own and the first request's


def test_ranks_on_several_nodes_offload_nothing_and_one_sentence_says_why(caplog: pytest.LogCaptureFixture) -> None:
    made = side(world_size=2)
    made.take_report(RankReport(attached={0: 5, 1: 6}, nodes={0: "here", 1: "there"}))
    assert not made.attached
    counts = made.take_counts()
    assert (counts["attached"], counts["not_offloading|several_nodes"], counts["not_offloading|not_attached"]) == (
        0,
        1,
        0,
    )
    (text,) = [each.getMessage() for each in caplog.records]
    assert "2 ranks run on 2 nodes" in text


def gauges(made: SchedulerSide) -> dict[str, int]:
    """Those that have changed."""
    return {name: value for name, value in made.take_counts().items() if name.partition("|")[0] in GAUGES}


def test_gauges_say_whether_the_engine_offloads_and_why_not() -> None:
    pool = TinyPool(16)
    made = side(pool=pool)
    first = gauges(made)
    assert (first["attached"], first["not_offloading|not_attached"], first["pending_jobs"]) == (0, 1, 0)
    made.take_report(ATTACHED)
    assert gauges(made) == {"attached": 1, "not_offloading|not_attached": 0}
    request = Request("a", list(range(9)))
    run(made, pool, request, 8)
    (job,) = made.build_plan(Step({"a": 1})).stores
    assert gauges(made)["pending_jobs"] == 1
    made.take_report(RankReport(stored={job.number: 1}))
    assert gauges(made) == {"pending_jobs": 0}
    made.take_report(RankReport(attached={0: 0}))
    assert gauges(made) == {"attached": 0, "not_offloading|not_attached": 1}


def test_ranks_of_two_daemons_are_told_from_ranks_that_are_not_attached() -> None:
    made = side(world_size=2)
    made.take_report(RankReport(attached={0: 5}, nodes={0: "here", 1: "here"}))
    assert made.why_not is WhyNot.NOT_ATTACHED
    made.take_report(RankReport(attached={1: 6}))
    assert made.why_not is WhyNot.SEVERAL_DAEMONS
    made.take_report(RankReport(attached={0: 6}))
    assert made.why_not is None


def test_events_are_told_which_blocks_of_which_request_are_stored() -> None:
    told: list[tuple[str, int, bytes]] = []

    class Told:
        def note(self, request: Request, of: Group, index: int, block_hash: bytes, *, inside: int) -> None:
            assert not inside
            told.append((request.request_id, index, block_hash))

        def stored(self, index: int, hashes: list[bytes]) -> None:
            told.extend(("stored", index, each) for each in hashes)

        def notes(self, index: int, hashes: list[bytes]) -> bytes:
            return b""

        def all_removed(self) -> None:
            pass

    made, pool = pooled(20, events=Told())
    first, second = Request("a", [1] * 4 + [2] * 8), Request("b", [1] * 4 + [3] * 8)
    for request in (first, second):
        run(made, pool, request, 12)
    (job,) = made.build_plan(Step({"a": 1, "b": 1})).stores
    a, b = first.block_hashes, second.block_hashes
    assert told == [("a", 0, a[0]), ("a", 1, a[1]), ("a", 2, a[2]), ("b", 1, b[1]), ("b", 2, b[2])]
    told.clear()
    made.take_report(RankReport(stored={job.number: 1}))
    assert told == [("stored", 0, each) for each in (*a, *b[1:])]
