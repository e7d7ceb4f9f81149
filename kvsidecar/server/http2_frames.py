"""Frames of HTTP/2 (RFC 9113) as far as the gate in front of gRPC reads and writes them."""

from __future__ import annotations

import grpc

from kvsidecar.errors import KVSidecarError
from kvsidecar.server.header_block import literal_fields
from kvsidecar.server.status_codes import code_of

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
"""Bytes of a frame's head: 3 of its payload's length, 1 of its kind, 1 of its flags, 4 of its stream."""
MAX_PAYLOAD_BYTES = 16384
"""The largest payload for a receiver that has not allowed more (SETTINGS_MAX_FRAME_SIZE)."""

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 7, 8, 9
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x4, 0x8, 0x20
NO_ERROR, CANCEL, ENHANCE_YOUR_CALM = 0x0, 0x8, 0xB


def frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def reset(stream: int, code: int) -> bytes:
    return frame(RST_STREAM, stream, code.to_bytes(4, "big"))


def goaway(last_stream: int, error: KVSidecarError) -> bytes:
    text = str(error).encode()[:512]
    return frame(GOAWAY, 0, last_stream.to_bytes(4, "big") + ENHANCE_YOUR_CALM.to_bytes(4, "big") + text)


def refusal(stream: int, error: KVSidecarError, *, answered: bool) -> bytes:
    """The end of a call with an error.

    Args:
        answered: whether the client has the call's first headers; these are then the trailers.
    """
    code: grpc.StatusCode = code_of(error)
    fields = [(b"grpc-status", b"%d" % code.value[0]), (b"grpc-message", str(error).encode().replace(b"%", b"%25"))]
    if not answered:
        fields = [(b":status", b"200"), (b"content-type", b"application/grpc"), *fields]
    block = literal_fields(fields)
    return frame(HEADERS, stream, block, END_STREAM | END_HEADERS) + reset(stream, NO_ERROR)
