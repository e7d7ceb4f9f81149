"""An Attach stream of gRPC whose replies are not read, or of which one direction fails. (What else becomes of a stream:
the table in test_attach_protocol.py, both carriers in tests/client/test_transport.py, and tests/e2e/test_wire.py.)"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvsidecar.server import service
from kvsidecar.server.attachment import MAX_UNREAD_BYTES
from kvsidecar.server.handler import INTERNAL
from kvsidecar.server.service import Service, looked_for_bytes
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.steps import Steps
from kvsidecar.support.tasks import TaskSet
from kvsidecar.v1 import sidecar_pb2 as pb

SESSION = object()
MESSAGES = 200


class Context:
    """A client that sends all of its messages and reads nothing, as gRPC shows it."""

    def __init__(self) -> None:
        self.messages = [pb.AttachRequest(register=pb.Register()), *[pb.AttachRequest(idle=pb.Idle())] * MESSAGES]
        self.aborted: tuple[grpc.StatusCode, str] | None = None

    async def read(self) -> Any:
        return self.messages.pop(0)

    async def write(self, _reply: pb.AttachReply) -> None:
        await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.aborted = code, text
        raise InterruptedError


@pytest.mark.parametrize("part", ["read", "write"])
async def test_a_stream_of_which_one_direction_fails_unexpectedly_ends_and_its_client_is_told(part: str) -> None:
    failures: list[str] = []
    ends: list[bool] = []

    def open_(_session: Any, send: Any, _on_lost: object) -> Any:
        send(pb.AttachReply(registered=pb.Registered(session=1)))
        return SimpleNamespace(handle=lambda _: None, close=lambda: None)

    async def end(_session: Any, *, gone: bool) -> None:
        ends.append(gone)

    async def read() -> Any:
        if context.messages:
            return context.messages.pop(0)
        if part == "read":
            raise ZeroDivisionError
        return await asyncio.Event().wait()

    async def write(_reply: pb.AttachReply) -> None:
        if part == "write":
            raise ZeroDivisionError

    tasks = TaskSet(lambda name, error: failures.append(f"{name}: {type(error).__name__}"))
    handler: Any = SimpleNamespace(
        tasks=tasks, steps=Steps(LoopTime(lambda: 0.0)), register=lambda _: asyncio.sleep(0, SESSION), open=open_,
        end=end, count_refusal=lambda _: pytest.fail("the client is not to blame"),
    )  # fmt: skip
    context: Any = Context()
    context.messages = context.messages[:1]
    context.read, context.write = read, write
    with pytest.raises(InterruptedError):
        await asyncio.wait_for(Service(handler).Attach(None, context), 60)  # type: ignore[arg-type]
    await tasks.join(60)
    assert context.aborted == (grpc.StatusCode.INTERNAL, INTERNAL)
    assert (ends, failures) == ([False], [f"attach-{'reader' if part == 'read' else 'writer'}: ZeroDivisionError"])


@pytest.mark.parametrize("reply_bytes", [10, 100_000])
async def test_a_client_that_does_not_read_its_replies_is_refused_before_they_fill_the_memory(
    reply_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_UNREAD", 100)
    failures: list[object] = []
    counted: list[str] = []
    ends: list[bool] = []

    def open_(_session: Any, send: Any, _on_lost: object) -> Any:
        reply = pb.AttachReply(done=pb.JobDone(reason="x" * reply_bytes))
        return SimpleNamespace(handle=lambda _: send(reply), close=lambda: None)

    async def end(_session: Any, *, gone: bool) -> None:
        ends.append(gone)

    tasks = TaskSet(lambda *failure: failures.append(failure))
    handler: Any = SimpleNamespace(
        tasks=tasks, steps=Steps(LoopTime(lambda: 0.0)), register=lambda _: asyncio.sleep(0, SESSION), open=open_,
        end=end, count_refusal=lambda error: counted.append(str(error)),
    )  # fmt: skip
    context: Any = Context()
    with pytest.raises(InterruptedError):
        await asyncio.wait_for(Service(handler).Attach(None, context), 60)  # type: ignore[arg-type]
    await tasks.join(60)
    code, text = context.aborted
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert counted == [text]
    assert "read the Attach stream while jobs are sent" in text
    assert (ends, failures) == ([False], [])
    taken = MESSAGES - len(context.messages)
    assert taken <= 102
    assert taken * reply_bytes <= MAX_UNREAD_BYTES + 2 * reply_bytes


@pytest.mark.parametrize(
    ("tail", "own", "hashes"),
    [(0, b"", 100), (9, b"", 100 + 3 * 10), (200, b"", 100 + 3 * 100), (9, bytes(5 * 32), 100 + 3 * 5)],
    ids=["none", "of the first group", "longer than it", "of hashes of their own"],
)
def test_a_lookup_is_as_large_as_what_it_looks_for_whatever_came_with_it(tail: int, own: bytes, hashes: int) -> None:
    first = pb.LookupGroup(hashes=bytes(100 * 32))
    tails = [pb.LookupGroup(group=group, tail=tail, hashes=own) for group in range(1, 4)]
    request = pb.LookupRequest(namespace=pb.Namespace(hash_bytes=32), groups=[first, *tails])
    assert looked_for_bytes(request) == hashes * 32
