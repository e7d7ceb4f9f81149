from __future__ import annotations

import pytest

from kvsidecar.client import PendingLease
from kvsidecar.client.results import BREAKER_OPEN, DAEMON_LOST, NO_ANSWER
from kvsidecar.errors import ClientError, DaemonUnreachable
from kvsidecar.integrations.vllm import stores
from kvsidecar.integrations.vllm.groups import Group, Kind
from kvsidecar.integrations.vllm.metadata import RankReport, StoreJob
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from tests.integrations.engine import (
    EPOCH,
    Allocated,
    Block,
    CachedRequests,
    Clock,
    NewRequest,
    Request,
    Step,
    TinyDaemon,
    TinyPool,
    chain,
    full,
    group,
    side,
)

SECONDS = 30.0
ATTACHED = RankReport(attached={0: EPOCH})


def attached(*args: object, **kwargs: object) -> SchedulerSide:
    made = side(*args, **kwargs)  # type: ignore[arg-type]
    made.take_report(ATTACHED)
    return made


def run(made: SchedulerSide, pool: TinyPool, request: Request, tokens: int) -> list[Block]:
    """Schedule a new request's first ``tokens`` tokens, and let the step be over."""
    blocks = pool.take(-(-tokens // 4))
    for block, each in zip(blocks, request.block_hashes, strict=False):
        pool.cache(block, each + bytes(4))
    made.update_state_after_alloc(request, Allocated([each.block_id for each in blocks]), 0)
    made.build_orders(Step({request.request_id: tokens}))
    request.num_computed_tokens = tokens
    return blocks


def stored_hashes(jobs: tuple[StoreJob, ...], group_index: int = 0) -> list[bytes]:
    packed = b"".join(each.hashes for job in jobs for each in job.blocks if each.group == group_index)
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]


# -- hits ----------------------------------------------------------------------------------------------------------


def test_a_hit_is_offered_loaded_under_a_lease_and_the_lease_released_when_every_rank_has_reported() -> None:
    daemon = TinyDaemon()
    made = side(daemon=daemon, world_size=2)
    made.take_report(RankReport(attached={0: EPOCH, 1: EPOCH}))
    request = Request("r", list(range(14)))
    daemon.put(0, request.block_hashes)

    assert made.get_num_new_matched_tokens(request, 4) == (8, True)
    assert not daemon.leases  # no side effect yet
    made.update_state_after_alloc(request, Allocated([5, 9, 3, 8]), 8)
    (load,) = made.build_orders(Step()).loads

    (blocks,) = load.blocks
    assert (load.request_id, blocks.hashes) == ("r", b"".join(request.block_hashes[1:3]))
    assert blocks.ids() == [9, 3]
    assert list(daemon.leases.values()) == [{0: blocks.hashes}]
    assert made.has_pending_push_work()

    made.take_report(RankReport(loaded={load.number: 1}))
    assert daemon.leases
    made.take_report(RankReport(loaded={load.number: 1}))
    assert not daemon.leases
    assert not made.has_pending_push_work()


def test_the_same_question_is_not_asked_twice_within_a_tenth_of_a_second() -> None:
    daemon, clock = TinyDaemon(), Clock()
    made = attached(daemon=daemon, clock=clock)
    request = Request("r", list(range(9)))

    for now in (100.0, 100.05, 100.2):
        clock.now = now
        assert made.get_num_new_matched_tokens(request, 0) == (0, False)
        made.build_orders(Step())

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


@pytest.mark.parametrize("reason", [DAEMON_LOST, BREAKER_OPEN])
def test_a_lost_daemon_is_not_waited_for(reason: str) -> None:
    daemon = TinyDaemon()
    made = attached(daemon=daemon)
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
    made.build_orders(Step())

    answers = [made.get_num_new_matched_tokens(Request(str(i), list(range(9))), 0)[0] for i in range(4)]
    assert answers == [0, 0, None, None]
    made.build_orders(Step())
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
    daemon = TinyDaemon()
    made = attached(daemon=daemon)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)

    assert made.get_num_new_matched_tokens(request, 2) == (0, False)
    request.skip_reading_prefix_cache = True
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_request_whose_load_failed_is_computed() -> None:
    daemon = TinyDaemon()
    made = attached(daemon=daemon)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    made.get_num_new_matched_tokens(request, 0)
    made.update_state_after_alloc(request, Allocated([1, 2, 3]), 8)
    (load,) = made.build_orders(Step()).loads
    made.take_report(RankReport(loaded={load.number: 1}, not_loaded=frozenset({load.number})))

    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    assert made.get_num_new_matched_tokens(Request("s", list(range(9))), 0) == (8, True)
    assert made.counters.failed_loads == 1
    assert not daemon.leases


