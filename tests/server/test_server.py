"""What gRPC's log says of clients that go in the moment of their answer."""

from __future__ import annotations

import logging
import sys

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from structlog.testing import capture_logs

from kvsidecar.errors import Refusal
from kvsidecar.server.grpc_server import ClientsGone
from kvsidecar.support import log


def record(error: Exception) -> logging.LogRecord:
    """As gRPC makes it: the record of an error that was caught."""
    try:
        raise error
    except Exception:  # noqa: BLE001
        return logging.LogRecord("grpc", logging.ERROR, "", 0, "raised by [%s]", ("/Lookup",), sys.exc_info())


def test_a_client_that_went_is_counted_and_one_quiet_line() -> None:
    refused: list[Refusal] = []
    with capture_logs() as lines:
        assert not ClientsGone(refused.append).filter(record(cygrpc.ExecuteBatchError("Failed execute_batch")))
    assert refused == [Refusal.CLIENT_GONE]
    assert [(line["log_level"], line["call"]) for line in lines] == [("debug", "raised by [/Lookup]")]
    assert "exc_info" not in lines[0]


def test_what_else_goes_wrong_is_still_said_in_full() -> None:
    refused: list[Refusal] = []
    clients_gone = ClientsGone(refused.append)
    assert clients_gone.filter(record(ValueError("ours")))
    assert clients_gone.filter(logging.LogRecord("grpc", logging.ERROR, "", 0, "no exception", (), None))
    assert not refused


def test_grpc_logs_there() -> None:
    """The filter is put on the logger that this release of grpc uses."""
    from kvsidecar.server import grpc_server as server

    assert server._GRPC_LOG.name in logging.root.manager.loggerDict
    assert cygrpc.ExecuteBatchError.__module__.startswith(server._GRPC_LOG.name)


def test_grpcs_own_records_are_one_of_a_kind_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clients_gone = ClientsGone(lambda _: None)
    monkeypatch.setattr(log, "LIMITED_SECONDS", 3600.0)
    assert [clients_gone.filter(record(ValueError("ours"))) for _ in range(3)] == [True, False, False]
    monkeypatch.setattr(log, "LIMITED_SECONDS", 0.0)
    assert clients_gone.filter(record(ValueError("ours")))
