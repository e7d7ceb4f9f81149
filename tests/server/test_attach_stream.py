"""What one rank may have outstanding: one more job is declined at once, and all come back when jobs are over."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.core.job import Job, JobResult
from kvsidecar.core.sessions import RankSession, Work
from kvsidecar.errors import InvalidRequest, Refusal
from kvsidecar.protocol.wire import pack_ids
from kvsidecar.server import attach_stream
from kvsidecar.server.attach_stream import AttachStream
from kvsidecar.support.tasks import TaskSet
from kvsidecar.types import Direction, Outcome
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import NAMESPACE


class Runner:
    """Jobs that run until the test says so."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.refused: Counter[Refusal] = Counter()

    def start(self, session: RankSession, job: Job, *, deadline: float | None = None) -> None:
        session.add(job)
        session.tasks.spawn(self._run(session, job), name="job")

    async def _run(self, session: RankSession, job: Job) -> None:
        await self.gate.wait()
        session.remove(job)
        job.end(JobResult(Outcome.DONE), 0.0)

    def decline(self, _direction: Direction, reason: Refusal, error: str = "") -> JobResult:
        return JobResult(Outcome.DECLINED, reason, error)

    def refuse(self, reason: Refusal) -> None:
        self.refused[reason] += 1


class Stream:
    def __init__(self) -> None:
        self.runner = Runner()
        self.replies: list[pb.AttachReply] = []
        registration: Any = SimpleNamespace(namespace=NAMESPACE)
        nobody: Any = None
        self.failures: list[object] = []
        tasks = TaskSet(lambda *failure: self.failures.append(failure))
        self.session = RankSession(1, nobody, registration, nobody, 1, (), {}, 0.0, tasks)
        self.stream = AttachStream(
            self.session,
            self.replies.append,
            instances=SimpleNamespace(),  # type: ignore[arg-type]
            readiness=SimpleNamespace(listen=lambda _: lambda: None),  # type: ignore[arg-type]
            runner=self.runner,  # type: ignore[arg-type]
            watches=nobody,
        )

    async def handle(self, first: int, count: int, blocks: int = 1, kind: str = "store") -> None:
        packed = [pb.Blocks(hashes=bytes(32 * blocks), block_ids=pack_ids(list(range(blocks))))]
        for job in range(first, first + count):
            message = pb.Store(job=job, blocks=packed) if kind == "store" else pb.Load(job=job, blocks=packed)
            self.stream.handle(pb.AttachRequest(**{kind: message}))
        await asyncio.sleep(0)

    def outcomes(self) -> Counter[str]:
        replies, self.replies[:] = list(self.replies), []
        return Counter(reply.done.reason or "done" for reply in replies)

    async def finish(self) -> None:
        self.runner.gate.set()
        await self.session.tasks.join(10)
        self.runner.gate.clear()


async def test_jobs_that_are_not_over_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_stream, "MAX_JOBS", 10)
    stream = Stream()
    await stream.handle(1, 12)
    assert stream.outcomes() == {"limit": 2}
    await stream.finish()
    assert stream.outcomes() == {"done": 10}
    await stream.handle(20, 10)
    assert not stream.outcomes()
    await stream.finish()


