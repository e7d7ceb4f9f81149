from __future__ import annotations

import itertools
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsidecar.cache.eviction_lru import FIRST_ENTRIES, SEGMENT, LRUQueues
from tests.marks import examples


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def order(policy: LRUQueues, queue: int = 0) -> list[int]:
    for segment, living in policy._live.items():
        assert living == len(policy._live_rows(segment)), f"segment {segment} does not have {living} entries"
    segments = {segment for log in policy._queues.values() for segment in log.segments}
    assert policy._live.keys() == policy._queue_of.keys() == segments
    return [row for piece in policy.candidates(queue) for row in piece.tolist()]


def test_more_rows_than_foreseen_can_be_reserved() -> None:
    policy = LRUQueues(1)
    policy.insert(rows(0))
    policy.reserve(5)
    policy.insert(rows(4))
    assert order(policy) == [0, 4]


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), queues=st.integers(1, 3))
def test_the_order_is_that_of_a_list_for_each_queue_over_many_segments(seed: int, queues: int) -> None:
    rng = random.Random(seed)
    policy, models = LRUQueues(3 * SEGMENT), [list[int]() for _ in range(queues)]
    for _ in range(rng.randrange(1, 20)):
        used = rng.sample(range(3 * SEGMENT), rng.choice((1, 7, SEGMENT // 3, SEGMENT, 2 * SEGMENT)))
        gone = set(used)
        policy.remove(rows(*gone.intersection(itertools.chain(*models))))
        models = [[row for row in model if row not in gone] for model in models]
        if rng.random() < 0.8:
            queue = rng.randrange(queues)
            policy.insert(rows(*used), queue)
            models[queue] += used
    for queue, model in enumerate(models):
        assert order(policy, queue) == model


def test_a_queue_of_a_few_blocks_takes_a_few_bytes_however_often_they_are_used() -> None:
    """Each of very many namespaces has one at least: with a whole segment, a block took 4 KiB beside its slot."""
    policy = LRUQueues(8)
    policy.insert(rows(2, 5, 7))
    for number in range(3 * SEGMENT):
        used = rows((2, 5, 7)[number % 3])
        policy.remove(used)
        policy.insert(used)
        assert order(policy) == [(2, 5, 7)[(number + after) % 3] for after in (1, 2, 3)]
    assert [segment.nbytes for segment in policy._queues[0].segments.values()] == [4 * FIRST_ENTRIES]


def test_the_log_stays_in_proportion_to_the_blocks_whatever_is_used() -> None:
    """One block of each segment stays where it is, and all others are used again and again: nothing but a merge of
    neighbours keeps these segments from staying for ever."""
    count = 40 * SEGMENT
    policy = LRUQueues(count)
    every = np.arange(count)
    policy.insert(every)
    for stays in range(1, 20):
        hot = every[every % SEGMENT >= stays]
        for part in np.array_split(hot, 50):
            policy.remove(part)
            policy.insert(part)
        assert len(policy._live) <= 2 * 40 + 2
    assert sorted(order(policy)) == every.tolist()
