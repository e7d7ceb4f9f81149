"""An engine rank that keeps the daemon busy during a measurement: ``python -m kvsidecar.bench.rank CONFIG``.

A process of its own, because its client's threads would hold the interpreter lock of the one that measures.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

import numpy as np

from kvsidecar.bench.driver import Cuda
from kvsidecar.bench.engine import AttachedEngine, LeasedBlocks, attached
from kvsidecar.bench.layouts import Layout
from kvsidecar.bench.processes import serve
from kvsidecar.support import cuda_driver
from kvsidecar.types import Direction

LEASE_SECONDS = 60.0
"""How long leases last: the daemon's default maximum. They are renewed after a third of it."""
BATCH = 16
"""Jobs that are prepared at a time, so that no hashes are made between a job's end and the next job."""


class Traffic:
    """Jobs of one direction, one after another in a thread, from `start` to `stop`."""

    def __init__(
        self, engine: AttachedEngine, direction: Direction, blocks: int, in_flight: int, held: list[LeasedBlocks]
    ) -> None:
        self._engine = engine
        self._direction = direction
        self._blocks = blocks
        self._in_flight = in_flight
        self._held = held
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.jobs = 0
        self.nbytes = 0
        self.error = ""

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name=f"bench-{self._direction}")
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            self._jobs()
        except Exception as error:  # noqa: BLE001 - reported to the parent, by the next count
            self.error = f"{type(error).__name__}: {error}"

    def _jobs(self) -> None:
        outstanding: deque[int] = deque()
        renew_at = time.monotonic() + LEASE_SECONDS / 3
        while not self._stop.is_set():
            if self._held and time.monotonic() > renew_at:
                renew_at = time.monotonic() + LEASE_SECONDS / 3
                for each in self._held:
                    self._engine.client.renew(each.lease, LEASE_SECONDS)
            for submit in self._engine.submits(self._direction, self._blocks, BATCH, self._held):
                if len(outstanding) >= self._in_flight:
                    self._finish(outstanding.popleft())
                if self._stop.is_set():
                    break
                outstanding.append(submit())
        while outstanding:
            self._finish(outstanding.popleft())

    def _finish(self, job: int) -> None:
        nbytes, _ = self._engine.finish(job)
        self.nbytes += nbytes
        self.jobs += 1


class Rank:
    """Answers the parent's requests."""

    def __init__(self, engine: AttachedEngine, traffics: dict[str, Traffic]) -> None:
        self._engine = engine
        self._traffics = traffics

    def start(self, directions: list[str], idle: bool) -> dict[str, Any]:
        self._engine.client.set_idle(idle)
        for direction in directions:
            self._traffics[direction].start()
        return {}

    def count(self) -> dict[str, Any]:
        """Jobs and bytes so far by direction, and when; the clock is the same in all processes of the machine."""
        self._raise_errors()
        counted = {name: {"jobs": each.jobs, "bytes": each.nbytes} for name, each in self._traffics.items()}
        return {"time": time.monotonic(), **counted}

    def stop(self) -> dict[str, Any]:
        for traffic in self._traffics.values():
            traffic.stop()
        self._engine.client.set_idle(True)
        self._raise_errors()
        return {}

    def _raise_errors(self) -> None:
        for traffic in self._traffics.values():
            if traffic.error:
                raise RuntimeError(traffic.error)


def main() -> None:
    config = json.loads(sys.argv[1])
    layout = Layout.from_json(config["layout"])
    rng = np.random.default_rng(config["seed"])
    blocks, in_flight, directions = config["blocks"], config["in_flight"], config["directions"]
    with ExitStack() as stack:
        cuda, on = None, config["on"]
        if config["cuda"]:
            uuids = [cuda_driver.device_uuid(ordinal) for ordinal in range(cuda_driver.device_count())]
            cuda = Cuda(uuids.index(on) if on else 0)
        if on:
            layout = layout.sized(cuda.memory_info()[0] if cuda else None)
        engine = stack.enter_context(
            attached(config["socket"], layout, cuda, run=config["run"], rng=rng, name=config["name"], host=on or "host")
        )
        loads = Direction.LOAD.value in directions
        held = stack.enter_context(engine.held(blocks, in_flight, LEASE_SECONDS)) if loads else []
        traffics = {
            name: Traffic(engine, Direction(name), blocks, in_flight, held if name == Direction.LOAD.value else [])
            for name in directions
        }
        for traffic in traffics.values():
            stack.callback(traffic.stop)
        engine.client.set_idle(True)  # until a request changes it: a waiting rank must not make others pace stores
        rank = Rank(engine, traffics)
        sys.stdout.write("{}\n")  # ready
        sys.stdout.flush()
        serve({"start": rank.start, "count": rank.count, "stop": rank.stop})


if __name__ == "__main__":
    main()