def test_blocks_that_are_gone_at_allocation_are_asked_for_all_the_same() -> None:
    daemon = TinyDaemon()
    made = attached(daemon=daemon)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    made.get_num_new_matched_tokens(request, 0)
    daemon.blocks.clear()
    made.update_state_after_alloc(request, Allocated([1, 2, 3]), 8)

    (load,) = made.build_orders(Step()).loads
    assert [len(each) for each in load.blocks] == [2]
    made.take_report(RankReport(loaded={load.number: 1}, not_loaded=frozenset({load.number})))
    assert made.counters.gone_loads == 1


def test_a_hit_that_cannot_be_leased_at_once_is_loaded_all_the_same_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon = TinyDaemon()
    made = attached(daemon=daemon)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    made.get_num_new_matched_tokens(request, 0)
    monkeypatch.setattr(daemon, "lease", lambda *_: PendingLease(None))
    made.update_state_after_alloc(request, Allocated([1, 2, 3]), 8)

    (load,) = made.build_orders(Step()).loads
    made.take_report(RankReport(loaded={load.number: 1}))
    assert (made.counters.unleased_loads, made.counters.gone_loads, made.counters.failed_loads) == (1, 0, 0)


def test_fewer_tokens_than_offered_are_loaded_if_vllm_takes_fewer() -> None:
    daemon = TinyDaemon()
    made = attached(daemon=daemon)
    request = Request("r", list(range(13)))
    daemon.put(0, request.block_hashes)
    assert made.get_num_new_matched_tokens(request, 0) == (12, True)
    made.update_state_after_alloc(request, Allocated([1, 2, 3, 4]), 8)

    (load,) = made.build_orders(Step()).loads
    assert load.blocks[0].ids() == [1, 2]


def test_what_is_loaded_is_what_the_request_needs_at_its_allocation() -> None:
    daemon = TinyDaemon()
    made = attached(daemon=daemon)
    request, other = Request("r", list(range(9))), Request("r", [9, *range(8)])
    daemon.put(0, request.block_hashes)
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)
    made.update_state_after_alloc(other, Allocated([1, 2, 3]), 8)

    (load,) = made.build_orders(Step()).loads
    assert load.blocks[0].split() == other.block_hashes[:2]


