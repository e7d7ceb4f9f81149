"""One connection of the local protocol, with its transport in the test's hands."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvsidecar.core.quota import Quota
from kvsidecar.errors import Refusal, Unavailable
from kvsidecar.protocol.framing import HEADER_BYTES, frame
from kvsidecar.server.attach_protocol import MAX_EARLY_BYTES
from kvsidecar.server.attach_stream import AttachStream
from kvsidecar.server.attachment import MAX_UNREAD_BYTES
from kvsidecar.server.handler import INTERNAL
from kvsidecar.server.local_protocol import FREE_UNREAD_BYTES, MAX_HELD_BYTES, LocalConnection, unread_replies
from kvsidecar.server.partial_messages import PartialMessages
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.steps import Steps
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.user_time import UserTime
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.clock import Clock

REQUESTS = 64
"""So many lookups have time in an iteration of the loop."""


class Transport:
    """Records what is written, and what becomes of it."""

    def __init__(self) -> None:
        self.replies: list[pb.LocalReply] = []
        self.reading = True
        self.closing = False
        self.unread = 0

    def get_write_buffer_size(self) -> int:
        return self.unread

    def write(self, data: bytes) -> None:
        self.replies.append(pb.LocalReply.FromString(data[HEADER_BYTES:]))

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closing = True

    abort = close


class Handler:
    """Registers when the test says so, and looks up what it says."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.tasks = TaskSet(lambda name, error: self.failures.append(f"{name}: {error}"))
        self.registered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.lookup: Callable[[Any, Any], Any] = self._looked_up
        self.clock = Clock()
        self.user_time = UserTime(self.clock, REQUESTS)
        self.taken: list[int] = []
        self.lookup_seconds: list[float] = []
        self.steps = Steps(LoopTime(lambda: 0.0, 0.0))  # one per iteration
        self.steps.called()
        self.ended = False

    def _looked_up(self, _request: Any, _caller: Any) -> pb.LookupReply:
        self.clock.now += 1
        return pb.LookupReply(ready=True)

    def count_refusal(self, _error: Exception) -> None:
        """It counts nothing."""

    def answered(self, _request: Any, arrived: float) -> None:
        self.lookup_seconds.append(self.clock.now - arrived)

    async def register(self, _first: Any) -> Any:
        return await self.registered

    def open(
        self, _session: Any, send: Callable[[pb.AttachReply], None], _on_lost: Callable[[Exception], object]
    ) -> Any:
        send(pb.AttachReply(registered=pb.Registered(session=1)))
        return SimpleNamespace(handle=lambda message: self.taken.append(message.store.job), close=lambda: None)

    async def end(self, _session: Any, *, gone: bool) -> None:
        assert not gone
        self.ended = True


def made(
    partial_messages: PartialMessages | None = None, uid: int = 1, unread: Quota | None = None
) -> tuple[LocalConnection, Transport, Handler]:
    transport, handler = Transport(), Handler()
    connection = LocalConnection(
        handler,  # type: ignore[arg-type]
        partial_messages or PartialMessages(),
        unread or unread_replies(),
        SimpleNamespace(token=b"t", uid=uid, client="c", caller=None),  # type: ignore[arg-type]
    )
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport, handler


def framed(*requests: pb.LocalRequest) -> bytes:
    return b"".join(frame(request.SerializeToString()) for request in requests)


def register() -> pb.LocalRequest:
    return pb.LocalRequest(attach=pb.AttachRequest(register=pb.Register(token=b"t")))


def store(job: int, nbytes: int = 0) -> pb.LocalRequest:
    return pb.LocalRequest(attach=pb.AttachRequest(store=pb.Store(job=job, blocks=[pb.Blocks(hashes=bytes(nbytes))])))


async def settled(handler: Handler) -> None:
    await handler.tasks.join(10)
    assert not handler.failures


