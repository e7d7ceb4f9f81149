"""Store and load bandwidth of every layout, through RPC: by blocks per job, jobs in flight, one or both directions."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median

from kvsidecar.bench.engine import AttachedEngine, Finished, LeasedBlocks, throughput
from kvsidecar.bench.errors import BenchError, Skipped
from kvsidecar.bench.layouts import BLOCK_COUNTS, CONTIGUOUS, IN_FLIGHT, STACKED, Layout
from kvsidecar.bench.report import Measurement, Row
from kvsidecar.bench.setting import Setting
from kvsidecar.bench.stats import no_garbage_collection, percentiles
from kvsidecar.support.units import format_size
from kvsidecar.types import Direction

UNPACED, PACED, EVICTING = "unpaced", "paced", "evicting"
"""Modes: the engine is idle, and stores use the whole link; it is not; the pool is full, and every store evicts."""
BOTH_BLOCKS, BOTH_IN_FLIGHT, BOTH_SECONDS = 512, 2, 1.0
EVICTING_LAYOUTS = (CONTIGUOUS.name, STACKED.name)
MOST_ROUNDS = 300


def measure(setting: Setting, out: Measurement) -> None:
    layouts = setting.layouts()
    for number, layout in enumerate(layouts, 1):
        setting.say(f"{layout.name}, layout {number} of {len(layouts)}")
        try:
            sized = setting.sized(layout)
        except Skipped as reason:
            out.note(str(reason))
            continue
        with setting.engine(sized) as engine:
            try:
                _Layout(setting, out, engine).measure()
            finally:
                engine.clear()


class _Layout:
    """All figures of one layout."""

    def __init__(self, setting: Setting, out: Measurement, engine: AttachedEngine) -> None:
        self._setting = setting
        self._out = out
        self._engine = engine
        self._layout: Layout = engine.layout
        self._stored_bytes = 0
        """Bytes stored since the last clear."""

    def measure(self) -> None:
        self._engine.client.set_idle(True)  # or its stores would be paced
        cells = [
            (blocks, in_flight) for in_flight in IN_FLIGHT for blocks in BLOCK_COUNTS if self._fits(blocks, in_flight)
        ]
        for blocks, in_flight in cells:
            self._setting.say(f"{self._layout.name}, {blocks} blocks a job, {in_flight} in flight")
            self._cell(Direction.STORE, UNPACED, blocks, in_flight)
            self._cell(Direction.LOAD, UNPACED, blocks, in_flight)
        if self._fits(BOTH_BLOCKS, 2 * BOTH_IN_FLIGHT):
            self._both()
        if self._setting.is_private and self._layout.name in EVICTING_LAYOUTS:
            self._evicting()
        self._engine.client.set_idle(False)
        for blocks, in_flight in cells:
            self._cell(Direction.STORE, PACED, blocks, in_flight)

    def _fits(self, blocks: int, in_flight: int) -> bool:
        need = blocks * in_flight * self._layout.block_bytes
        if need <= self._setting.in_flight_bytes:
            return True
        size, pool = format_size(need), format_size(self._setting.pool_bytes)
        self._out.note(f"{self._layout.name}: {in_flight} jobs of {blocks} blocks are {size}, too much for {pool}")
        return False

    def _cell(self, direction: Direction, mode: str, blocks: int, in_flight: int) -> None:
        """Measure one figure: rounds of jobs, ``in_flight`` at a time."""
        job_bytes = blocks * self._layout.block_bytes
        jobs = 1 if in_flight == 1 else min(4 * in_flight, max(in_flight, self._setting.in_flight_bytes // job_bytes))
        self._clear()
        with ExitStack() as stack:
            held = stack.enter_context(self._engine.held(blocks, in_flight)) if direction is Direction.LOAD else []
            self._add(direction, mode, blocks, in_flight, self._rounds(direction, blocks, jobs, in_flight, held))

    def _rounds(
        self, direction: Direction, blocks: int, jobs: int, in_flight: int, held: list[LeasedBlocks]
    ) -> list[list[Finished]]:
        rounds: list[list[Finished]] = []
        until = 0.0
        with no_garbage_collection():
            # The first round is thrown away: it pays for what is done once.
            while len(rounds) <= self._setting.repeat or (time.perf_counter() < until and len(rounds) < MOST_ROUNDS):
                if direction is Direction.STORE:
                    self._make_room(jobs * blocks * self._layout.block_bytes)
                submits = self._engine.submits(direction, blocks, jobs, held)
                rounds.append(self._engine.run(submits, in_flight))
                until = until or time.perf_counter() + self._setting.cell_seconds
        return rounds[1:]

    def _make_room(self, nbytes: int) -> None:
        """Free slots for the next stores: these figures are for stores that evict nothing."""
        if self._stored_bytes + nbytes > self._setting.in_flight_bytes:
            self._clear()
        self._stored_bytes += nbytes

    def _clear(self) -> None:
        self._engine.clear()
        self._stored_bytes = 0

    def _add(self, direction: Direction, mode: str, blocks: int, in_flight: int, rounds: list[list[Finished]]) -> None:
        jobs = [job for each in rounds for job in each]
        p50, p99 = percentiles([job.seconds for job in jobs])
        bandwidth = median([throughput(each) for each in rounds])
        self._out.add(
            **self._common(direction.value, mode, blocks, in_flight, bandwidth),
            ms_p50=round(p50 * 1e3, 4),
            ms_p99=round(p99 * 1e3, 4),
            copy_ms_p50=round(median([job.copy_seconds for job in jobs]) * 1e3, 4),
            jobs=len(jobs),
        )

    def _common(self, direction: str, mode: str, blocks: int, in_flight: int, bytes_per_second: float) -> Row:
        return {
            "layout": self._layout.name,
            "rows": self._layout.rows,
            "row_bytes": self._layout.row_bytes,
            "ids": "consecutive" if self._layout.consecutive else "random",
            "direction": direction,
            "mode": mode,
            "blocks": blocks,
            "in_flight": in_flight,
            "gbps": round(bytes_per_second / 1e9, 6),
        }

    # -- both directions -----------------------------------------------------------------------------------------------

    def _both(self) -> None:
        self._clear()
        with self._engine.held(BOTH_BLOCKS, BOTH_IN_FLIGHT) as held:
            finished: dict[Direction, list[Finished]] = {direction: [] for direction in Direction}
            flows: list[Future[None]] = []
            stop = threading.Event()

            def enough() -> bool:
                done = (len(each) >= 2 * BOTH_IN_FLIGHT for each in finished.values())
                return stop.is_set() and (all(done) or any(flow.done() for flow in flows))  # one may have failed

            def run(direction: Direction) -> None:
                """Run jobs of one direction. None ends before the other direction begins."""
                while not enough():
                    submits = self._engine.submits(direction, BOTH_BLOCKS, 2 * BOTH_IN_FLIGHT, held)
                    finished[direction] += self._engine.run(submits, BOTH_IN_FLIGHT)

            with ThreadPoolExecutor(len(finished), "bench-both") as threads:
                flows += [threads.submit(run, direction) for direction in finished]
                try:
                    stop.wait(self._setting.seconds(BOTH_SECONDS))
                finally:
                    stop.set()
        for flow in flows:
            if (error := flow.exception()) is not None:
                raise BenchError(f"both directions: {error}")
        store, load = finished.values()
        # While both ran: from the later of the first ends to the earlier of the last ones.
        start, end = max(store[0].done, load[0].done), min(store[-1].done, load[-1].done)
        store_rate, load_rate = (_rate(finished, start, end) for finished in (store, load))
        self._out.add(
            **self._common("both", UNPACED, BOTH_BLOCKS, BOTH_IN_FLIGHT, store_rate + load_rate),
            store_gbps=round(store_rate / 1e9, 6),
            load_gbps=round(load_rate / 1e9, 6),
            jobs=len(store) + len(load),
        )

    # -- a full pool ---------------------------------------------------------------------------------------------------

    def _evicting(self) -> None:
        """Measure a pool that has been in use for a while."""
        engine, blocks = self._engine, max(BLOCK_COUNTS)
        jobs = 1 + self._setting.pool_bytes // (blocks * self._layout.block_bytes)
        engine.run(engine.stores(blocks, jobs), max(IN_FLIGHT) // 2)
        for in_flight in IN_FLIGHT:
            if self._fits(blocks, in_flight):
                count = 1 if in_flight == 1 else 2 * in_flight
                with no_garbage_collection():
                    rounds = [engine.run(engine.stores(blocks, count), in_flight) for _ in range(self._setting.repeat)]
                self._add(Direction.STORE, EVICTING, blocks, in_flight, rounds)


def _rate(finished: list[Finished], start: float, end: float) -> float:
    """Bytes per second of what ended after ``start`` and not after ``end``."""
    return sum(each.nbytes for each in finished if start < each.done <= end) / (end - start)