def hybrid() -> tuple[object, ...]:
    return (
        full(0, 4, alignment=8),
        group(1, Kind.SLIDING_WINDOW, 4, alignment=8, window=5),
        group(2, Kind.STATE, 8, alignment=8),
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
    made.update_state_after_alloc(request, Allocated([1, 2, 3, 4, 5], [0, 0, 0, 6, 7], [0, 8, 9]), 16)
    (load,) = made.build_orders(Step()).loads

    loaded = {each.group: (each.hashes, each.ids()) for each in load.blocks}
    assert loaded == {0: (b"".join(hashes[:4]), [1, 2, 3, 4]), 1: (hashes[3], [6]), 2: (hashes[3], [8])}


def test_a_load_whose_needed_block_is_null_fails_instead_of_going_on_without_it() -> None:
    daemon = TinyDaemon()
    made = attached(hybrid(), daemon=daemon)
    request = Request("r", list(range(17)))
    for index in range(3):
        daemon.put(index, request.block_hashes)
    made.get_num_new_matched_tokens(request, 0)
    made.update_state_after_alloc(request, Allocated([1, 2, 3, 4, 5], [0, 0, 0, 6, 7], [0, 0, 9]), 16)

    (load,) = made.build_orders(Step()).loads
    (state,) = (each for each in load.blocks if each.group == 2)
    assert state.hashes == bytes(32)  # which nobody has
    made.take_report(RankReport(loaded={load.number: 1}, not_loaded=frozenset({load.number})))
    assert made.counters.gone_loads == 1


# -- stores --------------------------------------------------------------------------------------------------------


def test_full_blocks_of_confirmed_tokens_are_stored_once_and_held_until_every_rank_has_reported() -> None:
    pool = TinyPool(16)
    made = side(pool=pool, world_size=2)
    made.take_report(RankReport(attached={0: EPOCH, 1: EPOCH}))
    request = Request("r", list(range(14)))
    blocks = run(made, pool, request, 14)

    (job,) = made.build_orders(Step({"r": 1})).stores
    assert stored_hashes((job,)) == request.block_hashes[:3]
    assert job.blocks[0].ids() == [each.block_id for each in blocks[:3]]
    assert [each.ref_cnt for each in blocks] == [2, 2, 2, 1]
    assert made.build_orders(Step({"r": 1})).stores == ()

    pool.free_blocks(blocks)
    assert made.has_pending_block_frees()
    made.take_report(RankReport(stored={job.number: 1}))
    assert pool.num_free == 15 - 3
    made.take_report(RankReport(stored={job.number: 1}))
    assert pool.num_free == 15
    assert pool.free_block_queue.blocks[-3:] == blocks[2::-1], "vLLM evicts the first of these first"
    assert not made.has_pending_push_work()
    assert not made.has_pending_block_frees()


def test_blocks_of_running_requests_are_stored_together_and_those_of_one_that_ends_at_once() -> None:
    pool, clock = TinyPool(32), Clock()
    made = side(pool=pool, clock=clock, store_interval="50ms")
    made.take_report(ATTACHED)
    one, other, third = (
        Request(name, [*range(first, first + 8)]) for name, first in (("a", 0), ("b", 100), ("c", 200))
    )
    run(made, pool, one, 8)
    (job,) = made.build_orders(Step({"a": 1})).stores
    assert stored_hashes((job,)) == one.block_hashes

    run(made, pool, other, 8)
    run(made, pool, third, 8)
    assert made.build_orders(Step({"b": 1, "c": 1})).stores == ()
    made.request_finished(other)
    (job,) = made.build_orders(Step({"c": 1})).stores
    assert stored_hashes((job,)) == other.block_hashes
    clock.now += 0.05
    (job,) = made.build_orders(Step({"c": 1})).stores
    assert stored_hashes((job,)) == third.block_hashes


def test_tokens_in_flight_are_not_stored() -> None:
    pool = TinyPool(16)
    made = attached(pool=pool)
    request = Request("r", list(range(8)))
    run(made, pool, request, 8)
    request.num_output_placeholders = 1  # async scheduling: the token behind these is not known yet

    assert stored_hashes(made.build_orders(Step({"r": 1})).stores) == request.block_hashes[:1]


def test_tokens_that_a_draft_model_may_write_again_are_not_stored() -> None:
    pool = TinyPool(16)
    made = attached((full(eagle=True, lag_tokens=3),), pool)
    request = Request("r", list(range(10)))
    run(made, pool, request, 10)

    assert stored_hashes(made.build_orders(Step({"r": 1})).stores) == request.block_hashes[:1]


def test_what_another_request_has_stored_is_not_stored_again_unless_that_failed() -> None:
    pool = TinyPool(16)
    made = attached(pool=pool)
    for name, expected in (("a", 2), ("b", 0)):
        request = Request(name, list(range(8)))
        run(made, pool, request, 8)
        jobs = made.build_orders(Step({name: 1})).stores
        assert len(stored_hashes(jobs)) == expected
    number = 1
    made.take_report(RankReport(stored={number: 1}, not_stored=frozenset({number})))
    request = Request("c", list(range(8)))
    run(made, pool, request, 8)
    assert len(stored_hashes(made.build_orders(Step({"c": 1})).stores)) == 2
    assert made.counters.failed_stores == 1


@pytest.mark.parametrize("failed", [False, True])
def test_what_was_loaded_is_not_stored_unless_the_load_failed(failed: bool) -> None:
    pool, daemon = TinyPool(16), TinyDaemon()
    made = attached(pool=pool, daemon=daemon)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    made.get_num_new_matched_tokens(request, 0)
    blocks = pool.take(3)
    made.update_state_after_alloc(request, Allocated([each.block_id for each in blocks]), 8)
    (load,) = made.build_orders(Step()).loads
    made.take_report(RankReport(loaded={load.number: 1}, not_loaded=frozenset([load.number] * failed)))
    for block, each in zip(blocks, request.block_hashes, strict=False):
        pool.cache(block, each + bytes(4))
    request.num_computed_tokens = 8

    assert len(stored_hashes(made.build_orders(Step({"r": 1})).stores)) == 2 * failed


def test_what_a_lookup_misses_is_stored_again() -> None:
    pool, daemon = TinyPool(16), TinyDaemon()
    made = attached(pool=pool, daemon=daemon)
    request = Request("a", list(range(9)))
    run(made, pool, request, 8)
    made.build_orders(Step({"a": 1}))

    other = Request("b", list(range(9)))
    assert made.get_num_new_matched_tokens(other, 0) == (0, False)  # the daemon has evicted them
    run(made, pool, other, 8)
    assert stored_hashes(made.build_orders(Step({"b": 1})).stores) == other.block_hashes


def test_a_finished_requests_last_blocks_are_stored_and_held_though_vllm_frees_them() -> None:
    pool = TinyPool(16)
    made = attached(pool=pool)
    request = Request("r", list(range(8)))
    blocks = run(made, pool, request, 8)

    assert made.request_finished(request) == (False, None)
    pool.free_blocks(blocks)
    assert made.has_pending_push_work()
    assert pool.num_free == 13
    (job,) = made.build_orders(Step()).stores
    assert stored_hashes((job,)) == request.block_hashes
    made.take_report(RankReport(stored={job.number: 1}))
    assert pool.num_free == 15


def test_a_preempted_requests_blocks_are_stored_as_far_as_they_are_still_there() -> None:
    pool = TinyPool(6)
    made = attached(pool=pool)
    request = Request("r", list(range(12)))
    blocks = run(made, pool, request, 12)
    pool.free_blocks(reversed(blocks))
    request.num_computed_tokens = 0
    pool.take(3)  # the two that were never used, and the end of the prefix

    (job,) = made.build_orders(Step(preempted_req_ids={"r"})).stores
    assert stored_hashes((job,)) == request.block_hashes[:2]

    again = pool.take(0) + blocks[:2]
    pool.touch(again)
    request.num_computed_tokens = 8
    assert made.build_orders(Step({"r": 4})).stores == ()


def test_prompt_only_stores_no_answer() -> None:
    pool = TinyPool(16)
    made = attached(pool=pool, store_prompt_only=True)
    request = Request("r", list(range(6)))
    request.append(range(6, 12))
    run(made, pool, request, 12)

    assert stored_hashes(made.build_orders(Step({"r": 1})).stores) == request.block_hashes[:1]


def test_without_attached_ranks_nothing_is_held_and_what_was_confirmed_before_is_stored_when_they_attach() -> None:
    pool = TinyPool(16)
    made = side(pool=pool)
    request = Request("r", list(range(8)))
    blocks = run(made, pool, request, 8)
    assert made.build_orders(Step({"r": 1})).stores == ()
    assert {each.ref_cnt for each in blocks} == {1}

    made.take_report(ATTACHED)
    assert stored_hashes(made.build_orders(Step({"r": 1})).stores) == request.block_hashes


def test_another_run_of_the_daemon_gets_everything_again() -> None:
    pool, daemon = TinyPool(16), TinyDaemon()
    made = attached(pool=pool, daemon=daemon)
    request = Request("r", list(range(8)))
    run(made, pool, request, 8)
    (job,) = made.build_orders(Step({"r": 1})).stores
    made.take_report(RankReport(stored={job.number: 1}, attached={0: 0}))
    made.take_report(RankReport(attached={0: 8}))

    assert stored_hashes(made.build_orders(Step({"r": 1})).stores) == request.block_hashes


def test_stores_that_are_not_over_leave_the_engine_half_of_its_blocks() -> None:
    pool = TinyPool(9)
    made = attached(pool=pool)
    request = Request("r", list(range(24)))
    run(made, pool, request, 24)

    (job,) = made.build_orders(Step({"r": 1})).stores
    assert len(stored_hashes((job,))) == 4
    assert made.build_orders(Step({"r": 1})).stores == ()
    assert made.counters.held_back_stores
    made.take_report(RankReport(stored={job.number: 1}))
    assert len(stored_hashes(made.build_orders(Step({"r": 1})).stores)) == 2


def test_blocks_that_vllm_does_not_cache_are_not_stored() -> None:
    pool = TinyPool(16)
    made = attached(pool=pool)
    request = Request("r", list(range(12)))
    blocks = run(made, pool, request, 12)
    pool.uncache(blocks[1])

    jobs = made.build_orders(Step({"r": 1})).stores
    assert stored_hashes(jobs) == [request.block_hashes[0], request.block_hashes[2]]


def test_without_a_block_pool_nothing_is_stored() -> None:
    made = attached()
    request = Request("r", list(range(8)))
    made.update_state_after_alloc(request, Allocated([1, 2]), 0)
    request.num_computed_tokens = 8

    assert made.build_orders(Step({"r": 1})).stores == ()
    made.request_finished(request)
    assert not made.has_pending_push_work()


# -- lazy ----------------------------------------------------------------------------------------------------------


def test_lazy_mode_stores_what_is_evicted_next_before_it_is() -> None:
    pool = TinyPool(13)
    made = attached(pool=pool, store_mode="lazy", lazy_watermark=8)
    request = Request("r", list(range(16)))
    blocks = run(made, pool, request, 16)
    assert made.build_orders(Step({"r": 1})).stores == ()
    pool.free_blocks(reversed(blocks))  # behind the 8 that were never used
    made.build_orders(Step())
    other = pool.take(3)

    step = Step(scheduled_new_reqs=[NewRequest("s", ([each.block_id for each in other],))])
    (job,) = made.build_orders(step).stores
    assert set(stored_hashes((job,))) == set(request.block_hashes[1:])
    assert {each.ref_cnt for each in blocks} == {0, 1}
    made.take_report(RankReport(stored={job.number: 1}))
    assert {each.ref_cnt for each in blocks} == {0}


def test_lazy_mode_does_not_walk_while_nothing_is_allocated() -> None:
    pool = TinyPool(13)
    made = attached(pool=pool, store_mode="lazy", lazy_watermark=8)
    made.build_orders(Step())
    del pool.free_block_queue  # a walk would miss it
    cached = CachedRequests(["r"], [None])

    made.build_orders(Step({"r": 1}, scheduled_cached_reqs=cached))


# -- resets --------------------------------------------------------------------------------------------------------


def test_a_reset_clears_the_namespace() -> None:
    daemon = TinyDaemon()
    made = attached(daemon=daemon)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)

    assert made.reset_cache() is True
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    assert daemon.cleared == 1


