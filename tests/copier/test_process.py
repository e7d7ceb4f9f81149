"""A copier's process, at the host device: what it copies, and that its end is known."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvsidecar.client.buffers import HostBuffer
from kvsidecar.copier import PROGRAM
from kvsidecar.copier.link import CopierLink, Copying, PoolFile
from kvsidecar.copier.messages import CHECK, CopyPart, Done, Ended, Kind, kind_of
from kvsidecar.copier.ring import RING_BYTES
from kvsidecar.device.base import MemfdSource
from kvsidecar.errors import CopyFailed, DeviceLost, DeviceNotFound, ImportRefused
from kvsidecar.support import failpoints, host_memory, supervised_child
from kvsidecar.support.child_side import Message
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.memory_limits import PageKind, Pages
from kvsidecar.support.steps import Steps
from kvsidecar.support.supervised_child import launch
from kvsidecar.types import Direction, GroupLayout, Region
from tests.harness import Gate, eventually_in_loop
from tests.marks import processes

pytestmark = processes

POOL, SLAB, BLOCK, BLOCKS = 1 << 20, 256 << 10, 4096, 64
SMALL = Pages(PageKind.SMALL, 4096)
LAYOUT = GroupLayout(0, BLOCKS, 0, 1, (Region(0, 0, BLOCK, BLOCK, BLOCK, 1),))
SESSION = 7


@dataclass
class Bench:
    link: CopierLink
    pool: np.ndarray
    buffer: HostBuffer

    @property
    def kv(self) -> np.ndarray:
        return np.frombuffer(self.buffer.memory, np.uint8).reshape(BLOCKS, BLOCK)

    def submit(
        self,
        direction: Direction,
        ids: Sequence[int],
        slots: Sequence[int],
        session: int = SESSION,
        expected: Sequence[int] | None = None,
    ) -> Copying:
        """Args:
        expected: checksums of the slots; None: not checked.
        """
        part = CopyPart(0, np.array(ids, np.int64), np.array(slots, np.int64) * BLOCK)
        checks = None
        if expected is not None:
            checks = np.array(
                [(slot * BLOCK, BLOCK, value) for slot, value in zip(slots, expected, strict=True)], CHECK
            )
        return self.link.submit(session, direction, [part], checks=checks)

    def store(self, slot: int, session: int = SESSION) -> Copying:
        return self.submit(Direction.STORE, [1], [slot], session)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.link.pid, number)

    def stop(self) -> None:
        """Until SIGCONT. Returns when no thread runs any more."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.link.pid, os.WSTOPPED)


@asynccontextmanager
async def started(ring_bytes: int = RING_BYTES) -> AsyncIterator[Bench]:
    fd = host_memory.create_file(POOL, SMALL)
    address = host_memory.map_file(fd, POOL, SMALL)
    link, buffer = CopierLink(launch(PROGRAM)), HostBuffer(BLOCK * BLOCKS)
    try:
        hello = await link.hello("host", [])
        assert (hello.platform, hello.devices) == ("host", {"host": None})
        await link.start("host", ring_bytes=ring_bytes)
        await link.map(PoolFile(fd, POOL, SMALL, SLAB))
        await link.pin(0, SLAB)
        opened = await link.open(SESSION, [MemfdSource(buffer.fd)], [LAYOUT], [])
        assert [each.nbytes for each in opened.memories] == [BLOCK * BLOCKS]
        assert (opened.num_events, opened.events_refused) == (0, "")
        yield Bench(link, host_memory.as_array(address, POOL), buffer)
    finally:
        link.kill()
        await link.ended
        buffer.close()
        host_memory.unmap(address, POOL)
        os.close(fd)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with started() as bench:
        yield bench


async def lost(copying: Copying) -> str:
    """The reason of a copy that has ended with its process."""
    with pytest.raises(DeviceLost) as error:
        await copying.ended
    return str(error.value)


# -- copies ----------------------------------------------------------------------------------------------------------


async def test_blocks_go_to_the_pool_and_back(bench: Bench) -> None:
    bench.kv[:] = np.arange(BLOCKS, dtype=np.uint8)[:, None]
    done = await bench.submit(Direction.STORE, [3, 5, 4], [10, 20, 30]).ended
    assert done.nbytes == 3 * BLOCK
    slots = bench.pool.reshape(-1, BLOCK)
    assert [int(slots[i].max()) for i in (10, 20, 30)] == [3, 5, 4]
    await bench.submit(Direction.LOAD, [0, 1], [20, 30]).ended
    assert [int(bench.kv[i].min()) for i in (0, 1)] == [5, 4]


