"""Counts the fields of an HPACK header block (RFC 7541) without decoding their text, and encodes fields of its own.

A block of a few thousand bytes can name a large field thousands of times, so its cost to the receiver is bounded by its
number of fields, not by its length.
"""

from __future__ import annotations

from collections.abc import Iterable


class BadHeaderBlock(ValueError):
    """It ends inside a field, or has a number that no header block needs."""


def count_fields(block: bytes, most: int) -> int:
    """Number of fields, counted up to ``most`` + 1; a change of the table's size counts as one.

    Raises:
        BadHeaderBlock: the block does not end with a field, or a number in it is too large.
    """
    at, count, length = 0, 0, len(block)
    while at < length and count <= most:
        first = block[at]
        count += 1
        if first & 0x80:  # indexed
            _, at = _integer(block, at, 0x7F)
            continue
        if first & 0x60 == 0x20:  # the size of the dynamic table
            _, at = _integer(block, at, 0x1F)
            continue
        # A literal: its name is indexed or a string, its value is a string.
        index, at = _integer(block, at, 0x3F if first & 0x40 else 0x0F)
        for _ in range(1 if index else 2):
            if at >= length:
                raise BadHeaderBlock("a header block ends inside a field")
            nbytes, at = _integer(block, at, 0x7F)
            at += nbytes
    if at > length:
        raise BadHeaderBlock("a header block ends inside a field")
    return count


def _integer(block: bytes, at: int, prefix: int) -> tuple[int, int]:
    """An integer whose first bits are ``prefix``, and where it ends (RFC 7541, 5.1)."""
    value = block[at] & prefix
    at += 1
    if value < prefix:
        return value, at
    for shift in (0, 7, 14):
        if at >= len(block):
            break
        value += (block[at] & 0x7F) << shift
        at += 1
        if not block[at - 1] & 0x80:
            return value, at
    raise BadHeaderBlock("a header block has a number that is too large or has no end")


def literal_fields(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A block of these fields, which neither uses nor changes a dynamic table."""
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields)


def _string(text: bytes) -> bytes:
    length = len(text)
    if length < 0x7F:
        return bytes((length,)) + text
    length -= 0x7F
    encoded = bytearray((0x7F,))
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded) + text