def test_a_reset_waits_for_jobs_that_run_and_clears_what_they_stored() -> None:
    pool, daemon = TinyPool(16), TinyDaemon()
    made = attached(pool=pool, daemon=daemon)
    request = Request("r", list(range(8)))
    run(made, pool, request, 8)
    (job,) = made.build_orders(Step({"r": 1})).stores

    assert made.reset_cache() is False
    assert made.has_pending_push_work()
    other = Request("s", list(range(8)))
    run(made, pool, other, 8)
    assert made.build_orders(Step({"s": 1})).stores == ()  # nothing new is stored meanwhile
    daemon.put(0, chain(range(8)))
    assert made.get_num_new_matched_tokens(other, 0) == (0, False)
    made.take_report(RankReport(stored={job.number: 1}))
    while made.has_pending_push_work():
        made.build_orders(Step())
    assert not daemon.blocks
    assert made.reset_cache() is True


def test_a_reset_without_a_daemon_keeps_the_cache_shut_until_one_has_cleared() -> None:
    daemon, clock = TinyDaemon(), Clock()
    made = attached(daemon=daemon, clock=clock)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    daemon.clear_error = DaemonUnreachable("gone")

    assert made.reset_cache() is True
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not made.has_pending_push_work()
    daemon.clear_error = None
    made.build_orders(Step())
    assert daemon.cleared == 0  # not in every step
    clock.now += 2
    while not daemon.cleared:
        made.build_orders(Step())
    while made.has_pending_push_work():
        made.build_orders(Step())
    daemon.put(0, request.block_hashes)
    assert made.get_num_new_matched_tokens(request, 0) == (8, True)