async def test_what_comes_before_the_answer_to_the_registration_is_kept_within_a_bound() -> None:
    for size, refused in ((MAX_EARLY_BYTES // 4, False), (MAX_EARLY_BYTES // 2, True)):
        connection, transport, handler = made()
        connection.data_received(framed(register(), store(1, size), store(2, size)))
        assert transport.reading is not refused
        handler.registered.set_result(SimpleNamespace())
        await settled(handler)
        if refused:
            ended, error = transport.replies[-2:]
            assert ended.ended.error.code == error.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert (handler.ended, transport.closing) == (True, True), "the session that came to be was not ended"
        else:
            assert handler.taken == [1, 2]


async def test_what_follows_a_large_job_waits_until_it_has_begun_as_a_whole() -> None:
    connection, transport, handler = made()
    session = SimpleNamespace(beginning=None)

    class Stream(AttachStream):
        def __post_init__(self) -> None: ...

        def close(self) -> None: ...

        def handle(self, message: pb.AttachRequest) -> None:
            handler.taken.append(message.store.job)
            session.beginning = message if message.store.job % 2 else None

    handler.open = lambda *_: Stream(session, *[None] * 5)  # type: ignore[arg-type, method-assign, assignment]
    handler.registered.set_result(session)
    connection.data_received(framed(register()))
    await settled(handler)
    connection.data_received(framed(store(1), store(2), store(3)))
    connection.data_received(framed(lookup(1), store(4)))
    for taken in ([1], [1, 2, 3], [1, 2, 3, 4]):
        for _ in range(20):
            await asyncio.sleep(0)
        assert handler.taken == taken
        session.beginning = None
    assert [each.lookup.ready for each in transport.replies if each.HasField("lookup")] == [True]


async def test_a_stream_that_is_lost_while_it_opens_is_closed_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copier may have died since the registration: nobody could be told before."""
    connection, transport, handler = made()
    closed: list[bool] = []

    def lost(_session: Any, _send: Any, on_lost: Callable[[Exception], object]) -> Any:
        on_lost(Unavailable("the copier has died", refusal=Refusal.DEVICE_LOST))
        return SimpleNamespace(handle=lambda _: None, close=lambda: closed.append(True))

    monkeypatch.setattr(handler, "open", lost)
    await attached(connection, handler)
    assert (closed, handler.ended) == ([True], True)
    assert transport.replies[-1].ended.error.code == grpc.StatusCode.UNAVAILABLE.value[0]


async def test_a_flood_lets_others_have_their_turn() -> None:
    connection, transport, _ = made()
    connection.data_received(framed(*(pb.LocalRequest(call=call, lookup=pb.LookupRequest()) for call in range(1, 201))))
    turns = []
    while len(transport.replies) < 200:
        turns.append(len(transport.replies))
        assert not transport.reading, "more is read while this much is still to do"
        await asyncio.sleep(0)
    assert turns == [REQUESTS, 2 * REQUESTS, 3 * REQUESTS]
    assert transport.reading


async def test_a_lookup_has_taken_from_its_arrival_on_also_while_it_waited_for_its_turn() -> None:
    connection, transport, handler = made()
    handler.clock.now += 1000
    first, second = framed(*map(lookup, range(REQUESTS + 2))), framed(lookup(REQUESTS + 2))
    connection.data_received(first[:5])
    handler.clock.now += 1000  # a client that is slow to send takes the daemon no time
    connection.data_received(first[5:])
    assert len(transport.replies) == REQUESTS
    handler.clock.now += 100  # others have their turn
    await asyncio.sleep(0)
    assert handler.lookup_seconds == [*range(1, REQUESTS + 1), REQUESTS + 101, REQUESTS + 102]
    handler.clock.now += 1000
    connection.data_received(second)
    assert handler.lookup_seconds[-1] == 1


async def test_what_arrives_while_a_job_waits_has_taken_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, _, handler = made()
    await attached(connection, handler)
    monkeypatch.setattr(handler.steps, "may_begin", lambda: False)
    connection.data_received(framed(store(1)))
    handler.clock.now += 10
    connection.data_received(framed(lookup(1)))
    handler.clock.now += 5
    connection.data_received(framed(lookup(2)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert handler.lookup_seconds == [6, 7]


async def test_a_flood_over_many_connections_lets_another_user_have_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    flood = [made() for _ in range(10)]
    other, answers, handler = made(uid=2)
    for *_, each in flood:
        monkeypatch.setattr(each, "user_time", handler.user_time)
        monkeypatch.setattr(each, "clock", handler.clock)
    for connection, *_ in flood:
        connection.data_received(framed(*map(lookup, range(1, REQUESTS + 1))))
    other.data_received(framed(lookup(1)))
    assert len(answers.replies) == 1
    assert sum(len(transport.replies) for _, transport, _ in flood) == REQUESTS
    for _ in range(10):
        await asyncio.sleep(0)
    assert sum(len(transport.replies) for _, transport, _ in flood) == 10 * REQUESTS
    assert all(transport.reading for _, transport, _ in flood)


async def test_a_connection_may_end_while_it_waits_for_time() -> None:
    connection, transport, _ = made()
    connection.data_received(framed(*map(lookup, range(1, 201))))
    connection.connection_lost(None)
    await asyncio.sleep(0)
    assert len(transport.replies) == REQUESTS


def lookup(call: int) -> pb.LocalRequest:
    return pb.LocalRequest(call=call, lookup=pb.LookupRequest())


async def attached(connection: LocalConnection, handler: Handler) -> None:
    connection.data_received(framed(register()))
    handler.registered.set_result(SimpleNamespace())
    await settled(handler)


async def test_a_lookup_waits_for_one_job_and_not_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [made() for _ in range(8)]
    steps = ranks[0][2].steps
    for connection, _, handler in ranks:
        await attached(connection, handler)
        monkeypatch.setattr(handler, "steps", steps)
    scheduler, answers, _ = made()
    for connection, _, _ in ranks:
        connection.data_received(framed(store(1), store(2)))
    scheduler.data_received(framed(lookup(1)))
    assert [reply.call for reply in answers.replies] == [1]
    assert sum(len(handler.taken) for *_, handler in ranks) == 0
    turns = 0
    while any(len(handler.taken) < 2 for *_, handler in ranks):
        await asyncio.sleep(0)
        turns += 1
    assert turns == 16, "each iteration takes one job"
    assert all(handler.taken == [1, 2] for *_, handler in ranks)


async def test_on_one_connection_nothing_overtakes_a_job_that_waits() -> None:
    """A release behind a load may end the lease that the load names."""
    connection, transport, handler = made()
    await attached(connection, handler)
    before = len(transport.replies)
    connection.data_received(framed(store(1), store(2), lookup(1)))
    connection.data_received(framed(lookup(2)))
    assert (handler.taken, len(transport.replies)) == ([], before)
    await asyncio.sleep(0)
    assert (handler.taken, len(transport.replies)) == ([1], before)
    await asyncio.sleep(0)
    assert handler.taken == [1, 2]
    assert [reply.call for reply in transport.replies[before:]] == [1, 2]


async def test_a_job_that_waits_may_be_the_last_message_of_an_iteration() -> None:
    connection, transport, handler = made()
    await attached(connection, handler)
    before = len(transport.replies)
    lookups = [lookup(call) for call in range(1, REQUESTS - 1)]
    connection.data_received(framed(store(1), *lookups, store(2), lookup(REQUESTS)))
    assert (handler.taken, len(transport.replies) - before) == ([], 0)
    await asyncio.sleep(0)
    assert (handler.taken, len(transport.replies) - before) == ([1], len(lookups))
    await asyncio.sleep(0)
    assert (handler.taken, len(transport.replies) - before) == ([1, 2], len(lookups) + 1)
    assert transport.reading


async def test_what_is_read_while_a_job_waits_is_bounded() -> None:
    connection, transport, handler = made()
    await attached(connection, handler)
    connection.data_received(framed(store(1), store(2)))
    connection.data_received(framed(store(3, MAX_HELD_BYTES // 2)))
    assert transport.reading
    connection.data_received(framed(store(4, MAX_HELD_BYTES)))
    assert not transport.reading
    for _ in range(4):
        await asyncio.sleep(0)
    assert handler.taken == [1, 2, 3, 4]
    assert transport.reading


def too_much(connection: LocalConnection, nbytes: int = MAX_UNREAD_BYTES + 1) -> None:
    """The client has not read so much of what it was sent."""
    connection._transport.unread = nbytes  # type: ignore[attr-defined]
    connection.pause_writing()


async def test_what_all_connections_of_a_user_do_not_read_has_a_limit() -> None:
    """1,024 of them could have a megabyte each."""
    unread = Quota(3 * MAX_UNREAD_BYTES, "bytes of replies that wait")
    one, two, three, four = (made(unread=unread) for _ in range(4))
    (others, its_transport, _) = made(unread=unread, uid=2)
    for connection, transport, _ in (one, two, three):
        too_much(connection, MAX_UNREAD_BYTES)
        assert transport.reading
    too_much(others, MAX_UNREAD_BYTES)
    assert its_transport.reading
    too_much(four[0], FREE_UNREAD_BYTES + 1)
    assert not four[1].reading
    await asyncio.sleep(0)
    assert four[1].replies[-1].error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    one[0].resume_writing()
    two[0].connection_lost(None)
    five = made(unread=unread)
    too_much(five[0], FREE_UNREAD_BYTES + 1)
    five[1].unread = MAX_UNREAD_BYTES
    five[0].send(pb.AttachReply())
    assert five[1].reading
    five[1].unread += 1
    five[0].send(pb.AttachReply())
    assert not five[1].reading
    for connection, _, _ in (three, four, five):
        connection.connection_lost(None)
    assert unread.held == MAX_UNREAD_BYTES, "what is counted is given back"


async def test_a_client_that_is_refused_at_a_job_that_has_waited_is_told_and_gone() -> None:
    """Whether or not its user has time left in that iteration of the loop."""
    for left in True, False:
        connection, transport, handler = made()
        await attached(connection, handler)

        def answer(connection: LocalConnection, handler: Handler, left: bool, message: pb.AttachRequest) -> None:
            handler.taken.append(message.store.job)
            too_much(connection)
            if not left:
                handler.user_time.spend(1, REQUESTS)

        connection._stream.handle = partial(answer, connection, handler, left)  # type: ignore[method-assign, union-attr]
        connection.data_received(framed(store(1), store(2)))
        for _ in range(4):
            await asyncio.sleep(0)
        await settled(handler)
        assert handler.taken == [1]
        assert (handler.ended, transport.closing, transport.reading) == (True, True, False)
        assert transport.replies[-1].error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


@pytest.mark.parametrize("waits_for", ["a turn", "time"])
async def test_a_connection_of_which_the_rest_cannot_be_taken_ends(
    waits_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    connection, transport, handler = made()
    await attached(connection, handler)
    connection.data_received(framed(store(1), store(2)) if waits_for == "a turn" else framed(*map(lookup, range(200))))
    assert not errors
    monkeypatch.setattr(connection._frames, "next", lambda: 1 / 0)
    for _ in range(4):
        await asyncio.sleep(0)
    assert transport.closing, "its client waits for ever"
    assert [type(error) for error in errors] == [ZeroDivisionError], "nobody hears of it"


async def test_a_job_that_waits_ends_with_its_connection() -> None:
    connection, _, handler = made()
    await attached(connection, handler)
    connection.data_received(framed(store(1), store(2), store(3)))
    await asyncio.sleep(0)
    connection.connection_lost(None)
    for _ in range(10):
        await asyncio.sleep(0)
    assert handler.taken == [1]


@pytest.mark.filterwarnings("ignore")
async def test_a_request_that_fails_unexpectedly_is_answered_and_costs_no_other() -> None:
    connection, transport, handler = made()

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    handler.lookup = fail
    connection.data_received(framed(pb.LocalRequest(call=1, lookup=pb.LookupRequest())))
    assert (transport.replies[0].call, transport.replies[0].error.text) == (1, INTERNAL)
    handler.lookup = lambda *_: pb.LookupReply(ready=True)
    connection.data_received(framed(pb.LocalRequest(call=2, lookup=pb.LookupRequest())))
    assert transport.replies[1].lookup.ready


async def test_nothing_is_written_to_a_connection_that_is_over() -> None:
    connection, transport, handler = made()
    connection.data_received(framed(register()))
    transport.abort()
    connection.connection_lost(None)
    handler.registered.set_result(SimpleNamespace())
    await settled(handler)
    assert connection.closed.done()
    assert not transport.replies
    assert not handler.ended, "whoever watches the connection ends the session, as that of one that has gone"


async def test_the_room_of_a_connection_that_is_refused_is_free_before_the_client_has_read_why() -> None:
    partial_messages = PartialMessages(1000, seconds=0.02)
    message = framed(store(1, 900))
    late, transport, handler = made(partial_messages)
    late.data_received(message[:-1])
    while not transport.closing:  # noqa: ASYNC110 - it is the transport of the tests, which tells nobody
        await asyncio.sleep(0.01)
    assert "was not complete" in transport.replies[-1].error.text
    other, other_transport, _ = made(partial_messages)
    other.data_received(message[:-1])
    assert other_transport.reading, "it waits for room that nobody uses"
    other.connection_lost(None)
    await settled(handler)


@pytest.mark.parametrize("seed", range(50))
async def test_however_messages_are_cut_and_wait_they_are_taken_in_order(seed: int) -> None:
    rng, failures = random.Random(seed), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    connection, transport, handler = made(PartialMessages(MAX_HELD_BYTES * 3))
    handler.steps = Steps(LoopTime(lambda: rng.random() * 1e-3))
    await attached(connection, handler)
    handler.lookup = lambda request, _: handler.taken.append(request.lease) or pb.LookupReply(ready=True)
    count = 300
    requests = [
        store(each, rng.choice([0, 10, MAX_HELD_BYTES]))
        if rng.random() < 0.3
        else pb.LocalRequest(call=each, lookup=pb.LookupRequest(lease=each))
        for each in range(count)
    ]
    data = framed(*requests)
    while data:
        handler.steps.called()
        if not transport.reading or rng.random() < 0.3:
            await asyncio.sleep(0)
            continue
        cut = rng.choice([3, 100, 10_000, len(data)])
        connection.data_received(data[:cut])
        data = data[cut:]
    for _ in range(2 * count):
        await asyncio.sleep(0)
    assert not failures
    assert handler.taken == list(range(count))
    assert transport.reading
