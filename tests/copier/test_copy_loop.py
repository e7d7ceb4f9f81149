"""One direction's thread of a copier: what it tells the daemon while a scripted device copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from select import select

import numpy as np
import pytest

from kvsidecar.copier import copy_queue
from kvsidecar.copier.copy_plan import bind
from kvsidecar.copier.messages import Copy, Done, Ended, Kind, Part, Progress, kind_of
from kvsidecar.copier.process import CopyLoop, Session, Sessions
from kvsidecar.copier.ring import Receiver, Ring, Sender
from kvsidecar.device.base import CopyCall, CopyMark, CopyStream, PreparedCall
from kvsidecar.device.host import HostDevice
from kvsidecar.errors import DeviceLost
from kvsidecar.types import Direction, GroupLayout, Region
from tests.harness import eventually

SHORT, LONG = 4096, 16 << 20
LONG_SECONDS = 0.5
"""For which the loop sleeps, at the rate assumed at first: more than any machine needs to get there."""
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

    def open_stream(self, direction: Direction) -> CopyStream:
        return self

    def prepare(self, call: CopyCall, pool_address: int) -> PreparedCall:
        return call

    def issue(self, prepared: PreparedCall, *, alone: bool = False, timed: bool = True) -> CopyMark:
        if self.ended:
            raise DeviceLost("the test is over")
        return self

    def is_done(self) -> bool:
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
    records: list[bytes] = field(default_factory=list)

    def copy(self, number: int, group: int, count: int = 1) -> None:
        ids = np.arange(count, dtype=np.int64)
        self.sender.send(Copy(number, 7, Direction.LOAD, [Part(group, ids, ids * LONG)]).pack())

    def next(self) -> bytes:
        if not self.records:
            assert select([self.receiver.bell], [], [], 60)[0], "nothing is said"
            self.records = self.receiver.take()
        return self.records.pop(0)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(copy_queue, "FIRST_RATE", LONG / LONG_SECONDS)
    device, there, back = Device(), Ring.create(), Ring.create()
    sessions = Sessions(device)
    sessions._sessions[7] = Session([], {each.group: bind(each, [0]) for each in LAYOUTS})
    loop = CopyLoop(device, Direction.LOAD, sessions, 0, 1 << 40, 60.0, Receiver(there), Sender(back))
    raised: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except DeviceLost as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    bench = Bench(device, Sender(there), Receiver(back), there.progress)
    yield bench
    device.held, device.ended = False, True
    bench.copy(99, 0)
    thread.join()
    assert [str(error) for error in raised] == ["the test is over"]
    there.close()
    back.close()


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
    eventually(lambda: bench.progress[Progress.WORKING])  # it has slept, and looks for the end of the call
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