async def test_checksums_are_of_the_bytes_that_were_stored_and_a_load_of_others_copies_nothing(bench: Bench) -> None:
    bench.kv[:] = np.random.default_rng(1).integers(0, 256, bench.kv.shape, np.uint8)
    stored = await bench.submit(Direction.STORE, [3, 5], [10, 20], expected=[0, 0]).ended
    assert stored.values == [xxhash.xxh3_64_intdigest(bench.kv[i].tobytes()) for i in (3, 5)]
    assert (await bench.submit(Direction.STORE, [4], [30]).ended).values == ()
    loaded = await bench.submit(Direction.LOAD, [0, 1], [10, 20], expected=stored.values).ended
    assert (loaded.ended, loaded.nbytes, loaded.values) == (Ended.COPIED, 2 * BLOCK, ())
    assert np.array_equal(bench.kv[:2], bench.kv[[3, 5]])
    before = bench.kv.copy()
    bench.pool[20 * BLOCK + 7] ^= 1
    corrupt = await bench.submit(Direction.LOAD, [7, 8], [10, 20], expected=stored.values).ended
    assert (corrupt.ended, corrupt.nbytes, corrupt.values) == (Ended.CORRUPT, 0, [1])
    assert np.array_equal(bench.kv, before)


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_copier_killed_while_it_takes_checksums_ends_the_copy(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, f"copier.checksum={gate}")
    async with started() as bench:
        copying = bench.submit(direction, [1], [0], expected=[0])
        await stuck(bench.link, f"the thread of {direction}s has been in one call")
        assert not copying.ended.done()
        bench.signal(signal.SIGKILL)
        assert await lost(copying) == "the copier has ended (SIGKILL)"


async def test_what_cannot_be_copied_fails_and_the_next_one_does_not(bench: Bench) -> None:
    with pytest.raises(CopyFailed, match="block id") as failed:
        await bench.submit(Direction.STORE, [BLOCKS], [0]).ended
    assert failed.value.outcome_known
    await bench.store(0).ended


async def test_copies_wait_their_turn_unless_they_are_cancelled_or_prioritized(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, f"store.in_flight={gate}")
    async with started() as bench:
        first, second, cancelled, last = (bench.store(slot) for slot in range(4))
        last.prioritize()
        cancelled.cancel()
        first.cancel()  # it runs by then, or is forgotten: either way nothing is left open
        gate.let_pass(4)
        await asyncio.wait([each.ended for each in (first, second, cancelled, last)])
        assert cancelled.ended.cancelled()
        assert last.ended.result().at <= second.ended.result().at


async def test_copies_for_which_the_ring_has_no_room_are_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(ring_bytes=4096) as bench:
        with pytest.raises(CopyFailed, match="too long for a ring") as refused:
            bench.submit(Direction.STORE, [0] * 1000, [0] * 1000)
        assert refused.value.outcome_known
        bench.stop()
        copies = [bench.store(slot) for slot in range(200)]
        sender = bench.link._senders[Direction.STORE]
        assert sender.waiting_bytes > 0
        bench.signal(signal.SIGCONT)
        done = [await each.ended for each in copies]
        assert [each.nbytes for each in done] == [BLOCK] * 200
        assert sender.waiting_bytes == 0


# -- requests --------------------------------------------------------------------------------------------------------


async def test_memory_that_is_none_is_refused_and_a_session_is_given_back(bench: Bench) -> None:
    with pytest.raises(ImportRefused, match="not a memfd"):
        await bench.link.open(8, [MemfdSource(0)], [LAYOUT], [])
    with pytest.raises(ImportRefused, match="cannot be passed to the copier: Bad file descriptor"):
        await bench.link.open(8, [MemfdSource(1 << 20)], [LAYOUT], [])
    for _ in range(2):  # the second time nothing happens
        await bench.link.close_session(SESSION)
        with pytest.raises(CopyFailed, match="KeyError"):
            await bench.store(0).ended


async def test_an_unknown_device_is_said_by_name() -> None:
    link = CopierLink(launch(PROGRAM))
    with pytest.raises(DeviceNotFound, match="gpu-9"):
        await link.hello("host", ["gpu-9"])
    link.kill()
    await link.ended


async def test_a_cancelled_request_leaves_no_answer_and_no_session_behind(bench: Bench) -> None:
    """The next request would take that answer for its own, and nobody would give the memory back."""
    bench.stop()
    opening = asyncio.create_task(bench.link.open(8, [MemfdSource(bench.buffer.fd)], [LAYOUT], []))
    await eventually_in_loop(lambda: bench.link._asked_at > 0)
    asked_at = bench.link._asked_at
    next_one = asyncio.create_task(bench.link.open(9, [MemfdSource(bench.buffer.fd)], [LAYOUT], []))
    for _ in range(3):
        opening.cancel()
        await asyncio.sleep(0.001)
    assert bench.link._asked_at == asked_at, "another request was sent before the answer to this one"
    bench.signal(signal.SIGCONT)
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert len((await next_one).memories) == 1
    with pytest.raises(CopyFailed, match="KeyError: 8"):
        await bench.store(0, session=8).ended
    await bench.store(0, session=9).ended
    assert bench.link._asked_at == 0.0


