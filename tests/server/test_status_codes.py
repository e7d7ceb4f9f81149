"""Every error has a gRPC status code, and every call an answer whether other hosts may make it."""

from __future__ import annotations

import inspect

import grpc
import pytest

from kvsidecar import errors
from kvsidecar.errors import Refusal
from kvsidecar.server.status_codes import CODES, code_of
from kvsidecar.server.tcp import RemoteService
from kvsidecar.v1 import sidecar_pb2 as pb

ALL = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, errors.KVSidecarError) and error.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_every_error_is_in_the_table(error: type[errors.KVSidecarError]) -> None:
    assert error in CODES


def test_no_error_maps_to_ok_or_unknown() -> None:
    assert not {grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN} & set(CODES.values())


def test_errors_with_arguments_of_their_own_are_mapped_too() -> None:
    assert code_of(errors.CopyFailed("x")) is grpc.StatusCode.INTERNAL
    assert code_of(errors.Unavailable("x", refusal=Refusal.DRAINING)) is grpc.StatusCode.UNAVAILABLE


def test_whoever_adds_a_call_decides_whether_other_hosts_may_make_it() -> None:
    """What `RemoteService` does not refuse itself it serves as `Service` does. Add a new call here, and there if other
    hosts may not make it."""
    calls = {method.name for method in pb.DESCRIPTOR.services_by_name["Sidecar"].methods}
    refused = {name for name in calls if name in vars(RemoteService)}
    assert refused == {"Attach", "Store", "Load", "Release", "Renew"}
    assert calls - refused == {"Lookup", "Status", "Clear", "Pin", "Unpin", "Drain", "CancelDrain"}
