"""A worker resolves every future it gives out, whatever the stream does. Steps are ordered by events, never by time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path

import numpy as np
import pytest

from kvsidecar.copier import quiesce as quiesce_module
from kvsidecar.copier import worker as worker_module
from kvsidecar.copier.worker import AHEAD_BYTES, TIMED_CALLS, CopyResult, CopyWorker
from kvsidecar.device.base import COPY, CopyCall, CopyList, CopyMark, CopyStream, PreparedCall
from kvsidecar.device.host import HostDevice
from kvsidecar.errors import CopyFailed, DeviceLost
from kvsidecar.support.cpu_sleep import SleepGuard
from kvsidecar.types import Direction

TIMEOUT = 30.0
POOL = 1 << 20
CHUNK = 4096
TOOK = 1e-9
"""Seconds per byte that a scripted device says it took."""


def plan(nbytes: int) -> CopyList:
    return CopyList(np.zeros(1, COPY), nbytes)


class Calls:
    """A plan of several calls, each in a slice of its own, known by their ``nbytes``."""

    def __init__(self, *sizes: int) -> None:
        self.nbytes = sum(sizes)
        self.chunks: list[int | None] = []
        self._left = list(sizes)

    def take(self, chunk: int | None) -> list[CopyCall]:
        self.chunks.append(chunk)
        return [CopyCall(np.zeros(1, COPY), False, self._left.pop(0))] if self._left else []


class Door(CopyList):
    """An empty plan that holds the worker until it is opened, so that what is submitted meanwhile is found queued."""

    def __init__(self) -> None:
        super().__init__(np.zeros(0, COPY), 0)
        self.open = threading.Event()

    def take(self, chunk: int | None) -> Sequence[CopyCall]:
        assert self.open.wait(TIMEOUT)
        return super().take(chunk)


class Script(HostDevice):
    """A device with a stream that does what the test says; a plan is known by its ``nbytes``."""

    def __init__(self) -> None:
        super().__init__()
        self.issue_errors: dict[int, BaseException] = {}
        self.wait_errors: dict[int, BaseException] = {}
        self.open_error: BaseException | None = None
        self.close_error: BaseException | None = None
        self.quiesced: bool | BaseException = True
        """What the stream says when it is asked whether all it was given is over."""
        self.gates: dict[int, threading.Event] = {}
        """A wait for this plan does not return before its gate is set."""
        self.waiting: dict[int, threading.Event] = {}
        self.calls: list[str] = []
        self.alone: list[bool] = []
        self.timed: list[bool] = []
        self.threads: set[int] = set()

    def hold(self, nbytes: int) -> None:
        self.gates[nbytes], self.waiting[nbytes] = threading.Event(), threading.Event()

    def open_stream(self, direction: Direction) -> CopyStream:
        self.threads.add(threading.get_ident())
        if self.open_error is not None:
            raise self.open_error
        return ScriptedStream(self)


class ScriptedStream:
    def __init__(self, script: Script) -> None:
        self._script = script

    def prepare(self, call: CopyCall, pool_address: int) -> PreparedCall:
        assert pool_address == POOL
        return call

    def issue(self, prepared: PreparedCall, *, alone: bool = False, timed: bool = True) -> CopyMark:
        call = prepared
        assert isinstance(call, CopyCall)
        self._script.threads.add(threading.get_ident())
        self._script.calls.append(f"issue {call.nbytes}")
        self._script.alone.append(alone)
        self._script.timed.append(timed)
        if call.nbytes in self._script.issue_errors:
            raise self._script.issue_errors[call.nbytes]
        return ScriptedMark(self._script, call.nbytes, timed=timed)

    def is_done(self) -> bool:
        self._script.threads.add(threading.get_ident())
        if isinstance(self._script.quiesced, BaseException):
            raise self._script.quiesced
        return self._script.quiesced

    def close(self) -> None:
        self._script.threads.add(threading.get_ident())
        self._script.calls.append("close")
        if self._script.close_error is not None:
            raise self._script.close_error


class ScriptedMark:
    def __init__(self, script: Script, nbytes: int, *, timed: bool) -> None:
        self._script = script
        self._nbytes = nbytes
        self._timed = timed
        self._ended = False

    def is_done(self) -> bool:
        gate = self._script.gates.get(self._nbytes)
        if gate is not None and not gate.is_set():
            return False
        self.wait()
        return True

    def seconds(self) -> float:
        assert self._ended
        assert self._timed
        return self._nbytes * TOOK

    def wait(self) -> None:
        if self._ended:
            return
        if self._nbytes in self._script.gates:
            self._script.waiting[self._nbytes].set()
            assert self._script.gates[self._nbytes].wait(TIMEOUT)
        self._ended = True
        self._script.calls.append(f"wait {self._nbytes}")
        if self._nbytes in self._script.wait_errors:
            raise self._script.wait_errors[self._nbytes]


class Failures:
    """What `on_failure` was told."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.told = threading.Event()

    def __call__(self, error: BaseException) -> None:
        self.errors.append(error)
        self.told.set()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.setattr(quiesce_module, "QUIESCE_SECONDS", 0.01)
    return Script()


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
def worker(script: Script, failures: Failures) -> Iterator[CopyWorker]:
    """Paced: one call at a time, so that a test knows which one runs."""
    worker = CopyWorker(script, Direction.STORE, POOL, chunk=lambda: CHUNK, on_failure=failures)
    yield worker
    for gate in script.gates.values():
        gate.set()
    assert worker.close(TIMEOUT)


