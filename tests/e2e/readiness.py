"""How a daemon becomes ready."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.harness import (
    SECONDS,
    DaemonProcess,
)

CHUNKS = ("--pool-size", "1MiB", "--chunk-size", "128KiB", "--slab-size", "128KiB", "--huge-pages", "none")


def grpc_health(daemon: DaemonProcess, service: str = "kvsidecar.v1.Sidecar") -> int:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status: int = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS).status
        return status