@pytest.mark.parametrize("kind", ["store", "load"])
async def test_blocks_of_jobs_that_are_not_over_are_limited(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(attach_stream, "MAX_OUTSTANDING_BLOCKS", 100)
    stream = Stream()
    await stream.handle(1, 4, blocks=33, kind=kind)
    assert stream.outcomes() == {"limit": 1}
    await stream.handle(5, 1, kind=kind)
    assert not stream.outcomes(), "100 of 100"
    await stream.handle(6, 1, blocks=0, kind=kind)
    assert stream.outcomes() == {"limit": 1}, "a job without blocks costs something too"
    await stream.finish()
    assert stream.session.outstanding_blocks == 0
    await stream.handle(7, 3, blocks=33, kind=kind)
    assert stream.outcomes() == {"done": 4}
    await stream.finish()


@pytest.mark.parametrize("limit", ["jobs", "blocks"])
async def test_jobs_of_all_ranks_of_a_user_are_limited_together(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """256 ranks of 8,192 jobs each would take gigabytes of the daemon's own memory."""
    monkeypatch.setattr(attach_stream, f"MAX_{limit.upper()}_OF_USER", 10)
    one, other, another_users = Stream(), Stream(), Stream()
    other.session.of_user = one.session.of_user
    await one.handle(1, 6)
    await other.handle(1, 6)
    await another_users.handle(1, 6)
    assert other.outcomes() == {"limit": 2}
    assert not one.outcomes() + another_users.outcomes()
    await one.finish()
    await other.handle(7, 6)
    assert not other.outcomes()
    await other.finish()
    assert one.session.of_user == Work()
    await another_users.finish()


class Turns:
    """Turns of the loop that the test gives."""

    def __init__(self) -> None:
        self.asked = 0
        self._given = asyncio.Semaphore(0)

    async def __call__(self) -> None:
        self.asked += 1
        await self._given.acquire()

    async def give(self) -> None:
        self._given.release()
        for _ in range(10):
            await asyncio.sleep(0)


def store_of(job: int) -> pb.Store:
    return pb.Store(job=job, blocks=[pb.Blocks(hashes=bytes(32), block_ids=pack_ids([job]))])


async def test_calls_begin_one_in_a_turn_of_the_loop_in_their_order_and_behind_a_job_that_still_begins() -> None:
    stream, turns = Stream(), Turns()
    calls = [asyncio.ensure_future(stream.stream.call(store_of(job), Direction.STORE, turns)) for job in (1, 2, 3, 4)]
    await asyncio.sleep(0)
    assert not stream.session.jobs
    calls[1].cancel()
    await turns.give()
    assert list(stream.session.jobs) == [1]
    beginning: Any = object()
    stream.session.beginning.append(beginning)
    for _ in range(3):
        await turns.give()
    assert list(stream.session.jobs) == [1]
    stream.session.beginning.clear()
    await turns.give()
    await turns.give()
    assert list(stream.session.jobs) == [1, 3, 4]
    calls[3].cancel()
    await asyncio.sleep(0)
    assert [each.stopped for each in stream.session.jobs.values()] == [None, None, Refusal.CANCELLED]
    await stream.finish()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert [each.job for each in ended if isinstance(each, pb.JobDone)] == [1, 3]
    assert not stream.replies, "their answers are the calls'"
    assert not stream.failures, "of the one that nobody waits for"


async def test_a_call_is_held_to_the_limits_of_the_stream_and_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_stream, "MAX_JOBS", 2)
    stream = Stream()

    async def at_once() -> None:
        pass

    await stream.handle(1, 2)
    declined = await stream.stream.call(store_of(3), Direction.STORE, at_once)
    assert declined.reason == "limit"
    with pytest.raises(InvalidRequest, match="job 1 is still running"):
        await stream.stream.call(store_of(1), Direction.STORE, at_once)
    await stream.finish()
    stream.session.ending = True
    assert (await stream.stream.call(store_of(3), Direction.STORE, at_once)).reason == "draining"


async def test_what_flushes_of_a_user_wait_for_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 flushes of a rank, each for all of its 8,192 jobs, took 2 GB."""
    monkeypatch.setattr(attach_stream, "MAX_WAITS_OF_USER", 10)
    one, other = Stream(), Stream()
    other.session.of_user = one.session.of_user
    for stream, flushes in ((one, 2), (other, 2)):
        await stream.handle(1, 4)
        for number in range(flushes):
            stream.stream.handle(pb.AttachRequest(flush=pb.Flush(flush=number, timeout_ms=60_000)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not one.replies
    assert [list(each.flushed.pending) for each in other.replies] == [[1, 2, 3, 4]] * 2
    assert other.runner.refused == {Refusal.LIMIT: 2}
    await one.finish()
    await other.finish()
    assert one.session.of_user == Work()


async def test_a_flush_takes_effect_before_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client sends it with what follows, and the event loop reads both at once."""
    first: list[int] = []
    monkeypatch.setattr(Job, "prioritize", lambda job: first.append(job.number))
    stream = Stream()
    await stream.handle(1, 2)
    stream.stream.handle(pb.AttachRequest(flush=pb.Flush(flush=1, timeout_ms=60_000, mode=pb.Flush.MODE_FINISH)))
    assert first == [1, 2]
    await stream.handle(3, 1)
    assert first == [1, 2]
    await stream.finish()


async def test_flushes_that_wait_are_limited_and_one_more_is_answered_with_what_is_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attach_stream, "MAX_FLUSHES", 3)
    stream = Stream()
    await stream.handle(1, 1)
    for number in range(1, 5):
        stream.stream.handle(pb.AttachRequest(flush=pb.Flush(flush=number, timeout_ms=60_000)))
    for _ in range(10):  # iterations of the loop: three flushes wait a minute, the fourth for nothing
        await asyncio.sleep(0)
    (reply,) = stream.replies
    assert (reply.flushed.flush, list(reply.flushed.pending)) == (4, [1])
    assert stream.runner.refused == {Refusal.LIMIT: 1}
    await stream.finish()
    flushed = [each.flushed for each in stream.replies[1:] if each.HasField("flushed")]
    assert [list(each.pending) for each in flushed] == [[], [], []]
