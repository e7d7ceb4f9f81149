"""What must hold of jobs whatever ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsidecar.client import (
    Backoff,
    Client,
    JobDone,
)
from tests.harness import SECONDS, DaemonProcess, Rank, done, eventually
from tests.open_files import open_files


def pause(daemon: DaemonProcess) -> None:
    """Returns when the process is stopped: SIGSTOP takes effect at some later time."""
    daemon.process.send_signal(signal.SIGSTOP)
    status = Path(f"/proc/{daemon.process.pid}/status")
    eventually(lambda: "State:\tT" in status.read_text())


def quick(socket_path: str, local: bool, **options: Any) -> Client:
    """A client whose retries are as quick as the tests'."""
    defaults: dict[str, Any] = {"timeout": SECONDS, "step_budget": SECONDS, "reconnect": Backoff(0.01, 0.05)}
    return Client(socket_path, local_protocol=local, **{**defaults, **options})


@contextlib.contextmanager
def no_leaks() -> Iterator[None]:
    """Neither threads nor descriptors of the client are left; gRPC's own go away on their own time."""

    def ours() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("kvsidecar-")}

    def descriptors() -> list[str]:
        return sorted(file for file in open_files(os.getpid()).values() if "pidfd" in file or "eventfd" in file)

    threads, before = ours(), descriptors()
    yield
    assert ours() <= threads
    eventually(lambda: len(descriptors()) <= len(before), lambda: (before, descriptors()))


def job_ends(client: Client, count: int) -> list[JobDone]:
    """The next ends of jobs, all that `poll` gives until there are so many."""
    ends: list[JobDone] = []
    eventually(lambda: ends.extend(client.poll()) or len(ends) >= count, lambda: ends)
    return ends


def works(rank: Rank, *names: object) -> None:
    """Store and load, byte for byte."""
    done(rank.store(*names))
    assert rank.hits(*names) == len(names)
    targets = list(range(7, 7 - len(names), -1))
    done(rank.load(*names, at=targets))
    for target, name in zip(targets, names, strict=True):
        assert rank.holds(target, name)


def until_queued(daemon: DaemonProcess, direction: str, count: int) -> None:
    """A copy is held in flight, and so many wait behind it."""
    daemon.wait_log("failpoint")
    _until(daemon, f'kvsidecar_jobs_queued{{direction="{direction}"}}', count)


def until_declined(daemon: DaemonProcess, direction: str, count: int) -> None:
    """Jobs that were cancelled before they started: the daemon knows of the end of their stream."""
    _until(daemon, f'kvsidecar_jobs_total{{direction="{direction}",outcome="declined"}}', count)


def _until(daemon: DaemonProcess, metric: str, count: int) -> None:
    eventually(lambda: daemon.metric(metric) == count, lambda: f"{metric} is {daemon.metric(metric)}, not {count}")


def deaths(daemon: DaemonProcess) -> float:
    return daemon.metric('kvsidecar_copier_deaths_total{device="host"}')


def attached_again(rank: Rank, daemon: DaemonProcess) -> None:
    daemon.wait_log("the copier works")
    daemon.wait_log("rank attached")  # its client has left the session before
    assert rank.client.wait_attached(SECONDS)
    assert rank.client.wait_ready(SECONDS).ready
