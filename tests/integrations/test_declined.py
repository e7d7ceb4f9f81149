"""The daemon declines blocks (``--eviction rhythm``): it does so by jobs, which may be of several requests."""

from __future__ import annotations

from collections.abc import Sequence

from kvsidecar.integrations.vllm.metadata import RankReport, StoreJob
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from tests.integrations.engine import EPOCH, Clock, Request, Step, TinyPool, pooled, run, stored_hashes

NAMES = ("r", "s", "t")


def report(made: SchedulerSide, jobs: Sequence[StoreJob], *, declined: bool) -> None:
    numbers = frozenset(job.number for job in jobs)
    bad = numbers if declined else frozenset[int]()
    made.take_report(RankReport(stored=dict.fromkeys(numbers, 1), not_stored=bad, not_admitted=bad))


def together(made: SchedulerSide, pool: TinyPool) -> tuple[dict[str, Request], StoreJob]:
    """Two blocks of each of three requests, and the job of all."""
    requests = {name: Request(name, list(range(100 * at, 100 * at + 20))) for at, name in enumerate(NAMES)}
    for request in requests.values():
        run(made, pool, request, 8)
    (job,) = made.build_plan(Step(dict.fromkeys(requests, 1))).stores
    assert len(stored_hashes((job,))) == 6
    return requests, job


def test_requests_whose_blocks_were_declined_together_are_asked_for_one_by_one() -> None:
    made, pool = pooled(40)
    requests, job = together(made, pool)
    free = pool.num_free
    report(made, (job,), declined=True)
    assert pool.num_free == free, "they are still held"
    jobs = made.build_plan(Step()).stores
    assert [stored_hashes((job,)) for job in jobs] == [each.block_hashes[:2] for each in requests.values()]
    report(made, jobs[:1], declined=True)
    report(made, jobs[1:], declined=False)
    assert made.build_plan(Step()).stores == ()
    assert not made.has_pending_push_work()
    assert (made.counters.not_admitted_stores, made.counters.failed_stores) == (2, 0)


def test_what_a_request_has_behind_a_declined_part_is_not_offered() -> None:
    clock = Clock()
    made, pool = pooled(40, clock=clock)
    requests, job = together(made, pool)
    report(made, (job,), declined=True)
    jobs = made.build_plan(Step()).stores
    report(made, jobs[:1], declined=True)
    report(made, jobs[1:], declined=False)
    for request in requests.values():
        blocks = pool.take(2)
        for block, each in zip(blocks, request.block_hashes[2:4], strict=True):
            pool.cache(block, each + bytes(4))
        request.num_computed_tokens = 16
    jobs = made.build_plan(Step(dict.fromkeys(NAMES, 1))).stores
    expected = [*requests["s"].block_hashes[2:4], *requests["t"].block_hashes[2:4]]
    assert stored_hashes(jobs) == expected
    made.request_finished(requests["r"])
    assert made.build_plan(Step()).stores == ()
    assert made.counters.unoffered_blocks == 3, "the last one is not computed, but has a hash"
    report(made, jobs, declined=False)
    clock.now += 100
    assert not made.has_pending_push_work(), "nothing is to be tried again"


def test_the_next_request_of_a_declined_prompt_offers_it_again() -> None:
    made, pool = pooled(40)
    requests, job = together(made, pool)
    report(made, (job,), declined=True)
    report(made, made.build_plan(Step()).stores, declined=True)
    for request in requests.values():
        made.request_finished(request)
    again = Request("again", requests["r"].all_token_ids)
    run(made, pool, again, 8)
    (job,) = made.build_plan(Step({"again": 1})).stores
    assert stored_hashes((job,)) == again.block_hashes[:2]


def test_another_daemon_is_offered_all_blocks_again() -> None:
    made, pool = pooled(40)
    requests, job = together(made, pool)
    report(made, (job,), declined=True)
    report(made, made.build_plan(Step()).stores, declined=True)
    made.take_report(RankReport(attached={0: EPOCH + 1}))
    (job,) = made.build_plan(Step(dict.fromkeys(NAMES, 1))).stores
    assert stored_hashes((job,)) == [each for request in requests.values() for each in request.block_hashes[:2]]


def test_a_request_that_was_declined_in_two_jobs_has_one_of_its_own() -> None:
    made, pool = pooled(40)
    requests, first = together(made, pool)
    for request in requests.values():
        (block,) = pool.take(1)
        pool.cache(block, request.block_hashes[2] + bytes(4))
        request.num_computed_tokens = 12
    (second,) = made.build_plan(Step(dict.fromkeys(NAMES, 1))).stores
    report(made, (first, second), declined=True)
    jobs = made.build_plan(Step()).stores
    assert [stored_hashes((job,)) for job in jobs] == [each.block_hashes[:3] for each in requests.values()]
    report(made, jobs, declined=True)
    assert not made.has_pending_push_work()
    assert all(block.ref_cnt == 1 for block in pool.blocks if block.block_hash), "they are the requests' alone"
    made.take_report(RankReport(attached={0: EPOCH + 1}))
    assert len(stored_hashes(made.build_plan(Step(dict.fromkeys(NAMES, 1))).stores)) == 9, "none of them counts as held"


def test_after_a_reset_nothing_is_asked_again() -> None:
    made, pool = pooled(40)
    _, job = together(made, pool)
    made.reset_cache()
    report(made, (job,), declined=True)
    assert made.build_plan(Step()).stores == ()
    assert all(block.ref_cnt == 1 for block in pool.blocks if block.block_hash)