@pytest.fixture
def unpaced(script: Script, failures: Failures) -> Iterator[CopyWorker]:
    worker = CopyWorker(script, Direction.STORE, POOL, on_failure=failures)
    yield worker
    for gate in script.gates.values():
        gate.set()
    assert worker.close(TIMEOUT)


def outcome_known(future: Future[CopyResult]) -> bool:
    error = future.exception(TIMEOUT)
    assert isinstance(error, CopyFailed)
    return error.outcome_known


def test_paced_calls_run_one_at_a_time_in_order(script: Script, worker: CopyWorker, failures: Failures) -> None:
    script.hold(1)
    first = worker.submit(plan(1))
    assert script.waiting[1].wait(TIMEOUT)
    others = [worker.submit(plan(n)) for n in (2, 3)]
    assert (worker.running, worker.queued, worker.alive) == (True, 2, True)
    queued_at = time.monotonic()
    age = worker.oldest_inflight_seconds()
    assert worker.oldest_inflight_seconds() > age > 0
    assert script.calls == ["issue 1"]
    held = time.monotonic() - queued_at
    script.gates[1].set()
    results = [future.result(TIMEOUT) for future in (first, *others)]
    assert [result.nbytes for result in results] == [1, 2, 3]
    assert [result.copy_seconds for result in results] == [TOOK, 2 * TOOK, 3 * TOOK]
    assert all(result.queue_seconds > held - 3 * TOOK for result in results)
    assert (worker.running, worker.queued, worker.oldest_inflight_seconds()) == (False, 0, 0.0)
    assert worker.close(TIMEOUT)
    assert script.calls == ["issue 1", "wait 1", "issue 2", "wait 2", "issue 3", "wait 3", "close"]
    assert len(script.threads) == 1  # opened, used and closed by one thread, which is not this one
    assert threading.get_ident() not in script.threads
    assert (failures.errors, worker._failure, worker.alive) == ([], None, False)
    assert script.alone == [True] * 3


@pytest.mark.parametrize("paced", [True, False])
def test_of_a_paced_copys_calls_some_are_timed_and_stand_for_all(
    script: Script, worker: CopyWorker, unpaced: CopyWorker, paced: bool
) -> None:
    slices = Calls(*range(1, 2 * TIMED_CALLS + 2))
    result = (worker if paced else unpaced).submit(slices).result(TIMEOUT)
    assert script.timed == [not paced or number % TIMED_CALLS == 0 for number in range(2 * TIMED_CALLS + 1)]
    assert result.copy_seconds == pytest.approx(slices.nbytes * TOOK)


