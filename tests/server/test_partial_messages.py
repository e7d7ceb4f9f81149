"""Room for messages of which a part has arrived: in the order in which they began, and not for ever."""

from __future__ import annotations

import asyncio
import time

from kvsidecar.errors import KVSidecarError, LimitExceeded, Unfinished
from kvsidecar.server.partial_messages import PartialMessage, PartialMessages


class Reader:
    """Begins messages, and records what it is told of them."""

    def __init__(self, partial_messages: PartialMessages) -> None:
        self._partial_messages = partial_messages
        self.got_room: list[str] = []
        self.late: asyncio.Queue[tuple[str, KVSidecarError]] = asyncio.Queue()

    def begin(self, name: str, nbytes: int, user: int = 1) -> PartialMessage:
        return self._partial_messages.begin(
            user,
            nbytes,
            on_room=lambda: self.got_room.append(name),
            on_late=lambda error: self.late.put_nowait((name, error)),
        )


async def test_messages_of_one_user_share_room_in_their_order_and_others_have_their_own() -> None:
    partial_messages = PartialMessages(100)
    reader = Reader(partial_messages)
    first, second = reader.begin("first", 60), reader.begin("second", 50)
    third, other = reader.begin("third", 30), reader.begin("other", 100, user=2)
    assert [each.has_room for each in (first, second, third, other)] == [True, False, False, True]
    assert reader.got_room == []
    partial_messages.end(first)
    assert reader.got_room == ["second", "third"], "there was room for both, and not for either before"
    partial_messages.end(third)
    partial_messages.end(second)
    partial_messages.end(other)
    assert reader.begin("all of it", 100).has_room


async def test_one_that_waited_and_never_came_leaves_its_place() -> None:
    partial_messages = PartialMessages(100)
    reader = Reader(partial_messages)
    first, waits, behind = reader.begin("first", 100), reader.begin("waits", 100), reader.begin("behind", 10)
    partial_messages.end(waits)
    partial_messages.end(first)
    assert reader.got_room == ["behind"]
    partial_messages.end(behind)


async def test_a_message_that_is_not_completed_is_late_and_says_whose_fault_it_is() -> None:
    partial_messages = PartialMessages(100, seconds=0.02)
    reader = Reader(partial_messages)
    whole = reader.begin("whole", 10)
    partial_messages.end(whole)
    slow, squeezed = reader.begin("slow", 90), reader.begin("squeezed", 20)
    late = dict([await reader.late.get(), await reader.late.get()])
    assert isinstance(late["slow"], Unfinished)
    assert "90 bytes was not complete" in str(late["slow"])
    assert isinstance(late["squeezed"], LimitExceeded)
    assert "one user may have 100 bytes" in str(late["squeezed"])
    partial_messages.end(slow)
    partial_messages.end(squeezed)
    assert reader.late.empty(), "one that was whole in time is late"


async def test_a_loop_that_stood_still_does_not_count_against_a_message() -> None:
    """Its timers are due before it has read what came meanwhile."""
    partial_messages = PartialMessages(100, seconds=2.0)
    reader = Reader(partial_messages)
    message = reader.begin("in time", 10)
    time.sleep(2.1)  # noqa: ASYNC251 - the loop shall stand still, as SIGSTOP does it
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert reader.late.empty()
    partial_messages.end(message)
