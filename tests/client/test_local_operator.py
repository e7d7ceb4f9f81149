"""What an operator's call raises."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kvsidecar.client.connection import connect
from kvsidecar.client.local_operator import Operator
from kvsidecar.errors import AttachRefused, ClientError, DaemonUnreachable, RequestDenied
from kvsidecar.v1 import sidecar_pb2 as pb


def test_a_daemon_that_does_not_know_the_request_is_of_another_release(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise AttachRefused("nobody needs one here")

    monkeypatch.setattr(f"{Operator.__module__}.{connect.__name__}", no_link)
    socket = str(short_dir / "kvs.sock")
    server = grpc.server(ThreadPoolExecutor(1))  # knows no request at all
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    operator = Operator(socket, timeout=30.0)
    try:
        with pytest.raises(ClientError, match=f"the daemon at {socket} runs a different release") as raised:
            operator.call("CancelDrain", pb.CancelDrainRequest())
        assert not isinstance(raised.value, DaemonUnreachable | RequestDenied)
    finally:
        operator.close()
        server.stop(None)
