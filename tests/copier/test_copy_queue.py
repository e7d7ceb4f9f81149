"""A queue ends every copy once, and not before the device is done with it; or it raises. No thread, no real time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from kvsidecar.copier import copy_queue as copy_queue_module
from kvsidecar.copier import quiesce as quiesce_module
from kvsidecar.copier.copy_queue import (
    AHEAD_BYTES,
    FIRST_RATE,
    POLL_SECONDS,
    RATE_SAMPLE_BYTES,
    SPIN_SECONDS,
    TIMED_CALLS,
    CopyQueue,
    CopyResult,
    QueuedCopy,
)
from kvsidecar.copier.quiesce import QUIESCE_SECONDS
from kvsidecar.device.base import COPY
from kvsidecar.errors import CopyFailed, DeviceLost
from kvsidecar.support import fence as fences
from kvsidecar.support.fence import Fence
from kvsidecar.types import Direction
from tests import failpoints
from tests.copier.scripted_queue import CHUNK, POOL, TOOK, Bench, Calls, Clock, Event, plan
from tests.harness import Gate
from tests.plans import CopyList


@pytest.fixture
def unpaced(monkeypatch: pytest.MonkeyPatch) -> Bench:
    clock = Clock()
    time = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    monkeypatch.setattr(copy_queue_module, "time", time)
    monkeypatch.setattr(quiesce_module, "time", time)
    return Bench(clock)


@pytest.fixture
def fence_fd() -> Iterator[int]:
    fd = fences.create()
    yield fd
    os.close(fd)


@pytest.fixture
def bench(unpaced: Bench) -> Bench:
    """Paced: one call at a time, so that a test knows which one runs."""
    unpaced.queue.pace = CHUNK
    return unpaced


def never() -> bool:
    return False


def unsaid() -> bool:
    raise CopyFailed("who knows", outcome_known=False)


def lost() -> bool:
    raise DeviceLost("gone")


def bug() -> bool:
    raise RuntimeError("a bug")


# -- order -----------------------------------------------------------------------------------------------------------


def test_paced_calls_run_one_at_a_time_in_order(bench: Bench) -> None:
    bench.stream.held.add(1)
    for nbytes in (1, 2, 3):
        bench.submit(plan(nbytes))
    bench.run()
    assert bench.log == ["issue 1"]
    bench.clock.now += 5.0
    bench.run()
    assert bench.log == ["issue 1"]
    bench.release(1)
    assert bench.log == [f"{what} {n}" for n in (1, 2, 3) for what in ("issue", "over", "end")]
    assert bench.stream.alone == [True] * 3
    for nbytes, result in bench.ended.items():
        assert isinstance(result, CopyResult)
        assert (result.nbytes, result.copy_seconds, result.ended) == (nbytes, nbytes * TOOK, bench.clock.now)
        assert result.queue_seconds == pytest.approx(5.0)


@pytest.mark.parametrize("paced", [True, False])
def test_of_a_paced_copys_calls_some_are_timed_and_stand_for_all(unpaced: Bench, paced: bool) -> None:
    unpaced.queue.pace = CHUNK if paced else None
    slices = Calls(*range(1, 2 * TIMED_CALLS + 2))
    number = unpaced.submit(slices)
    unpaced.run()
    assert unpaced.stream.timed == [not paced or call % TIMED_CALLS == 0 for call in range(2 * TIMED_CALLS + 1)]
    result = unpaced.ended[number]
    assert isinstance(result, CopyResult)
    assert result.copy_seconds == pytest.approx(slices.nbytes * TOOK)


def test_an_empty_plan_is_over_at_once(unpaced: Bench) -> None:
    number = unpaced.submit(CopyList(np.zeros(0, COPY), 0))
    unpaced.run()
    assert unpaced.copied == {number: 0}
    assert unpaced.log == [f"end {number}"]


def test_a_cancelled_copy_never_starts_and_a_running_one_is_not_cancelled(bench: Bench) -> None:
    bench.stream.held.add(1)
    running, ready, queued, last = (bench.submit(plan(nbytes)) for nbytes in (1, 2, 3, 4))
    bench.run()
    assert bench.queue.cancel(queued)
    assert not bench.queue.cancel(queued)
    assert not bench.queue.cancel(running)
    assert bench.queue.cancel(ready), "it was prepared, and not issued"
    bench.release(1)
    assert bench.copied == {running: 1, last: 4}
    assert bench.issued == [1, 4]
    assert not bench.queue.cancel(last)


def test_a_prioritized_copy_is_the_next_one(bench: Bench) -> None:
    bench.stream.held.add(1)
    numbers = [bench.submit(plan(nbytes)) for nbytes in (1, 2, 3, 4, 5)]
    bench.run()  # the first runs, the second is prepared
    bench.queue.prioritize(numbers[4])
    bench.queue.prioritize(numbers[0])
    bench.queue.prioritize(99)
    bench.release(1)
    assert bench.issued == [1, 5, 2, 3, 4], "a prepared copy is overtaken, a running one is not"


# -- events ----------------------------------------------------------------------------------------------------------


def test_a_copy_starts_when_its_event_is_done_and_those_behind_overtake_it(bench: Bench) -> None:
    event = Event()
    gated = bench.submit(plan(1), event, lambda: bench.log.append("start 1"))
    bench.submit(plan(2))
    bench.run()
    assert bench.log == ["issue 2", "over 2", "end 2"]
    assert bench.queue.wait() == POLL_SECONDS
    event.done = True
    bench.log.clear()
    bench.run()
    assert bench.log == ["start 1", "issue 1", "over 1", f"end {gated}"]
    assert bench.queue.wait() is None


def test_a_copy_whose_event_never_comes_can_be_cancelled(bench: Bench) -> None:
    gated = bench.submit(plan(1), Event())
    bench.run()
    assert bench.queue.cancel(gated)
    assert bench.queue.wait() is None
    number = bench.submit(plan(2))
    bench.run()
    assert bench.copied == {number: 2}
    assert bench.issued == [2]


def test_an_event_that_cannot_be_polled_fails_its_copy_alone(bench: Bench) -> None:
    gated = bench.submit(plan(1), Event(CopyFailed("no such event")))
    number = bench.submit(plan(2))
    bench.run()
    assert bench.failed == {gated: "no such event"}
    assert bench.copied == {number: 2}
    assert bench.issued == [2]


# -- how much is in flight -------------------------------------------------------------------------------------------


def test_unpaced_calls_are_issued_while_others_run(unpaced: Bench) -> None:
    unpaced.stream.held.update((1, 2, 3))
    for nbytes in (1, 2, 3):
        unpaced.submit(plan(nbytes))
    unpaced.run()
    assert unpaced.log == ["issue 1", "issue 2", "issue 3"]
    assert unpaced.stream.alone == [False] * 3
    unpaced.release(3, 1)
    assert list(unpaced.ended) == [1]  # reported in order, as a stream ends
    unpaced.release(2)
    assert unpaced.copied == {1: 1, 2: 2, 3: 3}


def test_no_more_is_issued_than_the_bound_and_one_call(unpaced: Bench) -> None:
    sizes = [AHEAD_BYTES - 1, 2, 3, 4]
    unpaced.stream.held.update(sizes)
    number = unpaced.submit(Calls(*sizes))
    unpaced.run()
    assert unpaced.issued == sizes[:2]
    unpaced.release(sizes[0])  # what is over makes room
    assert unpaced.issued == sizes
    assert not unpaced.ended
    unpaced.release(*sizes)
    assert unpaced.copied == {number: sum(sizes)}


def test_pacing_is_asked_for_each_slice(unpaced: Bench) -> None:
    """An engine that becomes busy while a long store runs does not wait for its end."""
    calls = Calls(1, 2, 3, 4, 5, 6)
    unpaced.stream.held.update((2, 4))
    number = unpaced.submit(calls)
    unpaced.queue.step()
    unpaced.queue.step()
    assert unpaced.issued == [1, 2]
    unpaced.queue.pace = CHUNK
    unpaced.run()
    assert unpaced.issued == [1, 2], "a paced call waits for the end of all that is in flight"
    unpaced.release(2)
    assert unpaced.issued == [1, 2, 3, 4]
    unpaced.queue.pace = None
    unpaced.run()
    assert unpaced.issued == [1, 2, 3, 4], "what was issued to be alone stays alone"
    unpaced.release(4)
    assert unpaced.copied == {number: 21}
    assert unpaced.stream.alone == [False, False, True, True, False, False]
    assert calls.chunks == [None, None, CHUNK, CHUNK, CHUNK, None, None]


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("at", ["issue", "mark"])
def test_a_failed_copy_is_reported_when_the_device_is_done_with_it_and_the_next_goes_on(
    bench: Bench, at: str, known: bool
) -> None:
    errors = bench.stream.issue_errors if at == "issue" else bench.stream.mark_errors
    errors[1] = CopyFailed("refused", outcome_known=known)
    bad, good = bench.submit(plan(1)), bench.submit(plan(2))
    bench.run()
    assert bench.failed == {bad: "refused"}
    assert bench.copied == {good: 2}
    seen = ["issue 1"] + ["over 1"] * (at == "mark") + ["quiesced"] * (not known)
    assert bench.log == [*seen, f"end {bad}", "issue 2", "over 2", f"end {good}"]


@pytest.mark.parametrize("quiesced", [never, unsaid, lost, bug])
@pytest.mark.parametrize("at", ["issue", "mark"])
def test_a_failed_copy_that_may_still_move_bytes_is_not_reported(
    bench: Bench, at: str, quiesced: Callable[[], bool]
) -> None:
    errors = bench.stream.issue_errors if at == "issue" else bench.stream.mark_errors
    errors[1] = CopyFailed("refused", outcome_known=False)
    bench.stream.quiesced = quiesced
    bench.submit(plan(1))
    bench.submit(plan(2))
    began = bench.clock.now
    with pytest.raises(CopyFailed, match="refused; ") as raised:
        bench.run()
    assert not raised.value.outcome_known
    assert bench.ended == {}
    assert bench.issued == [1]
    waited = bench.clock.now - began
    assert QUIESCE_SECONDS <= waited < 2 * QUIESCE_SECONDS if quiesced is never else waited == 0


def test_a_device_that_takes_a_while_to_quiesce_is_waited_for(bench: Bench) -> None:
    done_at = bench.clock.now + 0.9 * QUIESCE_SECONDS
    bench.stream.mark_errors[1] = CopyFailed("asynchronous", outcome_known=False)
    bench.stream.quiesced = lambda: bench.clock.now >= done_at
    number = bench.submit(plan(1))
    bench.run()
    assert bench.failed == {number: "asynchronous"}
    assert bench.clock.now >= done_at
    assert bench.log == ["issue 1", "over 1", "quiesced", f"end {number}"]


ENDS = [DeviceLost("ECC"), RuntimeError("a bug"), KeyboardInterrupt(), SystemExit(1)]


@pytest.mark.parametrize("error", ENDS, ids=repr)
@pytest.mark.parametrize("at", ["prepare", "issue", "mark"])
def test_a_lost_device_and_an_unexpected_error_are_raised(bench: Bench, at: str, error: BaseException) -> None:
    """The process ends, and all copies with it: none is reported."""
    errors = {
        "prepare": bench.stream.prepare_errors,
        "issue": bench.stream.issue_errors,
        "mark": bench.stream.mark_errors,
    }
    errors[at][2] = error
    for nbytes in (1, 2, 3):
        bench.submit(plan(nbytes))
    with pytest.raises(type(error)) as raised:
        bench.run()
    assert raised.value is error
    # What was over before may be reported or not: it ends with the process, too.
    assert set(bench.ended) <= {1}
    assert 3 not in bench.issued


@pytest.mark.parametrize("error", ENDS[:2], ids=repr)
def test_a_device_lost_at_an_event_is_raised(bench: Bench, error: Exception) -> None:
    bench.submit(plan(1), Event(error))
    with pytest.raises(type(error)) as raised:
        bench.run()
    assert raised.value is error
    assert bench.log == []


def test_an_injected_loss_of_the_device_is_raised_before_anything_is_issued(bench: Bench) -> None:
    bench.submit(plan(1))
    with failpoints.active("copy.device_lost=raise(ECC)"), pytest.raises(DeviceLost, match="ECC"):
        bench.run()
    assert bench.log == []


@pytest.mark.parametrize("direction", Direction)
def test_an_injected_fault_of_a_copy_in_flight_is_raised(bench: Bench, direction: Direction) -> None:
    queue = CopyQueue(bench.stream, direction, POOL, lambda *_: bench.log.append("end"))
    queue.submit(QueuedCopy(1, plan(1)))

    def run() -> None:
        while True:
            queue.step()

    with failpoints.active(f"{direction}.in_flight=raise(a bug)"), pytest.raises(RuntimeError, match="a bug"):
        run()
    assert "end" not in bench.log


def test_a_copy_that_a_fault_keeps_in_flight_keeps_neither_the_thread_nor_the_queue(bench: Bench, gate: Gate) -> None:
    numbers = [bench.submit(plan(nbytes)) for nbytes in (1, 2, 3)]
    with failpoints.active(f"store.in_flight={gate}"):
        while not bench.queue.in_flight_since:
            bench.queue.step()
        bench.queue.step()
        assert bench.queue.cancel(numbers[1])
        assert bench.issued == [1], "nothing is issued behind it"
        gate.let_pass()
        while numbers[0] not in bench.copied:
            bench.queue.step()
    bench.run()
    assert bench.issued == [1, 3]


def test_a_refused_call_ends_its_copy_and_not_those_in_flight(unpaced: Bench) -> None:
    unpaced.stream.held.add(1)
    unpaced.stream.issue_errors[3] = CopyFailed("refused")
    good, bad, later = unpaced.submit(plan(1)), unpaced.submit(Calls(2, 3, 4)), unpaced.submit(plan(5))
    unpaced.run()
    assert unpaced.failed == {bad: "refused"}
    assert unpaced.copied == {}
    unpaced.release(1)
    assert unpaced.copied == {good: 1, later: 5}
    assert unpaced.issued == [1, 2, 3, 5]


def test_a_copy_that_has_failed_does_not_fail_again_with_its_calls_in_flight(unpaced: Bench) -> None:
    unpaced.stream.held.add(1)
    unpaced.stream.mark_errors[1] = CopyFailed("asynchronous", outcome_known=False)
    unpaced.stream.issue_errors[2] = CopyFailed("refused")
    bad, other = unpaced.submit(Calls(1, 2)), unpaced.submit(plan(3))
    unpaced.run()
    unpaced.release(1)
    assert unpaced.failed == {bad: "refused", other: "asynchronous"}


def test_an_asynchronous_error_fails_all_in_flight_and_the_next_goes_on(unpaced: Bench) -> None:
    """Nobody knows whose error it is."""
    unpaced.stream.mark_errors[1] = CopyFailed("asynchronous", outcome_known=False)
    full = AHEAD_BYTES
    unpaced.stream.held.update((1, 2, full))
    numbers = [unpaced.submit(each) for each in (plan(1), plan(2), Calls(full, 3), plan(4))]
    unpaced.run()
    assert unpaced.issued == [1, 2, full]
    unpaced.release(1)
    assert unpaced.failed == dict.fromkeys(numbers[:3], "asynchronous")
    assert unpaced.copied == {numbers[3]: 4}
    assert unpaced.issued == [1, 2, full, 4]
    assert unpaced.log.index("quiesced") < unpaced.log.index(f"end {numbers[0]}")
    assert (unpaced.queue.wait(), unpaced.queue.in_flight_since) == (None, 0.0)


# -- what the loop is told -------------------------------------------------------------------------------------------


def test_since_when_no_call_has_ended_of_those_in_flight(unpaced: Bench) -> None:
    clock, queue = unpaced.clock, unpaced.queue
    assert queue.in_flight_since == 0.0
    unpaced.stream.held.update((1, 2))
    unpaced.submit(plan(1))
    unpaced.run()
    first = clock.now
    clock.now += 1.0
    unpaced.submit(plan(2))
    unpaced.run()
    clock.now += 1.0
    assert queue.in_flight_since == first
    unpaced.release(1)
    assert queue.in_flight_since == clock.now, "the end of a call is progress"
    clock.now += 1.0
    unpaced.release(2)
    assert queue.in_flight_since == 0.0
    clock.now += 1.0
    unpaced.stream.held.add(3)
    unpaced.submit(plan(3))
    unpaced.run()
    assert queue.in_flight_since == clock.now, "an idle queue is not stuck"


def test_whether_the_end_of_a_copy_is_in_flight(unpaced: Bench) -> None:
    sizes = [AHEAD_BYTES, 2]
    unpaced.stream.held.update(sizes)
    unpaced.submit(Calls(*sizes))
    unpaced.run()
    seen = [unpaced.queue.end_in_flight]  # a call is left
    for each in sizes:
        unpaced.release(each)
        seen.append(unpaced.queue.end_in_flight)
    assert seen == [False, True, False]


def test_an_idle_queue_waits_for_a_submission(unpaced: Bench) -> None:
    assert unpaced.queue.wait() is None
    unpaced.submit(plan(1))
    unpaced.run()
    assert unpaced.queue.wait() is None


def test_a_paced_call_is_not_slept_through(bench: Bench) -> None:
    bench.stream.held.add(AHEAD_BYTES)
    bench.submit(plan(AHEAD_BYTES))
    bench.run()
    assert bench.queue.wait() == 0.0


def test_the_end_of_a_long_copy_is_slept_for_until_shortly_before_it(unpaced: Bench) -> None:
    sizes = [AHEAD_BYTES // 4, AHEAD_BYTES // 2]
    unpaced.stream.held.update(sizes)
    unpaced.submit(Calls(*sizes))
    unpaced.run()
    seconds = sum(sizes) / FIRST_RATE - SPIN_SECONDS
    assert unpaced.queue.wait() == pytest.approx(seconds)
    unpaced.clock.now += seconds / 2
    assert unpaced.queue.wait() == pytest.approx(seconds / 2)
    unpaced.clock.now += seconds
    assert unpaced.queue.wait() == 0.0


def test_the_oldest_copy_is_slept_for_and_not_those_behind_it(unpaced: Bench) -> None:
    sizes = [AHEAD_BYTES // 2, AHEAD_BYTES // 4]
    unpaced.stream.held.update(sizes)
    for each in sizes:
        unpaced.submit(plan(each))
    unpaced.run()
    assert unpaced.queue.wait() == pytest.approx(sizes[0] / FIRST_RATE - SPIN_SECONDS)


def test_an_event_is_polled_while_a_long_copy_runs_if_there_is_room_behind_it(unpaced: Bench) -> None:
    long = AHEAD_BYTES - 1
    unpaced.stream.held.add(long)
    unpaced.submit(plan(long))
    event = Event()
    unpaced.submit(plan(1), event)
    unpaced.run()
    assert unpaced.queue.wait() == POLL_SECONDS
    event.done = True
    unpaced.run()
    assert unpaced.issued == [long, 1]
    unpaced.submit(plan(2), Event())  # no room: only an end makes some
    unpaced.run()
    wait = unpaced.queue.wait()
    assert wait is not None
    assert wait > POLL_SECONDS


def test_how_long_to_sleep_follows_the_best_rate_seen(unpaced: Bench) -> None:
    nbytes, seconds = RATE_SAMPLE_BYTES, 1e-3
    assert nbytes / FIRST_RATE < SPIN_SECONDS
    unpaced.stream.held.add(nbytes)
    for _ in range(100):
        unpaced.submit(plan(nbytes))
        unpaced.run()
        unpaced.clock.now += seconds
        unpaced.release(nbytes)
        unpaced.stream.held.add(nbytes)
    unpaced.submit(plan(nbytes))
    unpaced.run()
    assert unpaced.queue.wait() == pytest.approx(seconds - SPIN_SECONDS)


def test_a_copy_behind_a_shut_fence_fails_and_those_of_other_engines_go_on(unpaced: Bench, fence_fd: int) -> None:
    fence, lane = Fence(fence_fd), fences.lanes(fence_fd)[Direction.STORE]
    fence.shut()
    fenced, other = unpaced.submit(plan(1), lane=lane), unpaced.submit(plan(2))
    unpaced.run()
    assert "issue 1" not in unpaced.log
    assert isinstance(unpaced.ended[fenced], CopyFailed)
    assert isinstance(unpaced.ended[other], CopyResult)
    assert fence.is_quiet()


def test_a_fence_that_is_shut_between_two_calls_of_a_copy_ends_it_when_the_first_is_over(
    unpaced: Bench, fence_fd: int
) -> None:
    fence, lane = Fence(fence_fd), fences.lanes(fence_fd)[Direction.STORE]
    unpaced.stream.held = {1}
    number = unpaced.submit(Calls(1, 2), lane=lane)
    unpaced.queue.step()
    assert unpaced.log == ["issue 1"]
    fence.shut()
    assert not fence.is_quiet()
    unpaced.queue.step()
    assert unpaced.log == ["issue 1", "quiesced", f"end {number}"]
    assert isinstance(unpaced.ended[number], CopyFailed)
    unpaced.release(1)
    assert fence.is_quiet()
    assert unpaced.issued == [1]


@pytest.mark.parametrize("how", ["over", "refused", "asynchronous"])
def test_nothing_is_under_way_when_a_copy_has_ended_however(unpaced: Bench, fence_fd: int, how: str) -> None:
    fence, lane = Fence(fence_fd), fences.lanes(fence_fd)[Direction.STORE]
    errors = {"refused": unpaced.stream.issue_errors, "asynchronous": unpaced.stream.mark_errors}
    if how in errors:
        errors[how][2] = CopyFailed("planned")
    number = unpaced.submit(Calls(1, 2), lane=lane)
    unpaced.run()
    assert number in unpaced.ended
    fence.shut()
    assert fence.is_quiet()


def test_another_session_s_copy_goes_between_two_slices(unpaced: Bench) -> None:
    unpaced.stream.held = {1}
    large = unpaced.submit(Calls(1, 2, 4), session=1)
    unpaced.queue.step()
    small = unpaced.submit(Calls(8), session=2)
    unpaced.run()
    assert unpaced.issued == [1, 8, 2, 4]
    unpaced.release(1)
    assert unpaced.copied == {large: 7, small: 8}


def test_a_copy_that_waits_for_its_next_turn_is_not_cancelled_while_a_call_of_it_runs(unpaced: Bench) -> None:
    """Who cancels a copy frees its slots."""
    unpaced.stream.held = {1}
    large = unpaced.submit(Calls(1, 2, 4), session=1)
    unpaced.queue.step()
    small = unpaced.submit(Calls(8), session=2)
    unpaced.queue.step()
    assert unpaced.issued == [1, 8], "the large one is queued again"
    assert not unpaced.queue.cancel(large)
    unpaced.run()
    unpaced.release(1)
    assert unpaced.copied == {large: 7, small: 8}


def test_a_copy_that_waits_for_its_next_turn_fails_with_its_calls_in_flight(unpaced: Bench) -> None:
    unpaced.stream.held = {1, 8}
    unpaced.stream.mark_errors[1] = CopyFailed("planned")
    large = unpaced.submit(Calls(1, 2), session=1)
    unpaced.queue.step()
    small = unpaced.submit(Calls(8, 16), session=2)
    unpaced.queue.step()
    assert unpaced.issued == [1, 8]
    unpaced.release(1)
    assert unpaced.issued == [1, 8, 2], "the rest of the other one, which waited for its turn"
    assert unpaced.failed == {large: "planned", small: "planned"}


def test_a_copy_that_waits_for_its_event_lets_the_one_that_runs_go_on(unpaced: Bench) -> None:
    event = Event()
    unpaced.submit(Calls(1, 2, 4), session=1)
    unpaced.submit(Calls(8), event, session=2)
    unpaced.run()
    assert unpaced.issued == [1, 2, 4]
    event.done = True
    unpaced.run()
    assert unpaced.issued == [1, 2, 4, 8]
