"""The gate in front of gRPC, fed with frames: what passes, what is answered, what ends the connection."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from benchmarks.attacks.http2_client import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WITH_PRIORITY,
    frame,
    message,
    request,
)
from kvsidecar.core.quota import Quota
from kvsidecar.errors import InvalidRequest, LimitExceeded, Unfinished
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.server import http2_gate
from kvsidecar.server.header_block import BadHeaderBlock, count_fields, literal_fields
from kvsidecar.server.http2_frames import CANCEL, PUSH_PROMISE, WINDOW_UPDATE, reset
from kvsidecar.server.http2_gate import CALLS_AT_ONCE, CallQuotas, Gate, GateResult

BEGIN = PREFACE + frame(SETTINGS)
CALL = frame(HEADERS, 1, request(), END_HEADERS)


class Connection:
    """One begun connection of a user, and the quotas."""

    def __init__(self, calls: int = 100, nbytes: int = 1000, *, begun: bool = True) -> None:
        self.quotas = CallQuotas(Quota(calls, "calls"), Quota(nbytes, "bytes"))
        self.gate = Gate("user", self.quotas)
        self.refused: list[Exception] = []
        self.to_client = b""
        if begun:
            assert self.send(BEGIN) == BEGIN

    def send(self, data: bytes) -> bytes:
        """What passes to the server."""
        out = self._take(self.gate.from_client(data))
        while self.gate.is_more:
            out += self._take(self.gate.from_client(b""))
        return out

    def seconds(self, count: int) -> bytes:
        out = b""
        for _ in range(count):
            passed = self.gate.second()
            out += self._take(passed)
            while (passed := self.gate.end_late()).calls:
                out += self._take(passed)
        return out

    def _take(self, passed: GateResult) -> bytes:
        self.refused += passed.refused
        self.to_client += passed.to_client
        return passed.to_server

    def held(self) -> tuple[int, int]:
        return self.quotas.calls.held, self.quotas.nbytes.held


def test_what_honest_clients_send_passes_unchanged_in_pieces_of_any_size() -> None:
    priority = bytes(5)
    whole = (
        BEGIN + CALL + frame(DATA, 1, message(b"a" * 100)[:50]) + frame(DATA, 1, message(b"a" * 100)[50:], END_STREAM)
    )
    whole += frame(HEADERS, 3, b"\x02" + priority + request() + bytes(2), END_HEADERS | PADDED | WITH_PRIORITY)
    whole += frame(DATA, 3, b"\x03" + message(b"b") + message(b"c") + bytes(3), PADDED) + frame(PING, 0, bytes(8))
    half = len(request()) // 2
    whole += frame(HEADERS, 5, request()[:half], END_STREAM) + frame(CONTINUATION, 5, request()[half:], END_HEADERS)
    whole += frame(WINDOW_UPDATE, 0, bytes(4)) + frame(RST_STREAM, 3, bytes(4)) + frame(DATA, 3, b"late")
    cut = random.Random(1)
    for longest in (1, 7, 200, len(whole)):
        connection = Connection(begun=False)
        passed, at = b"", 0
        while at < len(whole):
            size = cut.randint(1, longest)
            passed += connection.send(whole[at : at + size])
            at += size
        assert passed == whole
        assert not connection.refused
        assert connection.held() == (2, 100)
        connection.gate.close()
        connection.gate.end_calls()
        assert connection.held() == (0, 0)


def calls(count: int) -> bytes:
    return b"".join(frame(HEADERS, 2 * number + 1, request(), END_HEADERS) for number in range(count))


def test_few_calls_begin_at_once_and_the_others_when_asked_again() -> None:
    connection = Connection()
    many = calls(3 * CALLS_AT_ONCE)
    passed = connection.gate.from_client(many)
    assert (passed.calls, connection.gate.is_more) == (CALLS_AT_ONCE, True)
    assert passed.to_server + connection.send(b"") == many
    assert connection.gate.calls == 3 * CALLS_AT_ONCE


def test_few_calls_are_given_up_at_once() -> None:
    connection = Connection()
    connection.send(calls(3 * CALLS_AT_ONCE))
    resets = b"".join(reset(2 * number + 1, CANCEL) for number in range(3 * CALLS_AT_ONCE))
    passed = connection.gate.from_client(resets)
    assert (passed.calls, connection.gate.calls) == (CALLS_AT_ONCE, 2 * CALLS_AT_ONCE)
    assert passed.to_server + connection.send(b"") == resets


def test_few_late_calls_end_at_once_and_who_has_sent_the_rest_meanwhile_is_not_late() -> None:
    connection = Connection()
    connection.send(calls(2 * CALLS_AT_ONCE + 2))
    connection.seconds(LIMIT)
    connection.gate.second()
    assert connection.gate.end_late().calls == CALLS_AT_ONCE
    connection.send(frame(DATA, 2 * CALLS_AT_ONCE + 1, message(b"a")))
    assert connection.gate.end_late().calls == CALLS_AT_ONCE
    assert connection.gate.end_late().calls == 1
    assert connection.gate.end_late().calls == 0
    assert connection.gate.calls == 1


def test_when_a_connection_is_over_its_calls_end_a_few_at_a_time() -> None:
    connection = Connection()
    connection.send(calls(CALLS_AT_ONCE + 1))
    connection.gate.close()
    assert connection.gate.end_calls() == b"".join(reset(2 * number + 1, CANCEL) for number in range(CALLS_AT_ONCE))
    assert connection.held() == (1, 0)
    assert connection.gate.end_calls() == reset(2 * CALLS_AT_ONCE + 1, CANCEL)
    assert connection.held() == (0, 0)


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (frame(HEADERS, 1, request() + b"\x90" * 100, END_HEADERS), LimitExceeded, "64 fields"),
        (frame(HEADERS, 1, request() + bytes(9000), END_HEADERS), LimitExceeded, "8192 bytes"),
        (frame(HEADERS, 1, b"\xff\xff\xff\xff\xff\x7f", END_HEADERS), InvalidRequest, "too large"),
        (frame(HEADERS, 1, b"\x00\x05ab", END_HEADERS), InvalidRequest, "ends inside a field"),
        (frame(HEADERS, 1, b"\x00", END_HEADERS), InvalidRequest, "ends inside a field"),
        (frame(HEADERS, 1, b"\x05" + request()[:3], END_HEADERS | PADDED), InvalidRequest, "padding"),
        (frame(HEADERS, 2, request(), END_HEADERS), InvalidRequest, "which is not new"),
        (CALL + frame(HEADERS, 1, request(), END_HEADERS), InvalidRequest, "second header block"),
        (CALL + frame(RST_STREAM, 1, bytes(4)) + CALL, InvalidRequest, "which is not new"),
        (frame(HEADERS, 1, request()) + frame(PING, 0, bytes(8)), InvalidRequest, "wrong order"),
        (frame(CONTINUATION, 1, request(), END_HEADERS), InvalidRequest, "wrong order"),
        (frame(HEADERS, 1, b"") + frame(CONTINUATION, 1, b"") * 300, LimitExceeded, "256 HTTP/2 frames"),
        (frame(HEADERS, 1, b"") + frame(CONTINUATION, 1, bytes(5000)) * 2, LimitExceeded, "8192 bytes"),
        (frame(DATA, 1, b"x"), InvalidRequest, "has not begun"),
        (CALL + frame(DATA, 1, b"") * 300, LimitExceeded, "256 HTTP/2 frames"),
        (frame(PING, 0, bytes(8)) * 300, LimitExceeded, "256 HTTP/2 frames"),
        (frame(SETTINGS) * 300, LimitExceeded, "256 HTTP/2 frames"),
        (frame(PUSH_PROMISE, 1), InvalidRequest, "PUSH_PROMISE"),
        (b"\x00\x40\x01" + bytes(6), InvalidRequest, "16385 bytes"),
    ],
)
def test_what_breaks_the_rules_ends_the_connection_in_words(data: bytes, error: type[Exception], says: str) -> None:
    connection = Connection()
    connection.send(data)
    (refused,) = connection.refused
    assert isinstance(refused, error)
    assert says in str(refused)
    assert str(refused).encode() in connection.to_client, "the GOAWAY says nothing"
    assert connection.gate.over
    connection.gate.end_calls()
    assert connection.held() == (0, 0)
    assert connection.send(CALL) == b"", "something passes behind the end"


def test_calls_reset_as_soon_as_they_begin_are_a_flood() -> None:
    connection = Connection()
    for number in range(http2_gate.MAX_CONTROL_FRAMES):
        stream = 2 * number + 1
        connection.send(frame(HEADERS, stream, request(), END_HEADERS) + frame(RST_STREAM, stream, bytes(4)))
    assert isinstance(connection.refused[0], LimitExceeded)
    patient = Connection()
    for number in range(4 * http2_gate.MAX_CONTROL_FRAMES):
        stream = 2 * number + 1
        patient.send(frame(HEADERS, stream, request(), END_HEADERS) + frame(RST_STREAM, stream, bytes(4)))
        if number % http2_gate.CONTROL_FRAMES_PER_SECOND == 0:
            patient.seconds(1)
    assert not patient.refused


@pytest.mark.parametrize("begin", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", PREFACE + CALL])
def test_another_protocol_is_told_so(begin: bytes) -> None:
    connection = Connection(begun=False)
    assert connection.send(begin) == b""
    assert isinstance(connection.refused[0], InvalidRequest)
    assert connection.gate.over


def test_a_call_beyond_the_limit_is_answered_and_its_connection_goes_on() -> None:
    connection = Connection(calls=1)
    assert connection.send(CALL) == CALL
    second = frame(HEADERS, 3, request(), END_HEADERS)
    body = frame(DATA, 3, message(b"x"), END_STREAM)
    assert connection.send(second + body) == second + frame(RST_STREAM, 3, bytes((0, 0, 0, 8))) + body
    assert b"grpc-status\x018" in connection.to_client
    assert b":status\x03200" in connection.to_client
    assert not connection.gate.over
    third = frame(HEADERS, 5, request()[:9]) + frame(CONTINUATION, 5, request()[9:], END_HEADERS)
    as_late = frame(HEADERS, 3, request()[:9]) + frame(CONTINUATION, 3, request()[9:], END_HEADERS)
    assert connection.send(third) == as_late, "gRPC keeps its table of headers, and another call"
    connection.gate.from_server(frame(HEADERS, 1, b"\x88", END_STREAM | END_HEADERS))
    fourth = frame(HEADERS, 7, request(), END_HEADERS)
    assert connection.send(fourth) == fourth


def test_a_message_is_held_until_it_is_whole_and_its_call_answered() -> None:
    connection = Connection(nbytes=300)
    connection.send(CALL + frame(DATA, 1, message(bytes(100), declared=200)))
    assert connection.held() == (1, 200)
    connection.send(frame(DATA, 1, bytes(100)))
    assert connection.held() == (1, 200), "gRPC still has it"
    connection.send(frame(HEADERS, 3, request(), END_HEADERS) + frame(DATA, 3, message(b"", declared=101)))
    assert "one user may have 300 bytes" in str(connection.refused[0])
    connection.gate.from_server(frame(HEADERS, 1, b"\x88", END_HEADERS))
    assert connection.held() == (1, 0)
    connection.send(frame(DATA, 1, message(bytes(10), declared=20)))
    assert connection.held() == (1, 20)
    connection.send(frame(DATA, 1, bytes(10)))
    assert connection.held() == (1, 0), "the next message of a stream that is answered"
    connection.gate.from_server(frame(RST_STREAM, 1, bytes(4)))
    assert connection.held() == (0, 0)


def test_a_message_that_is_too_long_or_compressed_is_held_to_what_it_may_become() -> None:
    connection = Connection(nbytes=MAX_MESSAGE_BYTES)
    connection.send(CALL + frame(DATA, 1, message(b"", declared=MAX_MESSAGE_BYTES + 1)))
    assert "is over the limit" in str(connection.refused[0])
    connection.send(frame(HEADERS, 3, request(), END_HEADERS) + frame(DATA, 3, b"\1" + message(b"x")[1:]))
    assert connection.held() == (1, MAX_MESSAGE_BYTES)


LIMIT = http2_gate.MESSAGE_SECONDS


@pytest.mark.parametrize(
    "half", [CALL, CALL + frame(DATA, 1, b"\0"), CALL + frame(DATA, 1, message(bytes(9), declared=10))]
)
def test_a_call_whose_message_does_not_come_is_ended(half: bytes) -> None:
    connection = Connection()
    connection.send(half)
    assert connection.seconds(LIMIT) == b""
    assert connection.seconds(1) == frame(RST_STREAM, 1, bytes((0, 0, 0, 8)))
    assert isinstance(connection.refused[0], Unfinished)
    assert b"grpc-status\x014" in connection.to_client
    assert connection.held() == (0, 0)
    assert not connection.gate.over


@pytest.mark.parametrize(
    "quiet",
    [
        b"",
        CALL + frame(DATA, 1, message(b"x"), END_STREAM),
        CALL + frame(DATA, 1, message(b"x")),
        CALL + frame(DATA, 1, b"", END_STREAM),
    ],
    ids=["no call", "a call that is served", "between messages", "a call without a message"],
)
def test_who_has_nothing_to_say_may_be_silent_for_days(quiet: bytes) -> None:
    connection = Connection()
    connection.send(quiet)
    assert connection.seconds(100_000) == b""
    assert not connection.refused


@pytest.mark.parametrize("half", [b"", PREFACE[:5], PREFACE, BEGIN + frame(HEADERS, 1, request())])
def test_a_begin_or_a_header_block_without_its_end_ends_the_connection(half: bytes) -> None:
    connection = Connection(begun=False)
    connection.send(half)
    connection.seconds(LIMIT)
    assert not connection.refused
    connection.seconds(1)
    assert isinstance(connection.refused[0], Unfinished)
    assert connection.gate.over


def test_what_the_gate_says_waits_for_the_end_of_the_servers_frame_and_headers() -> None:
    connection = Connection(calls=0)
    answer = frame(HEADERS, 7, b"\x88") + frame(CONTINUATION, 7, b"\x88", END_HEADERS) + frame(DATA, 7, bytes(100))
    boundaries = {20, len(answer)}
    gate = connection.gate
    for at in range(len(answer)):
        gate.from_server(answer[at : at + 1])
        stream = 2 * at + 1
        before = connection.to_client
        connection.send(frame(HEADERS, stream, request(), END_HEADERS))
        assert (connection.to_client != before) == (at + 1 in boundaries), at
    assert gate.injected == 0


def test_the_end_of_a_call_in_words_of_a_stream_that_was_answered_is_its_trailers() -> None:
    connection = Connection()
    connection.send(CALL + frame(DATA, 1, message(b"x")))
    connection.gate.from_server(frame(HEADERS, 1, b"\x88", END_HEADERS))
    connection.send(frame(DATA, 1, b"\0"))
    connection.seconds(LIMIT + 1)
    assert b"grpc-status\x014" in connection.to_client
    assert b":status" not in connection.to_client


# -- header blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        (b"", 0),
        (b"\x82" * 10, 10),
        (b"\xff\x80\x01", 1),  # an index of two bytes more
        (b"\x3f\xe1\x1f\x82", 2),  # a table of 4096 bytes
        (literal_fields([(b"a", b"b"), (b"long", b"v" * 5000)]), 2),
        (b"\x40\x01a\x01b" + b"\x10\x01a\x01b" + b"\x41\x01b" + b"\x04\x01b", 4),
        (b"\x0f\x31\x85aaaaa", 1),  # an indexed name of 64, a Huffman value
    ],
)
def test_fields_are_counted_in_every_representation(block: bytes, fields: int) -> None:
    assert count_fields(block, 1000) == fields


def test_counting_ends_at_the_limit_and_any_bytes_have_an_end() -> None:
    assert count_fields(b"\x82" * 10_000, 64) == 65
    noise = random.Random(2)
    outcomes: set[Callable[..., object] | None] = set()
    for _ in range(5000):
        block = noise.randbytes(noise.randint(1, 30))
        try:
            assert 0 < count_fields(block, 64) <= len(block)
            outcomes.add(None)
        except BadHeaderBlock:
            outcomes.add(BadHeaderBlock)
    assert outcomes == {None, BadHeaderBlock}
