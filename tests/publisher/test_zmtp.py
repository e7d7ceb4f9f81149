"""What is read of routers, however it is cut, and whatever they send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.errors import InvalidRequest
from kvsidecar.publisher import zmtp
from kvsidecar.publisher.zmtp import Frame, ZmtpReader


@given(st.lists(st.binary(max_size=zmtp.MAX_FRAME_BYTES), min_size=1, max_size=5), st.integers(1, 200))
def test_frames_are_read_however_they_are_cut(parts: list[bytes], size: int) -> None:
    sent = zmtp.GREETING + zmtp.ready(b"SUB") + b"".join(zmtp.message(parts))
    reader = ZmtpReader()
    found: list[Frame] = []
    for first in range(0, len(sent), size):
        found += reader.feed(sent[first : first + size])
    assert reader.minor == 1
    assert found[0].is_command
    assert zmtp.split_command(found[0].body)[0] == b"READY"
    assert found[1:] == [Frame(each, i + 1 < len(parts)) for i, each in enumerate(parts)]


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_whatever_is_sent_is_refused_or_kept_within_a_frame(pieces: list[bytes]) -> None:
    reader = ZmtpReader()
    try:
        list(reader.feed(zmtp.GREETING))
        for each in pieces:
            list(reader.feed(each))
            assert len(reader._buffer) < zmtp.MAX_FRAME_BYTES + 9
    except InvalidRequest:
        pass


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n",
        zmtp.GREETING[:10] + b"\x02",
        zmtp.GREETING.replace(b"NULL\0", b"PLAIN"),
        zmtp.GREETING + b"\x02" + (zmtp.MAX_FRAME_BYTES + 1).to_bytes(8, "big"),
        zmtp.GREETING + b"\x03" + b"\xff" * 8,
    ],
)
def test_what_is_no_zmtp_or_too_long_is_refused(sent: bytes) -> None:
    with pytest.raises(InvalidRequest):
        list(ZmtpReader().feed(sent))