def test_a_reset_gives_back_what_was_planned_and_not_sent() -> None:
    pool = TinyPool(16)
    made = attached(pool=pool)
    request = Request("r", list(range(8)))
    blocks = run(made, pool, request, 8)
    made.request_finished(request)
    pool.free_blocks(blocks)

    assert made.reset_cache() is True
    assert pool.num_free == 15
    assert made.build_orders(Step()).stores == ()


def test_shutdown_closes_the_client() -> None:
    daemon = TinyDaemon()
    side(daemon=daemon).shutdown()

    assert daemon.closed


# -- traces --------------------------------------------------------------------------------------------------------


def test_a_load_carries_its_requests_traceparent_and_a_store_that_of_its_first_sampled_request() -> None:
    pool, daemon = TinyPool(64), TinyDaemon()
    made = attached(pool=pool, daemon=daemon)
    loaded = Request("l", list(range(500, 509)), trace_headers={"traceparent": "t-l", "tracestate": "x"})
    daemon.put(0, loaded.block_hashes)
    made.get_num_new_matched_tokens(loaded, 0)
    made.update_state_after_alloc(loaded, Allocated([14, 15, 13]), 8)
    (load,) = made.build_orders(Step()).loads
    assert load.traceparent == "t-l"

    headers = (None, {"traceparent": "t-b-00"}, {"traceparent": "t-c-01"}, {"traceparent": "t-d-01"})
    requests = [
        Request(name, [*range(first, first + 8)], trace_headers=each)
        for name, first, each in zip("abcd", (0, 100, 200, 300), headers, strict=True)
    ]
    for request in requests:
        run(made, pool, request, 8)
    (store,) = made.build_orders(Step(dict.fromkeys("abcd", 1))).stores
    assert store.traceparent == "t-c-01"
    more = pool.take(1)
    requests[1].append(range(900, 904))
    pool.cache(more[0], requests[1].block_hashes[2] + bytes(4))
    requests[1].num_computed_tokens = 12
    (store,) = made.build_orders(Step({"b": 1})).stores
    assert store.traceparent is None  # what came before does not stay


