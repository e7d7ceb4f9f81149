"""What of a step takes how long: a clock around the parts of the connector, for `benchmarks.vllm.step_cost --parts`.

Each clock adds about a third of a microsecond to its part, and to all around it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.table import Table
from vllm.v1.core.block_pool import BlockPool

from kvsidecar.client import Client, local_stream, send_queue
from kvsidecar.client.jobs import Jobs
from kvsidecar.client.local_transport import LocalTransport
from kvsidecar.client.session import AttachSession
from kvsidecar.integrations.stored_filter import StoredFilter
from kvsidecar.integrations.vllm import selection, stores
from kvsidecar.integrations.vllm.loads import Loads
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from kvsidecar.integrations.vllm.worker import WorkerSide

PARTS: tuple[tuple[int, Any, str, str], ...] = (
    # Indent, owner, name, what it does.
    (0, SchedulerSide, "update_state_after_alloc", "a hit was taken"),
    (1, Loads, "plan", "plan its load"),
    (2, Client, "renew_nowait", "renew its lease"),
    (3, LocalTransport, "post", "send that"),
    (0, SchedulerSide, "build_plan", "the step's plan"),
    (1, stores.Stores, "_consider", "which blocks are new"),
    (1, stores, "choose", "which of them to store"),
    (2, StoredFilter, "find", "what is stored already"),
    (2, selection, "_keys", "what the GPU's cache says of them"),
    (1, StoredFilter, "add", "note them"),
    (1, BlockPool, "touch", "hold them (vLLM)"),
    (1, stores.Stores, "take_jobs", "the store's job"),
    (0, WorkerSide, "bind", "a worker takes the plan"),
    (0, WorkerSide, "submit_loads", "send the load"),
    (0, WorkerSide, "submit_stores", "send the store"),
    (1, Client, "load", "of the load: the client"),
    (1, Client, "store", "of the store: the client"),
    (2, AttachSession, "send", "of both: the session"),
    (3, send_queue, "fill_job", "make them messages"),
    (3, local_stream, "frame", "serialize them"),
    (3, local_stream.LocalStream, "_write", "the system calls"),
    (0, WorkerSide, "poll", "what has ended"),
    (1, Jobs, "poll", "the client"),
    (0, WorkerSide, "take_report", "tell the scheduler"),
)


class Parts:
    """Times of the parts within each `step`."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._of_step: dict[str, float] | None = None
        self._thread = threading.get_ident()
        for _, owner, name, _ in PARTS:
            self._wrap(owner, name)

    @contextmanager
    def step(self) -> Iterator[None]:
        self._of_step = {}
        try:
            yield
        finally:
            for key, seconds in self._of_step.items():
                self.seconds.setdefault(key, []).append(seconds)
            self._of_step = None

    def table(self) -> Table:
        table = Table("part", "µs p50", "p90", "what it does", title="Of a step with one store and one load")
        for indent, owner, name, what in PARTS:
            taken = self.seconds.get(_key(owner, name), [0.0])
            times = (f"{np.percentile(taken, at) * 1e6:.1f}" for at in (50, 90))
            table.add_row("  " * indent + _key(owner, name), *times, what)
        return table

    def _wrap(self, owner: Any, name: str) -> None:
        call, key = getattr(owner, name), _key(owner, name)

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                if self._of_step is not None and threading.get_ident() == self._thread:
                    self._of_step[key] = self._of_step.get(key, 0.0) + time.perf_counter() - began

        setattr(owner, name, timed)


def _key(owner: Any, name: str) -> str:
    return f"{owner.__name__.rpartition('.')[2]}.{name}"