# -- the end ---------------------------------------------------------------------------------------------------------


async def test_a_copier_that_is_killed_ends_all_copies_and_says_so(bench: Bench) -> None:
    bench.stop()
    copies = [bench.submit(direction, [1], [slot]) for slot in range(20) for direction in Direction]
    pending = asyncio.create_task(bench.link.pin(SLAB, SLAB))
    await eventually_in_loop(lambda: bench.link._asked_at > 0)
    bench.link.kill("the test says so")
    assert {await lost(each) for each in copies} == {"the copier has ended (the test says so)"}
    for request in (pending, bench.link.close_session(SESSION)):
        with pytest.raises(DeviceLost, match="the test says so"):
            await request
    with pytest.raises(DeviceLost, match="the test says so"):
        bench.store(0)
    copies[0].cancel()  # nobody is told
    assert bench.link.stuck(0.0) == ""
    assert bench.link._connection.fileno() == -1, "the socket is still open"


@pytest.mark.parametrize("ends", ["in order", "with the process"])
async def test_a_copy_whose_end_is_not_taken_keeps_no_other_from_its_end(bench: Bench, ends: str) -> None:
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["message"]))
    part = CopyPart(0, np.array([1]), np.array([0]))
    if ends != "in order":
        bench.stop()
    bench.link.submit(SESSION, Direction.STORE, [part], on_end=lambda _: 1 // 0)  # type: ignore[arg-type, return-value]
    copies = [bench.store(slot) for slot in range(1, 20)]
    if ends == "in order":
        for each in copies:
            await each.ended
        assert errors == ["a copier's record was not handled"]
        await bench.store(30).ended
    else:
        bench.link.kill("the test says so")
        assert {await lost(each) for each in copies} == {"the copier has ended (the test says so)"}
        assert errors == ["a copy has not ended in order"]


async def test_a_signal_without_a_name_ends_all_copies_too(bench: Bench) -> None:
    number = signal.SIGRTMIN + 3
    bench.stop()
    copying = bench.submit(Direction.STORE, [1], [0])
    bench.signal(number)
    bench.signal(signal.SIGCONT)
    assert await lost(copying) == f"the copier has ended (signal {number})"


async def test_the_socket_is_closed_by_the_request_that_still_uses_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ended, exchange = asyncio.Event(), asyncio.Event(), supervised_child.exchange

    async def exchange_late(connection: socket.socket, request: Message, fds: Sequence[int]) -> Message | None:
        asked.set()
        try:
            return await exchange(connection, request, fds)
        finally:
            await ended.wait()

    monkeypatch.setattr(supervised_child, "exchange", exchange_late)
    bench.stop()
    asking = asyncio.create_task(bench.link.pin(SLAB, SLAB))
    await asked.wait()
    bench.link.kill()
    await bench.link.ended
    assert bench.link._connection.fileno() >= 0
    ended.set()
    with pytest.raises(DeviceLost, match="SIGKILL"):
        await asking
    assert bench.link._connection.fileno() == -1


async def test_a_copy_that_was_done_when_its_process_died_stays_done(bench: Bench) -> None:
    copying = bench.store(0)
    receiver = bench.link._receivers[Direction.STORE]
    bench.link._loop.remove_reader(receiver.bell)  # the loop is busy with other things
    select.select([receiver.bell], [], [])
    bench.signal(signal.SIGKILL)
    assert await bench.link.ended == "the copier has ended (SIGKILL)"
    assert isinstance(copying.ended.result(), Done)


async def _all_done(bench: Bench, count: int) -> list[Copying]:
    """Stores that are done, of whose ends the link takes one in each iteration of the loop."""
    bench.link._steps = Steps(LoopTime(lambda: 0.0, 0.0))
    bench.link._steps.called()
    receiver, records = bench.link._receivers[Direction.STORE], bench.link._records[Direction.STORE]
    bench.link._loop.remove_reader(receiver.bell)  # the loop is busy with other things
    copies = [bench.store(slot) for slot in range(count)]
    while sum(kind_of(each) is Kind.DONE for each in records) < count:
        select.select([receiver.bell], [], [])
        records += receiver.take()
    bench.link._take_records(Direction.STORE)
    return copies


async def test_the_ends_of_copies_take_turns(bench: Bench) -> None:
    copies = await _all_done(bench, 4)
    for count in range(5):
        assert [each.end is not None for each in copies] == [True] * count + [False] * (4 - count)
        await asyncio.sleep(0)
    assert bench.link.copies(Direction.STORE) == (0, 0)


async def test_an_end_that_waits_for_its_turn_comes_before_the_end_of_the_process(bench: Bench) -> None:
    copies = await _all_done(bench, 3)
    bench.signal(signal.SIGKILL)
    select.select([bench.link.pidfd], [], [])
    bench.link._died()
    assert all(isinstance(each.end, Done) for each in copies)
    await asyncio.sleep(0)


async def test_a_cancelled_wait_for_the_end_does_not_cancel_the_end(bench: Bench) -> None:
    bench.stop()
    copying = bench.store(0)
    bench.link._loop.remove_reader(bench.link.pidfd)  # the socket says first that it has died
    bench.signal(signal.SIGKILL)
    asking = asyncio.create_task(bench.link.pin(SLAB, SLAB))
    await asyncio.sleep(0)  # it asks
    await eventually_in_loop(lambda: bench.link._asked_at == 0)
    assert not asking.done()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    bench.link._loop.add_reader(bench.link.pidfd, bench.link._died)
    assert "SIGKILL" in await lost(copying)


async def test_a_copier_ends_with_its_daemons_socket(bench: Bench) -> None:
    bench.link._connection.shutdown(2)
    assert await bench.link.ended == "the copier has ended (exit code 1)"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("copy.device_lost@1=raise(uncorrectable ECC error)", "uncorrectable ECC error"),
        ("store.in_flight@1=raise(a bug)", "FailpointError: a bug"),
    ],
)
async def test_a_process_that_cannot_go_on_says_why_and_its_copies_end_with_it(
    monkeypatch: pytest.MonkeyPatch, rule: str, words: str
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, rule)
    async with started() as bench:
        assert (await bench.store(0).ended).nbytes == BLOCK
        copies = [bench.store(slot) for slot in range(3)]
        for each in copies:
            assert await lost(each) == f"the copier has ended ({words})"
        assert await bench.link.ended == f"the copier has ended ({words})"


