"""What one rank may have outstanding: one more job is declined at once, and all come back when jobs are over."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.core.jobs import JobResult
from kvsidecar.errors import InvalidRequest
from kvsidecar.protocol.wire import pack_ids
from kvsidecar.server import attach_stream
from kvsidecar.server.attach_stream import AttachStream
from kvsidecar.support.tasks import TaskSet
from kvsidecar.types import Direction, Outcome, Refusal
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import NAMESPACE


class Transfers:
    """Jobs that run until the test says so."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.refused: Counter[Refusal] = Counter()

    async def store(self, *_: Any) -> JobResult:
        await self.gate.wait()
        return JobResult(Outcome.DONE)

    load = store

    def declined(self, _direction: Direction, reason: Refusal) -> JobResult:
        return JobResult(Outcome.DECLINED, reason)

    def invalid(self, _direction: Direction, error: InvalidRequest) -> JobResult:
        return JobResult(Outcome.DECLINED, Refusal.INVALID_REQUEST, str(error))

    def refuse(self, reason: Refusal) -> None:
        self.refused[reason] += 1


class Stream:
    def __init__(self) -> None:
        self.transfers = Transfers()
        self.replies: list[pb.AttachReply] = []
        self.session: Any = SimpleNamespace(
            registration=SimpleNamespace(namespace=NAMESPACE), jobs=TaskSet(lambda *_: None), jobs_by_id={},
            ending=False, denied=False, outstanding_blocks=0, events=(),
        )  # fmt: skip
        self.stream = AttachStream(
            self.session,
            self.replies.append,
            instances=SimpleNamespace(),  # type: ignore[arg-type]
            readiness=SimpleNamespace(listen=lambda _: lambda: None),  # type: ignore[arg-type]
            transfers=self.transfers,  # type: ignore[arg-type]
        )

    async def take(self, first: int, count: int, blocks: int = 1, kind: str = "store") -> None:
        packed = [pb.Blocks(hashes=bytes(32 * blocks), block_ids=pack_ids(list(range(blocks))))]
        for job in range(first, first + count):
            message = pb.Store(job=job, blocks=packed) if kind == "store" else pb.Load(job=job, blocks=packed)
            self.stream.take(pb.AttachRequest(**{kind: message}))
        await asyncio.sleep(0)

    def outcomes(self) -> Counter[str]:
        replies, self.replies[:] = list(self.replies), []
        return Counter(reply.done.reason or "done" for reply in replies)

    async def finish(self) -> None:
        self.transfers.gate.set()
        await self.session.jobs.join(10)
        self.transfers.gate.clear()


async def test_jobs_that_are_not_over_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_stream, "MAX_JOBS", 10)
    stream = Stream()
    await stream.take(1, 12)
    assert stream.outcomes() == {"limit": 2}
    await stream.finish()
    assert stream.outcomes() == {"done": 10}
    await stream.take(20, 10)
    assert not stream.outcomes()
    await stream.finish()


@pytest.mark.parametrize("kind", ["store", "load"])
async def test_blocks_of_jobs_that_are_not_over_are_limited(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(attach_stream, "MAX_OUTSTANDING_BLOCKS", 100)
    stream = Stream()
    await stream.take(1, 4, blocks=33, kind=kind)
    assert stream.outcomes() == {"limit": 1}
    await stream.take(5, 1, kind=kind)
    assert not stream.outcomes(), "100 of 100"
    await stream.take(6, 1, blocks=0, kind=kind)
    assert stream.outcomes() == {"limit": 1}, "a job without blocks costs something too"
    await stream.finish()
    assert stream.session.outstanding_blocks == 0
    await stream.take(7, 3, blocks=33, kind=kind)
    assert stream.outcomes() == {"done": 4}
    await stream.finish()


async def test_flushes_that_wait_are_limited_and_one_more_is_answered_with_what_is_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attach_stream, "MAX_FLUSHES", 3)
    stream = Stream()
    stream.session.jobs_by_id[1] = SimpleNamespace(
        task=asyncio.ensure_future(stream.transfers.gate.wait()),
        direction=Direction.STORE,
        control=SimpleNamespace(hurry=lambda: None),
    )
    for number in range(1, 5):
        stream.stream.take(pb.AttachRequest(flush=pb.Flush(flush=number, timeout_ms=60_000)))
    for _ in range(10):  # turns of the loop: three flushes wait a minute, the fourth for nothing
        await asyncio.sleep(0)
    (reply,) = stream.replies
    assert (reply.flushed.flush, list(reply.flushed.pending)) == (4, [1])
    assert stream.transfers.refused == {Refusal.LIMIT: 1}
    await stream.finish()
    assert [list(each.flushed.pending) for each in stream.replies[1:]] == [[], [], []]


async def test_a_rank_whose_namespace_was_taken_away_is_declined() -> None:
    stream = Stream()
    stream.session.denied = True
    await stream.take(1, 2)
    assert stream.outcomes() == {"denied": 2}
