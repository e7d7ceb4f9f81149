"""Calls that the gate refuses, the same over the Unix socket and over TCP."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc
import pytest

from benchmarks.attacks.http2_client import DATA, END_HEADERS, END_STREAM, HEADERS, frame, message, request
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import NAMESPACE, SECONDS

LOOKUP = pb.LookupRequest(namespace=namespace_to_wire(NAMESPACE), mode=pb.LookupRequest.MODE_PREFIX)


def half_send_a_call_and_go_on(
    connection: socket.socket,
    lookup: pb.LookupRequest,
    meanwhile: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """The call whose message never ends is ended in words; a further one on the same connection is answered.

    Args:
        meanwhile: entered while the daemon waits for the rest.
    """
    began = time.monotonic()
    connection.settimeout(SECONDS)
    whole = message(lookup.SerializeToString())
    connection.sendall(frame(HEADERS, 1, request(), END_HEADERS) + frame(DATA, 1, whole[:-1]))
    received = b""
    with meanwhile():
        while b"was not complete within 10 s" not in received:
            chunk = connection.recv(65536)
            assert chunk, received
            received += chunk
    assert b"grpc-status\x014" in received
    assert time.monotonic() - began < SECONDS
    connection.sendall(frame(HEADERS, 3, request(), END_HEADERS) + frame(DATA, 3, whole, END_STREAM))
    answer = b""
    while b"grpc-status" not in answer:
        answer += connection.recv(65536)
    assert b"grpc-status\x010" in answer


def send_a_message_over_the_limit(sidecar: Any, lookup: pb.LookupRequest) -> None:
    """It is refused in words, and the connection goes on."""
    large = pb.LookupRequest(namespace=lookup.namespace)
    large.groups.add(group=0, hashes=bytes(5 << 20))
    with pytest.raises(grpc.RpcError, match="over the limit of 4194304") as caught:
        sidecar.Lookup(large, timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert sidecar.Lookup(lookup, timeout=SECONDS).ready, "the connection is gone"
