"""One direction's thread of a copier: what it tells the daemon while a scripted device copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from select import select
from unittest.mock import ANY

import numpy as np
import pytest
import xxhash

from kvsidecar.copier import copy_queue, slot_check
from kvsidecar.copier.messages import CHECK, Checks, Copy, CopyPart, Done, Ended, Kind, Progress, kind_of, pack_number
from kvsidecar.copier.process import CopyLoop, Session, Sessions
from kvsidecar.copier.recipes import bind
from kvsidecar.copier.ring import Receiver, Ring, Sender
from kvsidecar.device.base import CopyCall, CopyMark, CopyStream, PreparedCall
from kvsidecar.device.host import HostDevice
from kvsidecar.errors import DeviceLost
from kvsidecar.types import Direction, GroupLayout, Region
from tests.harness import eventually

SHORT, LONG = 4096, 16 << 20
SLICE = SHORT // 8
LONG_SECONDS = 0.5
"""For which the loop sleeps, at the rate assumed at first: more than any machine needs to get there."""
POOL = np.random.default_rng(1).integers(0, 256, 64 * SHORT, np.uint8)
CHECKSUMS = [xxhash.xxh3_64_intdigest(POOL[slot : slot + SHORT].tobytes()) for slot in range(0, POOL.size, SHORT)]
LAYOUTS = [
    GroupLayout(group, 64, 0, 1, (Region(0, 0, nbytes, nbytes, nbytes, 1),))
    for group, nbytes in enumerate((SHORT, LONG))
]


class Device(HostDevice):
    """Copies nothing; what it is given is over when `held` is not set. Also the stream, and the mark of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.held = False
        self.ended = False
        self.issued = 0
        self.asked = 0
        """How often the loop has looked for the end of a call."""

    def open_stream(self, direction: Direction) -> CopyStream:
        return self

    def prepare(self, call: CopyCall, pool_address: int) -> PreparedCall:
        return call

    def issue(self, prepared: PreparedCall, *, alone: bool = False, timed: bool = True) -> CopyMark:
        if self.ended:
            raise DeviceLost("the test is over")
        self.issued += 1
        return self

    def is_done(self) -> bool:
        self.asked += 1
        return not self.held

    def seconds(self) -> float:
        return 0.0

    def close(self) -> None: ...


@dataclass
class Bench:
    device: Device
    sender: Sender
    receiver: Receiver
    progress: memoryview[float]
    direction: Direction
    records: list[bytes] = field(default_factory=list)

    def copy(self, number: int, group: int, count: int = 1, checks: Checks | None = None) -> None:
        ids = np.arange(count, dtype=np.int64)
        self.sender.send(Copy(number, 7, self.direction, [CopyPart(group, ids, ids * LONG)], checks=checks).pack())

    def next(self) -> bytes:
        if not self.records:
            assert select([self.receiver.bell], [], [], 60)[0], "nothing is said"
            self.records = self.receiver.take()
        return self.records.pop(0)


@contextmanager
def running(direction: Direction) -> Iterator[Bench]:
    device, there, back = Device(), Ring.create(), Ring.create()
    sessions = Sessions(device)
    sessions._sessions[7] = Session([], {(each.group, 0): bind(each, [0]) for each in LAYOUTS})
    loop = CopyLoop(device, direction, sessions, POOL, 1 << 40, 60.0, Receiver(there), Sender(back))
    raised: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except DeviceLost as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    bench = Bench(device, Sender(there), Receiver(back), there.progress, direction)
    yield bench
    device.held, device.ended = False, True
    bench.copy(99, 0)
    thread.join()
    assert [str(error) for error in raised] == ["the test is over"]
    there.close()
    back.close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(copy_queue, "FIRST_RATE", LONG / LONG_SECONDS)
    with running(Direction.LOAD) as bench:
        yield bench


def test_the_daemon_is_woken_shortly_before_the_end_of_a_copy_that_the_loop_sleeps_through(bench: Bench) -> None:
    bench.copy(1, 0)
    assert Done.unpack(bench.next()).number == 1  # a short one wakes nobody
    bench.device.held = True
    bench.copy(2, 1)
    assert kind_of(bench.next()) is Kind.SOON
    bench.device.held = False
    done = Done.unpack(bench.next())
    assert (done.number, done.ended, done.nbytes) == (2, Ended.COPIED, LONG)


