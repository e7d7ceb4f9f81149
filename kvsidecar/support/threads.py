"""Threads, where the system may start no more of them: it counts those of all processes of a user, or of a cgroup."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from kvsidecar.errors import TooManyProcesses

T = TypeVar("T")

ROOM: Final = 40
"""Threads that must be possible when a daemon starts: its own, of which gRPC has up to twenty, and those of its first
copier. Where libraries in C cannot start theirs, they end the process by a signal, without a word."""
WORKERS: Final = 8
"""The event loop's threads for `asyncio.to_thread`. Pinning the pool occupies one until it is done."""
LIMITS: Final = "its limit of processes is ulimit -u, TasksMax= of a unit, or pids.max of a container"


def check_room() -> None:
    """Raises TooManyProcesses: the system starts fewer than `ROOM` threads."""
    started_pool(ROOM).shutdown()


def started_pool(count: int) -> ThreadPoolExecutor:
    """An executor that never starts a thread later on, when the system may have none for it.

    Raises:
        TooManyProcesses: the system starts fewer.
    """
    pool, all_started = ThreadPoolExecutor(count, "kvsidecar-worker"), threading.Event()
    try:
        for _ in range(count):
            pool.submit(all_started.wait)  # each is busy when the next one comes
    except RuntimeError as error:
        all_started.set()
        pool.shutdown()
        why = f"this user may start no more threads or processes at present ({LIMITS})"
        raise TooManyProcesses(why) from error
    all_started.set()
    return pool


def submit(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    """Have the executor make the call. If the system starts no thread for it, it is made here and now."""
    try:
        return pool.submit(call)
    except RuntimeError:
        made: Future[T] = Future()
        try:
            made.set_result(call())
        except Exception as error:  # noqa: BLE001 - whoever waits for the result gets it
            made.set_exception(error)
        return made