def test_the_thread_has_a_name(script: Script, worker: CopyWorker) -> None:
    script.hold(1)
    worker.submit(plan(1))
    assert script.waiting[1].wait(TIMEOUT)
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert "store-host" in names
    assert "store-host" in [thread.name for thread in threading.enumerate()]


QUIESCED = [True, False, CopyFailed("who knows", outcome_known=False), DeviceLost("gone"), RuntimeError("a bug")]


@pytest.mark.parametrize("quiesced", QUIESCED, ids=repr)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("at", ["issue", "wait"])
def test_a_failed_copy_reaches_its_future_and_the_next_goes_on(
    script: Script, worker: CopyWorker, failures: Failures, at: str, known: bool, quiesced: bool | BaseException
) -> None:
    """Its outcome is known if the device has said so, at once or when it was asked what still runs."""
    errors = script.issue_errors if at == "issue" else script.wait_errors
    errors[1] = CopyFailed("refused", outcome_known=known)
    script.quiesced = quiesced
    bad, good = worker.submit(plan(1)), worker.submit(plan(2))
    assert outcome_known(bad) is (known or quiesced is True)
    assert good.result(TIMEOUT).nbytes == 2
    script.quiesced = True
    assert worker.alive
    assert failures.errors == []


@pytest.mark.parametrize("at", ["issue", "wait"])
def test_a_lost_device_fails_all_and_takes_no_more(
    script: Script, worker: CopyWorker, failures: Failures, at: str
) -> None:
    script.hold(1)
    (script.issue_errors if at == "issue" else script.wait_errors)[2] = DeviceLost("ECC")
    held = worker.submit(plan(1))
    assert script.waiting[1].wait(TIMEOUT)
    futures = [worker.submit(plan(n)) for n in (2, 3, 4)]
    script.gates[1].set()
    assert held.result(TIMEOUT).nbytes == 1
    for future in futures:
        with pytest.raises(DeviceLost, match="ECC") as lost:
            future.result(TIMEOUT)
        assert lost.value.outcome_known is (future is not futures[0]), "the first one had been started"
    assert failures.told.wait(TIMEOUT)
    assert len(failures.errors) == 1
    assert worker._failure is failures.errors[0]
    assert (worker.alive, worker.running, worker.queued) == (False, False, 0)
    with pytest.raises(DeviceLost, match="ECC"):
        worker.submit(plan(5))
    assert "issue 3" not in script.calls


@pytest.mark.parametrize("quiesced", QUIESCED, ids=repr)
@pytest.mark.parametrize("at", ["issue", "wait"])
@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_an_unexpected_error_is_heard_by_all(
    script: Script,
    worker: CopyWorker,
    failures: Failures,
    at: str,
    error: BaseException,
    quiesced: bool | BaseException,
) -> None:
    script.hold(1)
    script.quiesced = quiesced
    (script.issue_errors if at == "issue" else script.wait_errors)[2] = error
    held = worker.submit(plan(1))
    assert script.waiting[1].wait(TIMEOUT)
    current, queued = worker.submit(plan(2)), worker.submit(plan(3))
    script.gates[1].set()
    assert held.result(TIMEOUT).nbytes == 1
    assert outcome_known(current) is (quiesced is True)  # else some of it may still be moving
    assert outcome_known(queued) is True  # never started
    reason = current.exception()
    assert reason is not None
    assert reason.__cause__ is error
    assert failures.told.wait(TIMEOUT)
    assert failures.errors == [error]
    assert (worker.alive, worker._failure) == (False, error)
    with pytest.raises(CopyFailed, match=type(error).__name__) as refusal:
        worker.submit(plan(4))
    assert refusal.value.outcome_known


