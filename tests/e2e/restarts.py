"""How daemons start: the first one, and those that come after one that was killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvsidecar.pool.kept_files import FILES
from kvsidecar.pool.record_table import Owner, RecordTable, map_table
from tests.harness import SECONDS, DaemonProcess, Rank, done

CHUNKS = ("--pool-size", "1MiB", "--chunk-size", "128KiB", "--slab-size", "128KiB", "--huge-pages", "none")
"""A pool in eight chunks, pinned one after the other."""


@contextmanager
def started(short_dir: Path, *flags: str, **variables: Any) -> Iterator[DaemonProcess]:
    with DaemonProcess(short_dir, *flags, **variables) as daemon:
        yield daemon.wait_ready()


def cold_reason(daemon: DaemonProcess) -> str:
    """Why it started cold; empty after a warm start."""
    return str(daemon.get("/ready")[1]["cold_start_reason"])


def kill(daemon: DaemonProcess) -> None:
    daemon.process.kill()
    daemon.process.wait(SECONDS)


def all_there(daemon: DaemonProcess, *names: str) -> None:
    rank = Rank(daemon)
    assert rank.hits(*names) == len(names)
    ids = list(range(1, 1 + len(names)))
    done(rank.load(*names, at=ids))
    assert all(rank.holds(block_id, name) for block_id, name in zip(ids, names, strict=True))
    rank.close()


def owners_in(pool_dir: Path) -> list[Owner]:
    fd = os.open(pool_dir / FILES[1], os.O_RDWR)
    try:
        return RecordTable.owners(map_table(fd))
    finally:
        os.close(fd)


def grpc_health(daemon: DaemonProcess, service: str = "kvsidecar.v1.Sidecar") -> int:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status: int = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS).status
        return status