def test_the_daemon_is_not_woken_while_the_end_of_a_copy_is_far(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls in flight end within the time that the loop sleeps, but others of the same copy follow."""
    monkeypatch.setattr(copy_queue, "AHEAD_BYTES", 1)
    bench.device.held = True
    bench.copy(3, 1, count=40)
    eventually(lambda: bench.progress[Progress.IN_FLIGHT] and not bench.progress[Progress.WORKING])
    # Not by `WORKING`: the loop has the interpreter while it works, so that this thread seldom sees it.
    asked = bench.device.asked
    eventually(lambda: bench.device.asked > asked)  # it has slept, and looks for the end of the call
    bench.device.held = False
    kinds = [kind_of(bench.next())]
    assert kinds == [Kind.DONE]


def test_progress_is_there_for_the_daemon_to_see(bench: Bench) -> None:
    bench.device.held = True
    bench.copy(4, 1)
    since = eventually(lambda: bench.progress[Progress.IN_FLIGHT])
    bench.copy(5, 1)
    assert kind_of(bench.next()) is Kind.SOON
    assert bench.progress[Progress.IN_FLIGHT] == since, "nothing has ended"
    bench.device.held = False
    assert [Done.unpack(bench.next()).number for _ in range(2)] == [4, 5]
    eventually(lambda: not bench.progress[Progress.IN_FLIGHT])


# -- checksums -------------------------------------------------------------------------------------------------------


class Slices:
    """Lets the loop read so many more slices of slots, of `SLICE` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = False
        self._left = threading.Semaphore(0)
        step = slot_check.SlotCheck.step

        def slow(check: slot_check.SlotCheck) -> bool:
            return step(check, SLICE) if self.open or self._left.acquire(blocking=False) else True

        monkeypatch.setattr(slot_check.SlotCheck, "step", slow)
        self.let_pass = self._left.release


@pytest.fixture
def stores() -> Iterator[Bench]:
    with running(Direction.STORE) as bench:
        yield bench


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slices]:
    slices = Slices(monkeypatch)
    yield slices
    slices.open = True


def checks(*slots: int, expected: Callable[[int], int] = CHECKSUMS.__getitem__) -> Checks:
    return np.array([(slot * SHORT, SHORT, expected(slot)) for slot in slots], CHECK)


def done(record: bytes) -> Done:
    assert kind_of(record) is Kind.DONE
    return Done.unpack(record)


def test_a_load_is_issued_when_its_slots_are_as_expected_and_not_before(bench: Bench, slices: Slices) -> None:
    bench.copy(1, 0, checks=checks(3, 5))
    bench.copy(2, 0)
    assert done(bench.next()).number == 2, "it has overtaken the one whose slots are read"
    assert bench.device.issued == 1
    slices.let_pass(2 * SHORT // SLICE)
    assert done(bench.next()) == Done(1, Ended.COPIED, SHORT, 0.0, ANY, ANY)
    assert bench.device.issued == 2


def test_a_load_of_slots_that_have_changed_is_never_issued(bench: Bench) -> None:
    bench.copy(1, 0, checks=checks(3, 5, 8, expected=lambda slot: CHECKSUMS[slot] ^ (slot != 5)))
    assert done(bench.next()) == Done(1, Ended.CORRUPT, values=[0, 2])
    assert bench.device.issued == 0


def test_a_load_whose_slots_are_read_can_be_cancelled(bench: Bench, slices: Slices) -> None:
    bench.copy(1, 0, checks=checks(3))
    bench.sender.send(pack_number(Kind.CANCEL, 1))
    assert done(bench.next()) == Done(1, Ended.CANCELLED)
    slices.let_pass(SHORT // SLICE)
    bench.copy(2, 0)
    assert done(bench.next()).number == 2
    assert bench.device.issued == 1


def test_a_small_check_does_not_wait_for_a_large_one(bench: Bench, slices: Slices) -> None:
    """They take turns, slice by slice."""
    bench.copy(1, 0, checks=checks(*range(40)))
    bench.copy(2, 0, checks=checks(50))
    bench.copy(3, 0)
    assert done(bench.next()).number == 3  # all are there
    slices.let_pass(3 * SHORT // SLICE)
    assert done(bench.next()).number == 2
    slices.let_pass(40 * SHORT // SLICE)
    assert done(bench.next()).number == 1


def test_a_store_is_done_when_its_checksums_are_taken_and_others_are_done_meanwhile(
    stores: Bench, slices: Slices
) -> None:
    stores.copy(1, 0, checks=checks(7, 2))
    stores.copy(2, 0)
    assert done(stores.next()).number == 2
    stores.sender.send(pack_number(Kind.CANCEL, 1))  # too late
    slices.let_pass(2 * SHORT // SLICE)
    first = done(stores.next())
    assert (first.number, first.ended, first.values) == (1, Ended.COPIED, [CHECKSUMS[7], CHECKSUMS[2]])