def test_futures_are_resolved_before_the_owner_is_told(script: Script) -> None:
    queued: list[Future[CopyResult]] = []
    resolved: list[bool] = []
    told = threading.Event()

    def on_failure(error: BaseException) -> None:
        resolved.extend(future.done() for future in queued)
        told.set()

    worker = CopyWorker(script, Direction.LOAD, POOL, on_failure=on_failure)
    script.hold(1)
    script.wait_errors[1] = RuntimeError()
    queued += [worker.submit(plan(1)), worker.submit(plan(2))]
    script.gates[1].set()
    assert told.wait(TIMEOUT)
    assert resolved == [True, True]


def test_a_stream_that_does_not_open(script: Script) -> None:
    script.open_error = DeviceLost("no stream")
    with pytest.raises(DeviceLost, match="no stream"):
        CopyWorker(script, Direction.STORE, POOL)


def test_a_cancelled_copy_never_starts_and_a_running_one_is_not_cancelled(script: Script, worker: CopyWorker) -> None:
    script.hold(1)
    running = worker.submit(plan(1))
    assert script.waiting[1].wait(TIMEOUT)
    queued, last = worker.submit(plan(2)), worker.submit(plan(3))
    assert queued.cancel()
    assert not running.cancel()
    script.gates[1].set()
    assert running.result(TIMEOUT).nbytes == 1
    assert last.result(TIMEOUT).nbytes == 3
    with pytest.raises(CancelledError):
        queued.result(TIMEOUT)
    assert "issue 2" not in script.calls


def test_a_cancelled_copy_does_not_break_the_end_of_a_lost_device(
    script: Script, worker: CopyWorker, failures: Failures
) -> None:
    script.hold(1)
    script.wait_errors[1] = DeviceLost("gone")
    running = worker.submit(plan(1))
    assert script.waiting[1].wait(TIMEOUT)
    cancelled, queued = worker.submit(plan(2)), worker.submit(plan(3))
    cancelled.cancel()
    script.gates[1].set()
    for future in (running, queued):
        assert isinstance(future.exception(TIMEOUT), DeviceLost)
    assert failures.told.wait(TIMEOUT)


def test_close_finishes_what_is_queued(script: Script, worker: CopyWorker) -> None:
    script.hold(1)
    futures = [worker.submit(plan(n)) for n in (1, 2, 3)]
    assert script.waiting[1].wait(TIMEOUT)
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(worker.close(TIMEOUT)))
    closing.start()
    script.gates[1].set()
    closing.join(TIMEOUT)
    assert closed == [True]
    assert [future.result(0).nbytes for future in futures] == [1, 2, 3]
    assert script.calls[-1] == "close"
    with pytest.raises(CopyFailed, match="closed") as refusal:
        worker.submit(plan(4))
    assert refusal.value.outcome_known
    assert worker.close(0)


def test_close_does_not_wait_for_ever_and_leaves_no_future_open(script: Script, worker: CopyWorker) -> None:
    script.hold(1)
    running = worker.submit(plan(1))
    assert script.waiting[1].wait(TIMEOUT)
    queued = worker.submit(plan(2))
    assert not worker.close(0.01)
    assert outcome_known(running) is False
    assert outcome_known(queued) is True
    script.gates[1].set()  # the driver answers after all: the thread ends in order, and says nothing wrong
    assert worker.close(TIMEOUT)
    assert script.calls == ["issue 1", "wait 1", "close"]
    assert worker._failure is None


def test_a_stream_that_does_not_close_is_heard(script: Script, worker: CopyWorker, failures: Failures) -> None:
    script.close_error = RuntimeError("close")
    assert worker.close(TIMEOUT)
    assert failures.errors == [script.close_error]


def test_nothing_is_lost_between_submit_and_close(script: Script, worker: CopyWorker) -> None:
    """Submitters race with close: each submit either raises or gives a future that ends."""
    futures: list[Future[CopyResult]] = []
    ready = threading.Barrier(5)

    def submit() -> None:
        ready.wait(TIMEOUT)
        for number in range(200):
            try:
                futures.append(worker.submit(plan(number)))
            except CopyFailed:
                return

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    ready.wait(TIMEOUT)
    assert worker.close(TIMEOUT)
    for thread in threads:
        thread.join(TIMEOUT)
    assert all(future.done() for future in futures)
    assert all(future.exception() is None for future in futures)


