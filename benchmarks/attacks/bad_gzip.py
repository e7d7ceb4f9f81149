"""``python -m benchmarks.attacks.bad_gzip DIRECTORY_OR_PORT SECONDS``: sends bodies that claim to be gzip and are not,
and other requests that do not parse, to the gRPC socket in a directory or to an HTTP port. Prints a JSON line of what
it did."""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import cycle
from pathlib import Path

HTTP = [
    b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 8\r\n\r\nnot gzip",
    b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 8\r\n\r\nnot gzip",
    b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Encoding: deflate\r\nContent-Length: 8\r\n\r\nnot gzip",
    b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"POST /health HTTP/1.1\r\nHost: x\r\nExpect: nothing\r\nConnection: close\r\nContent-Length: 1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]
"""Requests, of which each ends its connection."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """RFC 9113, 4.1"""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _block(headers: Mapping[str, str]) -> bytes:
    """RFC 7541, 6.2.2, without Huffman codes."""
    texts = [(name.encode(), value.encode()) for name, value in headers.items()]
    return b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in texts)


def call(path: str, message: bytes, *, packed: bool, **headers: str) -> tuple[bytes, bytes]:
    """The headers and the body of a gRPC call.

    Args:
        packed: say that the message is compressed.
        headers: to add or to change.
    """
    all_headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return _block(all_headers), bytes([packed]) + struct.pack(">I", len(message)) + message


LOOKUP, ATTACH = "/kvsidecar.v1.Sidecar/Lookup", "/kvsidecar.v1.Sidecar/Attach"
CALLS = [
    call(LOOKUP, b"not gzip", packed=True, grpc_encoding="gzip"),
    call(ATTACH, b"not gzip", packed=True, grpc_encoding="gzip"),
    call(LOOKUP, b"\xff\xff", packed=False),
    call(LOOKUP, b"x", packed=True, grpc_encoding="unknown"),
    call(LOOKUP, b"", packed=False, grpc_timeout="99zz"),
    call(LOOKUP, b"", packed=False, content_type="text/plain"),
    call("/grpc.health.v1.Health/Check", b"\xff\xff", packed=False),
    call("/grpc.health.v1.Health/Watch", b"\xff\xff", packed=False),
    call("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b"\xff\xff", packed=False),
]
CALLS_OF_ONE = 128
"""Calls on one connection."""


def _send_requests(port: int, requests: cycle[bytes], did: Counter[str]) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(next(requests))
        did["requests"] += 1
        while data := connection.recv(65536):
            did["bytes"] += len(data)


def _send_calls(path: str, calls: cycle[tuple[bytes, bytes]], did: Counter[str]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(0.2)
        connection.connect(path)
        connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0))
        for number in range(CALLS_OF_ONE):
            stream = 2 * number + 1
            headers, body = next(calls)
            connection.sendall(
                _frame(_HEADERS, _END_HEADERS, stream, headers) + _frame(_DATA, _END_STREAM, stream, body)
            )
            did["requests"] += 1
        while data := connection.recv(65536):
            did["bytes"] += len(data)


def attack(target: str, seconds: float) -> dict[str, int]:
    did = Counter(requests=0, bytes=0)
    until = time.monotonic() + seconds
    requests, calls = cycle(HTTP), cycle(CALLS)
    while time.monotonic() < until:
        with suppress(OSError):
            if target.isdigit():
                _send_requests(int(target), requests, did)
            else:
                _send_calls(str(Path(target, "kvs.sock")), calls, did)
    return dict(did)


if __name__ == "__main__":
    print(json.dumps(attack(sys.argv[1], float(sys.argv[2]))), flush=True)