def test_blocks_that_are_known_take_no_room_from_another_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STEP_BLOCKS", 4)
    pool = TinyPool(40)
    made = attached(pool=pool)
    first = Request("a", list(range(16)))
    run(made, pool, first, 16)
    (job,) = made.build_orders(Step({"a": 1})).stores
    made.take_report(RankReport(stored={job.number: 1}))
    made.request_finished(first)

    known, new = Request("b", list(range(16))), Request("c", list(range(100, 116)))
    for request in (known, new):
        run(made, pool, request, 16)
    (job,) = made.build_orders(Step({"b": 1, "c": 1})).stores
    assert stored_hashes((job,)) == new.block_hashes


def test_events_are_told_which_blocks_of_which_request_are_stored() -> None:
    told: list[tuple[str, int, bytes]] = []

    class Told:
        def note(self, request: Request, of: Group, index: int, block_hash: bytes) -> None:
            told.append((request.request_id, index, block_hash))

        def stored(self, index: int, hashes: list[bytes]) -> None:
            told.extend(("stored", index, each) for each in hashes)

        def all_removed(self) -> None:
            pass

    pool = TinyPool(20)
    made = attached(pool=pool, events=Told())
    first, second = Request("a", [1] * 4 + [2] * 8), Request("b", [1] * 4 + [3] * 8)
    for request in (first, second):
        run(made, pool, request, 12)

    (job,) = made.build_orders(Step({"a": 1, "b": 1})).stores

    a, b = first.block_hashes, second.block_hashes
    assert told == [("a", 0, a[0]), ("a", 1, a[1]), ("a", 2, a[2]), ("b", 1, b[1]), ("b", 2, b[2])]
    told.clear()
    made.take_report(RankReport(stored={job.number: 1}))
    assert told == [("stored", 0, each) for each in (*a, *b[1:])]