class Gate:
    """An event in the test's hands."""

    def __init__(self) -> None:
        self.open = False
        self.error: Exception | None = None
        self.asked = threading.Event()

    def is_done(self) -> bool:
        self.asked.set()
        if self.error:
            raise self.error
        return self.open

    def close(self) -> None: ...


def test_a_copy_starts_when_its_event_is_over_and_those_behind_overtake_it(
    script: Script, worker: CopyWorker, failures: Failures
) -> None:
    gate, started = Gate(), threading.Event()
    gated = worker.submit(plan(1), after=gate, on_start=started.set)
    assert worker.submit(plan(2)).result(TIMEOUT).nbytes == 2
    assert gate.asked.wait(TIMEOUT)
    assert not started.is_set()
    assert script.calls == ["issue 2", "wait 2"]
    gate.open = True
    assert gated.result(TIMEOUT).nbytes == 1
    assert started.is_set()


def test_a_copy_whose_event_never_comes_can_be_cancelled(script: Script, worker: CopyWorker) -> None:
    gated = worker.submit(plan(1), after=Gate())
    assert gated.cancel()
    assert worker.submit(plan(2)).result(TIMEOUT).nbytes == 2
    assert worker.queued == 0
    assert "issue 1" not in script.calls


def test_an_event_that_cannot_be_asked_fails_its_copy_alone(script: Script, worker: CopyWorker) -> None:
    gate = Gate()
    gate.error = CopyFailed("no such event", outcome_known=True)
    gated = worker.submit(plan(1), after=gate)
    with pytest.raises(CopyFailed, match="no such event"):
        gated.result(TIMEOUT)
    assert worker.submit(plan(2)).result(TIMEOUT).nbytes == 2
    assert worker.alive


def test_a_hurried_copy_is_the_next_one(script: Script, worker: CopyWorker) -> None:
    script.hold(1)
    first = worker.submit(plan(1))
    assert script.waiting[1].wait(TIMEOUT)
    others = [worker.submit(plan(number)) for number in (2, 3, 4)]
    worker.prioritize(others[2])
    script.gates[1].set()
    for future in (first, *others):
        future.result(TIMEOUT)
    assert [call for call in script.calls if call.startswith("issue")] == ["issue 1", "issue 4", "issue 2", "issue 3"]


def test_unpaced_calls_are_issued_while_others_run(script: Script, unpaced: CopyWorker) -> None:
    for number in (1, 2, 3):
        script.hold(number)
    door = Door()
    unpaced.submit(door)
    futures = [unpaced.submit(plan(number)) for number in (1, 2, 3)]
    door.open.set()
    assert script.waiting[1].wait(TIMEOUT)
    assert script.calls == ["issue 1", "issue 2", "issue 3"]
    assert (unpaced.running, unpaced.queued) == (True, 0)
    assert script.alone == [False] * 3
    script.gates[3].set()
    script.gates[1].set()
    assert futures[0].result(TIMEOUT).nbytes == 1
    assert script.waiting[2].wait(TIMEOUT)
    assert not futures[2].done()  # reported in order, as a stream ends
    script.gates[2].set()
    assert [future.result(TIMEOUT).nbytes for future in futures] == [1, 2, 3]


def test_no_more_is_issued_than_the_bound_and_one_call(script: Script, unpaced: CopyWorker) -> None:
    sizes = [AHEAD_BYTES - 1, 2, 3]
    script.hold(sizes[0])
    future = unpaced.submit(Calls(*sizes))
    assert script.waiting[sizes[0]].wait(TIMEOUT)
    assert [call for call in script.calls if call.startswith("issue")] == [f"issue {sizes[0]}", "issue 2"]
    script.gates[sizes[0]].set()
    assert future.result(TIMEOUT).nbytes == sum(sizes)