# -- a process that hangs --------------------------------------------------------------------------------------------


async def stuck(link: CopierLink, what: str) -> None:
    """Return when this has made no progress for a moment."""
    await eventually_in_loop(lambda: link.stuck(0.0).startswith(f"{what} for "))


async def test_a_process_that_takes_nothing_is_stuck_until_it_goes_on(bench: Bench) -> None:
    bench.stop()
    assert bench.link.stuck(0.0) == "", "nothing is asked of it"
    copying = bench.store(0)
    await stuck(bench.link, "the thread of stores has taken nothing")
    assert bench.link.stuck(3600) == ""
    bench.signal(signal.SIGCONT)
    await copying.ended
    assert bench.link.stuck(3600) == ""


async def test_a_process_that_takes_nothing_from_the_start_is_stuck(bench: Bench) -> None:
    bench.stop()
    bench.submit(Direction.LOAD, [1], [0])
    await stuck(bench.link, "the thread of loads has taken nothing")


async def test_a_process_without_a_pool_is_not_stuck() -> None:
    """Its threads do not run yet."""
    link = CopierLink(launch(PROGRAM))
    await link.hello("host", [])
    await link.start("host")
    link.stuck(0.0)
    link.set_pace(4096)
    assert [link.stuck(0.0) for _ in range(3)] == ["", "", ""]
    link.kill()
    await link.ended


async def test_a_thread_that_does_not_come_back_is_stuck(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, f"copy.device_lost@0={gate}")
    async with started() as bench:
        copying = bench.submit(Direction.LOAD, [1], [0])
        await eventually_in_loop(lambda: gate.holds(bench.link.pid))  # or the store would be the one that is held
        await stuck(bench.link, "the thread of loads has been in one call")
        assert (await bench.store(0).ended).nbytes == BLOCK, "the other direction goes on"
        gate.let_pass()
        await copying.ended


async def test_a_request_that_is_not_answered_is_stuck(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_child, "ANSWER_SECONDS", 0.0)
    bench.stop()
    asking = asyncio.create_task(bench.link.pin(SLAB, SLAB))
    await stuck(bench.link, "a request has not been answered")
    bench.signal(signal.SIGCONT)
    await asking
    assert bench.link.stuck(3600) == ""


async def test_the_threads_have_names(bench: Bench) -> None:
    """In top and gdb."""
    for direction in Direction:
        await bench.submit(direction, [1], [0]).ended
    tasks = Path(f"/proc/{bench.link.pid}/task")
    names = [path.read_text().strip() for path in tasks.glob("*/comm")]  # noqa: ASYNC240
    assert {str(direction) for direction in Direction} <= set(names)
