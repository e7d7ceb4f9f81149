"""Frames, cut out of whatever arrives."""

from __future__ import annotations

import pytest

from kvsidecar.protocol.framing import HEADER_BYTES, FrameReader, FrameTooLong, frame

PAYLOADS = [b"", b"a", bytes(range(256)), b"", b"end"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_payloads_are_whole_and_in_order_wherever_the_bytes_are_cut(size: int) -> None:
    data = b"".join(map(frame, PAYLOADS))
    reader, taken = FrameReader(), []
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
        while (payload := reader.next()) is not None:
            taken.append(payload)
    assert taken == PAYLOADS
    assert reader.announced is None


def test_who_reads_what_is_missing_reads_nothing_of_what_comes_behind() -> None:
    data, reads = frame(b"hello") + frame(b"next"), []
    reader = FrameReader()
    while (payload := reader.next()) is None:
        reads.append(reader.missing)
        reader.feed(data[: reader.missing])
        data = data[reads[-1] :]
    assert (payload, data, reads) == (b"hello", frame(b"next"), [HEADER_BYTES, 5])


def test_what_is_announced_is_known_before_it_is_here() -> None:
    reader = FrameReader()
    reader.feed(frame(b"first") + frame(b"second")[:-1])
    assert reader.next() == b"first"
    assert (reader.announced, reader.missing, reader.next()) == (6, 1, None)


def test_a_frame_over_the_limit_is_refused_when_its_header_is_here() -> None:
    reader = FrameReader(10)
    reader.feed(frame(bytes(10)) + frame(bytes(11))[:HEADER_BYTES])
    assert reader.next() == bytes(10)
    with pytest.raises(FrameTooLong, match="11 bytes is over the limit of 10") as caught:
        reader.next()
    assert caught.value.length == 11


def test_memory_is_given_back_when_all_is_taken() -> None:
    reader = FrameReader()
    reader.feed(frame(bytes(1 << 20)))
    assert reader.next() is not None
    assert reader.next() is None
    assert not reader._buffer
