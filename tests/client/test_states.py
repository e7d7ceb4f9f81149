"""The table of the states of a client's connection: what it takes, what it refuses, and where it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Set

import pytest

from kvsidecar.client import states
from kvsidecar.client.states import CLOSING, CONNECTING, HUNG, PUBLISHED, ConnectionState, Event, after
from kvsidecar.errors import ClientError

ENGINES = {Event.DIAL, Event.GIVE_UP, Event.CLOSE}
"""What the engine's threads may do at any time."""
SESSION_ENDS = {ConnectionState.QUIESCING, ConnectionState.LEAVING, ConnectionState.ENDING, *HUNG}


def taken(state: ConnectionState) -> dict[Event, ConnectionState]:
    """The events that a state takes, and what follows."""
    following = {}
    for event in Event:
        with contextlib.suppress(ClientError):
            following[event] = after(state, event)
    return following


def reached(*begin: ConnectionState, without: Set[Event] = frozenset()) -> set[ConnectionState]:
    found, left = set(begin), list(begin)
    while left:
        for event, state in taken(left.pop()).items():
            if event not in without and state not in found:
                found.add(state)
                left.append(state)
    return found


def test_every_state_is_reached_and_leads_to_the_end() -> None:
    assert reached(ConnectionState.IDLE) == set(ConnectionState)
    for state in ConnectionState:
        assert ConnectionState.CLOSED in reached(state), state


def test_what_is_not_drawn_raises() -> None:
    where = {event: {state for state in ConnectionState if event in taken(state)} for event in set(Event) - ENGINES}
    attempts = CONNECTING | {ConnectionState.CLOSED}
    assert where == {
        Event.START: {ConnectionState.IDLE, ConnectionState.DIALLING, ConnectionState.CONNECTED, *CLOSING},
        Event.TRY: {ConnectionState.IDLE, ConnectionState.DIALLING, ConnectionState.CONNECTED, *CLOSING},
        Event.CONNECTED: attempts, Event.FAILED: attempts, Event.ATTACHED: attempts - {ConnectionState.DIALLING},
        Event.LOST: PUBLISHED, Event.ENDED: SESSION_ENDS,
    }  # fmt: skip
    with pytest.raises(ClientError, match="is impossible while the connection is idle"):
        after(ConnectionState.IDLE, Event.LOST)


@pytest.mark.parametrize("state", ConnectionState)
def test_the_engine_may_dial_and_give_up_and_close_at_any_time(state: ConnectionState) -> None:
    assert set(taken(state)) >= ENGINES
    assert after(state, Event.CLOSE) in CLOSING
    assert (after(state, Event.GIVE_UP) is state) == (state is not ConnectionState.ATTACHED)


def test_nothing_is_begun_after_close() -> None:
    assert reached(*CLOSING) == CLOSING


def test_no_session_begins_before_the_last_one_has_ended() -> None:
    for state in SESSION_ENDS:
        assert reached(state, without={Event.ENDED}) <= SESSION_ENDS, state


def test_who_was_given_up_stays_it_until_the_session_has_ended() -> None:
    assert reached(*HUNG, without={Event.ENDED}) == HUNG


def test_an_attempt_ends_in_whatever_state_there_is_by_then() -> None:
    """The supervisor reports what it has found; the engine's threads have changed the state meanwhile."""
    for begun in (ConnectionState.TRYING, ConnectionState.CONNECTING):
        during = reached(begun, without=set(Event) - ENGINES)
        assert during == {begun, ConnectionState.CLOSED}
        assert all({Event.ATTACHED, Event.FAILED} <= set(taken(state)) for state in during)
    dialling = reached(ConnectionState.DIALLING, without=set(Event) - ENGINES - {Event.START, Event.TRY})
    assert dialling == {*CONNECTING, ConnectionState.CLOSED}
    assert all({Event.CONNECTED, Event.FAILED} <= set(taken(state)) for state in dialling)


def test_what_means_nothing_is_not_in_the_table() -> None:
    for state, following in states._NEXT.items():
        assert all(following[event] is not state for event in set(following) & ENGINES), state


def test_a_published_state_is_neither_connecting_nor_closing() -> None:
    assert PUBLISHED.isdisjoint(CONNECTING | CLOSING | HUNG)
