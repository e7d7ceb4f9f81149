"""Daemons that are killed, and started again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsidecar.pool.kept_files import FILES
from kvsidecar.pool.record_table import Owner, RecordTable, map_table
from tests.harness import SECONDS, DaemonProcess, Rank, done


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
