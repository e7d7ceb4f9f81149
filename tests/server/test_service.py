"""One Attach stream of gRPC, with its context in the test's hands: what is done in each order of messages and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvsidecar.errors import InvalidRequest, KVSidecarError
from kvsidecar.server import service
from kvsidecar.server.attachment import MAX_UNREAD_BYTES
from kvsidecar.server.service import Service
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.steps import Steps
from kvsidecar.support.tasks import TaskSet
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import eventually_in_loop

REGISTER = pb.AttachRequest(register=pb.Register(token=b"t"))
IDLE = pb.AttachRequest(idle=pb.Idle())
SESSION = object()


class Aborted(Exception):
    pass


class Context:
    """The client's side, as gRPC shows it."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self.written: list[pb.AttachReply] = []
        self.room = asyncio.Event()
        self.room.set()
        self.aborted: tuple[grpc.StatusCode, str] | None = None

    async def read(self) -> Any:
        return await self.said.get()

    async def write(self, reply: pb.AttachReply) -> None:
        await self.room.wait()
        self.written.append(reply)

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.aborted = code, text
        raise Aborted


class Handler:
    """Registers and ends sessions when the test says so."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.failures: list[str] = []
        self.tasks = TaskSet(lambda name, error: self.failures.append(f"{name}: {error}"))
        self.steps = Steps(LoopTime(lambda: 0.0))
        self.registered: asyncio.Future[Any] = loop.create_future()
        self.registering = self.opened = 0
        self.reply_bytes = 0
        """Of the reply to each message after the first."""
        self.ends: list[bool] = []
        """Of each end of the session that has begun, whether the client had gone."""
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.counted: list[str] = []

    def count_refusal(self, error: Exception) -> None:
        self.counted.append(str(error))

    async def register(self, _first: Any) -> Any:
        self.registering += 1
        return await self.registered

    def open(self, _session: Any, send: Callable[[pb.AttachReply], None], _on_lost: object) -> Any:
        self.opened += 1
        send(pb.AttachReply(registered=pb.Registered(session=1)))

        def handle(_: object) -> None:
            send(pb.AttachReply(done=pb.JobDone(reason="x" * self.reply_bytes)))

        return SimpleNamespace(handle=handle, close=lambda: None)

    async def end(self, _session: Any, *, gone: bool) -> None:
        self.ends.append(gone)
        await self.may_end.wait()


class Bench:
    """A stream that is served."""

    def __init__(self) -> None:
        self.context, self.handler = Context(), Handler()
        attach = Service(self.handler).Attach  # type: ignore[arg-type]
        self.served = asyncio.create_task(attach(None, self.context))  # type: ignore[arg-type]

    def say(self, *messages: object) -> None:
        for message in messages:
            self.context.said.put_nowait(message)

    async def registering(self) -> None:
        self.say(REGISTER)
        await eventually_in_loop(lambda: self.handler.registering)

    async def opened(self) -> None:
        await self.registering()
        self.handler.registered.set_result(SESSION)
        await eventually_in_loop(lambda: self.context.written)

    async def cancel(self) -> None:
        """As gRPC does when the client has gone."""
        self.served.cancel()
        await asyncio.gather(self.served, return_exceptions=True)

    async def over(self) -> None:
        await asyncio.wait_for(asyncio.gather(self.served, return_exceptions=True), 60)
        await self.handler.tasks.join(60)
        assert not self.handler.failures


async def test_a_half_closed_stream_ends_its_session_in_order_and_without_an_error() -> None:
    bench = Bench()
    await bench.opened()
    bench.say(grpc.aio.EOF)
    await bench.over()
    assert (bench.handler.ends, bench.context.aborted) == ([False], None)


async def test_a_client_that_half_closes_while_it_registers_gets_its_session_and_the_end_of_it() -> None:
    bench = Bench()
    await bench.registering()
    bench.say(grpc.aio.EOF)
    bench.handler.registered.set_result(SESSION)
    await bench.over()
    assert (bench.handler.opened, bench.handler.ends, bench.context.aborted) == (1, [False], None)
    assert bench.context.written[0].HasField("registered")


async def test_a_half_closed_stream_without_a_message_is_refused_as_it_does_not_register() -> None:
    bench = Bench()
    bench.say(grpc.aio.EOF)
    bench.handler.registered.set_result(InvalidRequest("not registered"))
    await bench.over()
    assert bench.context.aborted == (grpc.StatusCode.INVALID_ARGUMENT, "not registered")


async def test_a_refused_registration_aborts_the_call_and_ends_nothing() -> None:
    bench = Bench()
    await bench.registering()
    bench.handler.registered.set_result(InvalidRequest("no"))
    await bench.over()
    assert bench.context.aborted == (grpc.StatusCode.INVALID_ARGUMENT, "no")
    assert (bench.handler.opened, bench.handler.ends) == (0, [])


async def test_a_client_that_goes_before_it_says_anything_leaves_nothing() -> None:
    bench = Bench()
    await asyncio.sleep(0)
    await bench.cancel()
    await bench.over()
    assert (bench.handler.registering, bench.handler.ends, bench.handler.counted) == (0, [], [])


@pytest.mark.parametrize("answer", [SESSION, InvalidRequest("no")])
async def test_the_session_of_a_client_that_goes_while_it_registers_is_not_opened_and_ended_as_gone(
    answer: object,
) -> None:
    bench = Bench()
    await bench.registering()
    await bench.cancel()
    bench.handler.registered.set_result(answer)
    await bench.over()
    assert (bench.handler.opened, bench.handler.ends) == (0, [] if isinstance(answer, KVSidecarError) else [True])


async def test_a_client_that_goes_ends_its_session_as_gone() -> None:
    bench = Bench()
    await bench.opened()
    await bench.cancel()
    await bench.over()
    assert bench.handler.ends == [True]


async def test_a_client_that_goes_while_its_session_ends_in_order_lets_no_job_start() -> None:
    bench = Bench()
    await bench.opened()
    bench.handler.may_end.clear()
    bench.say(grpc.aio.EOF)
    await eventually_in_loop(lambda: bench.handler.ends)
    await bench.cancel()
    await eventually_in_loop(lambda: len(bench.handler.ends) == 2)
    bench.handler.may_end.set()
    await bench.over()
    assert bench.handler.ends == [False, True]


async def test_a_silent_client_is_refused_in_time_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FIRST_MESSAGE_SECONDS", 0.0)
    bench = Bench()
    await bench.over()
    code, text = bench.context.aborted or (None, "")
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert bench.handler.counted == [text]
    assert "no message arrived within 0 s" in text
    assert bench.handler.registering == 0


@pytest.mark.parametrize("reply_bytes", [10, 100_000])
async def test_a_client_that_does_not_read_its_replies_is_refused_before_they_fill_the_memory(
    reply_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_UNREAD", 100)
    bench = Bench()
    await bench.opened()
    bench.handler.reply_bytes = reply_bytes
    bench.context.room.clear()
    bench.say(*[IDLE] * 200)
    await bench.over()
    code, text = bench.context.aborted or (None, "")
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert bench.handler.counted == [text]
    assert "read the Attach stream while jobs are sent" in text
    assert bench.handler.ends == [False]
    taken = 200 - bench.context.said.qsize()
    assert taken <= 102
    assert taken * reply_bytes <= MAX_UNREAD_BYTES + 2 * reply_bytes