def test_pacing_is_asked_for_each_slice(script: Script, failures: Failures) -> None:
    """An engine that becomes busy while a long store runs does not wait for its end."""
    answers: list[int | None] = [None, CHUNK, None]
    worker = CopyWorker(
        script, Direction.STORE, POOL, chunk=lambda: answers.pop(0) if answers else CHUNK, on_failure=failures
    )
    calls = Calls(1, 2)
    assert worker.submit(calls).result(TIMEOUT).nbytes == 3
    assert worker.close(TIMEOUT)
    assert set(calls.chunks) == {None, CHUNK}


def test_a_refused_call_ends_its_copy_and_not_those_in_flight(script: Script, unpaced: CopyWorker) -> None:
    script.hold(1)
    script.issue_errors[3] = CopyFailed("refused", outcome_known=True)
    good, bad, later = unpaced.submit(plan(1)), unpaced.submit(Calls(2, 3, 4)), unpaced.submit(plan(5))
    assert outcome_known(bad) is True
    script.gates[1].set()
    assert good.result(TIMEOUT).nbytes == 1
    assert later.result(TIMEOUT).nbytes == 5
    assert "issue 4" not in script.calls


def test_an_asynchronous_error_fails_all_in_flight_and_the_next_goes_on(script: Script, unpaced: CopyWorker) -> None:
    """Nobody knows whose error it is."""
    script.wait_errors[1] = CopyFailed("asynchronous", outcome_known=False)
    script.quiesced = False
    script.hold(1)
    door = Door()
    unpaced.submit(door)
    futures = [unpaced.submit(plan(1)), unpaced.submit(plan(2))]
    door.open.set()
    assert script.waiting[1].wait(TIMEOUT)
    script.gates[1].set()
    assert [outcome_known(future) for future in futures] == [False, False]
    assert unpaced.submit(plan(3)).result(TIMEOUT).nbytes == 3
    script.quiesced = True


def test_a_device_that_takes_a_while_to_end_what_it_was_given_is_waited_for(
    script: Script, worker: CopyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiesce_module, "QUIESCE_SECONDS", TIMEOUT)
    script.wait_errors[1] = CopyFailed("asynchronous", outcome_known=False)
    script.quiesced = False
    asked = threading.Event()
    monkeypatch.setattr(worker_module.time, "sleep", lambda _: asked.set())
    failed = worker.submit(plan(1))
    assert asked.wait(TIMEOUT)
    assert not failed.done()
    script.quiesced = True
    assert outcome_known(failed) is True


def test_a_worker_that_is_closed_while_the_device_is_not_done_says_so(
    script: Script, worker: CopyWorker, failures: Failures
) -> None:
    script.quiesced = False
    assert worker.close(TIMEOUT)
    assert [str(error) for error in failures.errors] == ["copies still run 0.01 s after an error"]
    assert "close" not in script.calls, "a stream was given back with copies in flight"


def test_an_empty_plan_is_over_at_once(script: Script, unpaced: CopyWorker) -> None:
    assert unpaced.submit(CopyList(np.zeros(0, COPY), 0)).result(TIMEOUT).nbytes == 0
    assert script.calls == []


class Guard(SleepGuard):
    """Says when a worker told it to keep the loop awake."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.told = threading.Event()

    def keep_awake_from_thread(self) -> None:
        self.told.set()


def test_those_who_wait_are_woken_before_the_end_of_a_copy_that_the_worker_sleeps_through(script: Script) -> None:
    guard = Guard(TIMEOUT)
    worker = CopyWorker(script, Direction.LOAD, POOL, guard=guard)
    short, long = 1, AHEAD_BYTES - 1  # at the rate assumed at first: nothing, and 670 us
    worker.submit(plan(short)).result(TIMEOUT)
    assert not guard.told.is_set()
    script.hold(long)
    future = worker.submit(plan(long))
    assert script.waiting[long].wait(TIMEOUT)  # the worker waits for the end itself: it has slept
    assert guard.told.is_set()
    assert not future.done()
    script.gates[long].set()
    assert future.result(TIMEOUT).nbytes == long
    assert worker.close(TIMEOUT)  # at once, although it is kept awake
    guard.close()
