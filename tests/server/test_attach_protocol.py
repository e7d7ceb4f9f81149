"""What an Attach stream does next, in every order in which things can happen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvsidecar.errors import InvalidRequest, LimitExceeded, UnknownPeer
from kvsidecar.server.attach_protocol import (
    _NEXT,
    EARLY_MESSAGE_BYTES,
    MAX_EARLY_BYTES,
    AttachProtocol,
    AttachState,
    Do,
)

SESSION: Any = object()
REFUSED, FIRST_ERROR, LATER_ERROR = InvalidRequest("refused"), LimitExceeded("first"), UnknownPeer("later")


def open_stream() -> AttachProtocol:
    stream = AttachProtocol()
    stream.receive("register")
    stream.accepted(SESSION)
    return stream


def in_state(state: AttachState) -> AttachProtocol:
    stream = AttachProtocol()
    for event in WAYS[state].split():
        EVENTS[event](stream)
    assert stream.state is state
    return stream


def test_a_stream_is_registered_opened_ended_and_told() -> None:
    stream = AttachProtocol()
    assert stream.receive("register") == [("register", "register")]
    assert stream.accepted(SESSION) == [("open", SESSION)]
    assert stream.receive("store") == [("take", "store")]
    assert stream.finish() == [("end", SESSION)]
    assert stream.receive("store") == []
    assert stream.ended() == [("tell", None)]
    assert stream.state is AttachState.OVER


def test_what_comes_early_is_taken_in_order_and_before_the_end() -> None:
    stream = AttachProtocol()
    stream.receive("register")
    assert stream.receive(1) == stream.receive(2) == stream.finish() == stream.receive(3) == []
    assert stream.accepted(SESSION) == [("open", SESSION), ("take", 1), ("take", 2), ("end", SESSION)]


def test_what_comes_early_has_a_bound_in_bytes() -> None:
    stream = AttachProtocol()
    stream.receive("register", MAX_EARLY_BYTES)
    stream.receive(1, MAX_EARLY_BYTES - EARLY_MESSAGE_BYTES)
    with pytest.raises(LimitExceeded):
        stream.receive(2, 1)


def test_small_messages_that_come_early_count_as_what_they_take() -> None:
    """Of a few bytes each, 175,000 were kept for every connection of a user."""
    stream = AttachProtocol()
    stream.receive("register")
    for number in range(63):
        assert stream.receive(number, 6) == []
    with pytest.raises(LimitExceeded):
        stream.receive(63, 6)


def test_a_client_that_ends_the_stream_before_it_says_anything_is_refused_as_one_that_does_not_register() -> None:
    stream = AttachProtocol()
    assert stream.finish() == [("register", None)]
    assert stream.refused(REFUSED) == [("tell", REFUSED)]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_refused_registration_is_told_once_whether_or_not_the_client_has_left(leaves: bool) -> None:
    stream = AttachProtocol()
    stream.receive("register")
    if leaves:
        stream.finish(FIRST_ERROR)
    assert stream.refused(REFUSED) == [("tell", REFUSED)]
    assert stream.finish() == stream.gone() == stream.ended() == []


@pytest.mark.parametrize("leaves", [False, True])
def test_the_session_of_a_client_that_has_gone_meanwhile_is_cut_and_takes_nothing(leaves: bool) -> None:
    stream = AttachProtocol()
    stream.receive("register")
    stream.receive(1)
    if leaves:
        stream.finish()
    assert stream.gone() == []
    assert stream.accepted(SESSION) == [("cut", SESSION)]


def test_a_client_that_goes_while_its_session_ends_lets_no_job_start() -> None:
    stream = open_stream()
    stream.finish()
    assert stream.gone() == [("cut", SESSION)]
    assert stream.ended() == [("tell", None)]
    assert stream.ended() == [], "told twice"


def test_the_first_error_counts() -> None:
    stream = open_stream()
    stream.finish(FIRST_ERROR)
    assert stream.finish(LATER_ERROR) == []
    assert stream.ended() == [("tell", FIRST_ERROR)]


S = AttachState
EVENTS: dict[str, Callable[[AttachProtocol], list[tuple[Do, Any]]]] = {
    "begin": lambda stream: stream.receive("register"),
    "accepted": lambda stream: stream.accepted(SESSION),
    "refused": lambda stream: stream.refused(REFUSED),
    "finish": AttachProtocol.finish,
    "gone": AttachProtocol.gone,
    "ended": AttachProtocol.ended,
}
WAYS = {
    S.NEW: "",
    S.REGISTERING: "begin",
    S.LEAVING: "begin finish",
    S.ORPHANED: "begin gone",
    S.OPEN: "begin accepted",
    S.ENDING: "begin accepted finish",
    S.OVER: "begin refused",
}
"""To each state."""
OPENED, ENDED, CUT = ("open", SESSION), ("end", SESSION), ("cut", SESSION)
TRANSITIONS: tuple[tuple[AttachState, str, AttachState, list[tuple[str, Any]]], ...] = (
    (S.NEW, "begin", S.REGISTERING, [("register", "register")]),
    (S.NEW, "refused", S.OVER, [("tell", REFUSED)]),
    (S.NEW, "finish", S.LEAVING, [("register", None)]),
    (S.NEW, "gone", S.OVER, []),
    (S.REGISTERING, "accepted", S.OPEN, [OPENED]),
    (S.REGISTERING, "refused", S.OVER, [("tell", REFUSED)]),
    (S.REGISTERING, "finish", S.LEAVING, []),
    (S.REGISTERING, "gone", S.ORPHANED, []),
    (S.LEAVING, "accepted", S.ENDING, [OPENED, ENDED]),
    (S.LEAVING, "refused", S.OVER, [("tell", REFUSED)]),
    (S.LEAVING, "gone", S.ORPHANED, []),
    (S.ORPHANED, "accepted", S.ENDING, [CUT]),
    (S.ORPHANED, "refused", S.OVER, [("tell", REFUSED)]),
    (S.OPEN, "finish", S.ENDING, [ENDED]),
    (S.OPEN, "gone", S.ENDING, [CUT]),
    (S.ENDING, "ended", S.OVER, [("tell", None)]),
)
"""State, event, the state that follows, and what is to be done."""


@pytest.mark.parametrize(("state", "event", "following", "todo"), TRANSITIONS)
def test_each_event_leads_to_one_state_and_says_what_is_to_be_done(
    state: AttachState, event: str, following: AttachState, todo: list[tuple[str, Any]]
) -> None:
    stream = in_state(state)
    assert EVENTS[event](stream) == todo
    assert stream.state is following


def test_no_transition_is_untested() -> None:
    table = {(state, event) for state, events in _NEXT.items() for event in events}
    assert table == {(state, event) for state, event, _, _ in TRANSITIONS}


def others(*events: str) -> list[tuple[AttachState, str]]:
    """These events in the states where the table lacks them."""
    return [(state, event) for state in AttachState for event in events if event not in _NEXT[state]]


@pytest.mark.parametrize(("state", "event"), others("accepted", "refused"))
def test_a_registration_is_answered_only_once_it_has_begun_and_only_once(state: AttachState, event: str) -> None:
    stream = in_state(state)
    with pytest.raises(AssertionError):
        EVENTS[event](stream)


@pytest.mark.parametrize(("state", "event"), others("finish", "gone", "ended"))
def test_an_end_after_the_first_changes_no_state(state: AttachState, event: str) -> None:
    stream = in_state(state)
    assert EVENTS[event](stream) == ([CUT] if (state, event) == (S.ENDING, "gone") else [])
    assert stream.state is state


def test_a_stream_with_an_error_before_its_first_message_registers_nothing_and_is_told_the_error() -> None:
    stream = AttachProtocol()
    assert stream.finish(FIRST_ERROR) == [("tell", FIRST_ERROR)]
    assert stream.state is AttachState.OVER


@pytest.mark.parametrize("seed", range(200))
def test_in_any_order_a_session_is_opened_and_ended_once_and_nothing_follows_its_end(seed: int) -> None:
    rng, stream, done = random.Random(seed), AttachProtocol(), list[tuple[Do, Any]]()
    registering = ending = 0
    while stream.state is not AttachState.OVER:
        event = rng.choice(["receive", "receive", "finish", "gone", "answer", "ended"])
        before = len(done)
        if event == "receive":
            done += stream.receive("message", 1)
        elif event == "answer" and registering:
            registering = 0
            done += stream.accepted(SESSION) if rng.random() < 0.7 else stream.refused(REFUSED)
        elif event == "ended" and ending:
            done += stream.ended()
        elif event in ("finish", "gone"):
            done += stream.finish() if event == "finish" else stream.gone()
        kinds = [do for do, _ in done[before:]]
        registering += kinds.count("register")
        ending += kinds.count("end") + kinds.count("cut")
    kinds = [do for do, _ in done]
    assert kinds.count("register") <= 1
    assert kinds.count("end") <= 1
    assert kinds.count("tell") <= 1
    if "open" in kinds:
        assert ending
        last_take = max((i for i, do in enumerate(kinds) if do == "take"), default=0)
        assert last_take < min(i for i, do in enumerate(kinds) if do in ("end", "cut"))
        assert stream.session is SESSION
