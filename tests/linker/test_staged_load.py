"""Loads by way of the staging memory, against a real daemon on the host device."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.integrations.sglang import staged_load
from kvsidecar.integrations.sglang.groups import KV, groups_of
from kvsidecar.integrations.sglang.staged_load import (
    MOST_TILES,
    StagedLoad,
    Tile,
    chunks_of,
    default_bytes,
    tiles_of,
)
from tests.harness import SECONDS, DaemonProcess, Gate, eventually
from tests.linker.rank import LAYERS, Engine, LateMoves, running
from tests.marks import lent_daemon, processes

SLOTS = 4
"""Room for two tiles of two pages each, of each chunk, or for one of up to four."""


@pytest.mark.parametrize(
    ("tokens", "heads", "chunks"),
    [
        pytest.param(1, 8, 3, id="pages of one token: three"),
        pytest.param(16, 8, 6, id="16 tokens: load_chunks"),
        pytest.param(64, 4, 6, id="64, with two ranks"),
        pytest.param(64, 8, 0, id="64: as fast as the link without"),
    ],
)
def test_by_default_small_pieces_come_by_way_of_staging_memory(tokens: int, heads: int, chunks: int) -> None:
    """Of Llama-3.1-8B: 32 layers, K and V of 128 values of two bytes each."""
    piece = tokens * heads * 128 * 2
    assert default_bytes(piece, 80 << 30) == (1 << 30 if chunks else 0)
    assert default_bytes(piece, 4 << 30) == (512 << 20 if chunks else 0), "the forward needs the rest"
    assert not chunks or chunks_of(64 * piece, 6) == chunks
    assert chunks_of(64 * piece, 2) == 2


@given(st.integers(0, 40), st.integers(2, 9), st.integers(1, 12), st.sets(st.integers(0, 5), min_size=1))
def test_tiles_hold_every_page_of_every_chunk_once_and_in_order(
    pages: int, slots: int, most: int, chunks: set[int]
) -> None:
    with mock.patch.object(staged_load, "MOST_PAGES", most):
        tiles = list(tiles_of(pages, slots, sorted(chunks)))
    assert all(tile.end - tile.first <= most for tile in tiles)
    assert len(tiles) == len(chunks) * bool(pages) or pages > min(slots, most)
    found = [(tile.chunk, page) for tile in tiles for page in range(tile.first, tile.end)]
    assert found == [(chunk, page) for chunk in sorted(chunks) for page in range(pages)]
    assert all(tile.slot >= 0 and tile.slot + tile.end - tile.first <= slots for tile in tiles)
    for tile, after in pairwise(tiles):
        assert tile.chunk != after.chunk or tile.slot != after.slot, "one is loaded while the other is moved on"


class Watched(LateMoves):
    """Staging memory that knows which of its slots are being loaded or wait to be moved on."""

    def __init__(self, slots: int, chunks: int) -> None:
        super().__init__()
        self.slots, self.groups = slots, groups_of([(KV, range(chunks), False)], chunks, chunks)
        self.used: set[tuple[int, int]] = set()
        self.moves: list[tuple[int, int, list[int]]] = []
        self.jobs = 0

    def send(self, tile: Tile) -> int:
        mine = {(tile.chunk, tile.slot + i) for i in range(tile.end - tile.first)}
        assert not mine & self.used, "a load into a slot that is being loaded or moved on"
        self.used |= mine
        self.jobs += 1
        return self.jobs

    def move(self, chunk: int, first: int, pages: list[int]) -> None:
        self.moves.append((chunk, first, pages))
        mine = {(chunk, first + i) for i in range(len(pages))}
        assert mine <= self.used
        self.add(chunk, lambda: self.used.difference_update(mine))


@given(st.integers(1, 40), st.integers(2, 9), st.integers(1, 5))
def test_no_slot_is_loaded_before_its_pages_have_been_moved_on(pages: int, slots: int, chunks: int) -> None:
    staging: Any = Watched(slots, chunks)
    load = StagedLoad(staging, list(range(100, 100 + pages)), staging.send)
    load.send()
    while load.next_job() is not None:
        assert len(load._sent) <= MOST_TILES
        load.move()
        load.send()
    assert [page for chunk, _, mine in staging.moves for page in mine] == [*range(100, 100 + pages)] * chunks
    load.wait()
    assert not staging.used


class TestDaemon:
    pytestmark = lent_daemon

    @pytest.fixture
    def engine(self, daemon: DaemonProcess) -> Iterator[Engine]:
        each = Engine(daemon.socket, staged_pages=SLOTS, chunks=3).attach()
        yield each
        each.side.close()

    @pytest.mark.parametrize("pages", [[9], [9, 2, 30, 4], [9, 2, 30, 4, 17, 5, 11, 10, 20]])
    def test_pages_come_back_byte_for_byte_layer_by_layer(self, engine: Engine, pages: list[int]) -> None:
        count = len(pages)
        engine.store(range(count), "a")
        before = engine.kv.copy()
        assert engine.lookup("a", count) == [count]
        assert engine.load(pages, "a")
        index = engine.start()
        for layer in range(LAYERS):
            assert engine.forward_sees(pages, "a", layer)
        assert engine.side.loads.finish(index)
        others = [page for page in range(engine.kv.shape[1]) if page not in pages]
        assert (engine.kv[:, others] == before[:, others]).all(), "nothing else was written"
        assert (engine.counters.staged_loads, engine.counters.loaded_pages) == (1, count)

    def test_requests_of_one_batch_come_together(self, engine: Engine) -> None:
        for name, pages in (("a", [1, 2, 3]), ("b", [4, 5])):
            engine.store(pages, name)
            assert engine.lookup(name, len(pages), name)
            assert engine.load([page + 10 for page in pages], name, name)
        assert engine.side.loads.finish(engine.start())
        assert engine.holds([11, 12, 13], "a")
        assert engine.holds([14, 15], "b")
        assert engine.counters.staged_loads == 1

    def test_a_batch_beside_another_one_is_loaded_directly(self, engine: Engine) -> None:
        for name, pages in (("a", [1, 2, 3]), ("b", [4, 5])):
            engine.store(pages, name)
        assert engine.lookup("a", 3)
        assert engine.load([21, 22, 23], "a")
        first = engine.start()
        assert engine.lookup("b", 2)
        assert engine.load([24, 25], "b")
        assert engine.side.loads.finish(engine.start())
        assert engine.holds([24, 25], "b")
        assert engine.side.loads.finish(first)
        assert engine.holds([21, 22, 23], "a")
        assert engine.counters.staged_loads == 1

    def test_a_batch_whose_layers_have_all_come_leaves_the_staging_memory_to_the_next_one(self, engine: Engine) -> None:
        """SGLang starts the next batch before it finishes the last one."""
        for name, pages in (("a", [1, 2, 3]), ("b", [4, 5])):
            engine.store(pages, name)
        started = []
        for name, pages in (("a", [21, 22, 23]), ("b", [24, 25])):
            assert engine.lookup(name, len(pages))
            assert engine.load(pages, name)
            started.append(engine.start())
            engine.side.loads.wait_until(LAYERS - 1)
        assert all(map(engine.side.loads.finish, started))
        assert engine.holds([21, 22, 23], "a")
        assert engine.holds([24, 25], "b")
        assert engine.counters.staged_loads == 2

    def test_an_engine_that_offloads_no_more_gives_the_staging_memory_back(self, engine: Engine) -> None:
        """SGLang keeps the linker, for example while it sleeps."""
        engine.store([1, 2, 3], "a")
        assert engine.lookup("a", 3)
        assert engine.load([21, 22, 23], "a")
        assert engine.side.loads.finish(engine.start())
        staging, engine.staging = weakref.ref(engine.staging), None
        engine.side.close()
        gc.collect()
        assert staging() is None

    def test_many_loads_one_after_the_other(self, engine: Engine) -> None:
        for name in range(8):
            engine.store([1, 2, 3, 4, 5, 6, 7], name)
        for name in range(8):
            assert engine.lookup(name, 7) == [7]
            assert engine.load([21, 25, 22, 26, 23, 27, 24], name)
            assert engine.side.loads.finish(engine.start())
            assert engine.holds([21, 25, 22, 26, 23, 27, 24], name)
        assert engine.counters.staged_loads == 8


@processes
def test_a_daemon_that_dies_during_a_load_leaves_the_other_layers_alone(short_dir: Path, gate: Gate) -> None:
    with running(short_dir, f"load.in_flight@3={gate}", staged_pages=SLOTS, load_timeout=SECONDS) as (daemon, engine):
        engine.store([1, 2], "a")
        before = engine.kv.copy()
        assert engine.lookup("a", 2) == [2]
        assert engine.load([11, 12], "a")
        index = engine.start()
        engine.side.loads.wait_until(0)
        daemon.wait_log("failpoint")
        daemon.process.send_signal(signal.SIGKILL)
        engine.side.loads.wait_until(LAYERS - 1)
        assert not engine.side.loads.finish(index)
        assert engine.holds([11, 12], "a", slice(0, 1))
        assert (engine.kv[1:] == before[1:]).all()
        assert engine.counters.failed_loads == 1


@processes
def test_until_the_daemon_has_the_staging_memory_loads_go_directly(short_dir: Path) -> None:
    with running(short_dir, staged_pages=SLOTS) as (_, engine):
        main, staging = engine.side._clients
        engine.store([1, 2, 3], "a")
        assert staging.close(10)
        eventually(lambda: not staging.attached, "the end of its session")
        assert main.attached
        assert engine.lookup("a", 3) == [3]
        assert engine.load([11, 12, 13], "a")
        assert engine.side.loads.finish(engine.start())
        assert engine.holds([11, 12, 13], "a")
        assert engine.counters.staged_loads == 0


def late(engine: Engine, daemon: DaemonProcess) -> int:
    """A load of three pages whose first tile the daemon holds until its deadline has passed."""
    engine.store([1, 2, 3], "a")
    assert engine.lookup("a", 3) == [3]
    assert engine.load([11, 12, 13], "a")
    index = engine.start()
    daemon.wait_log("failpoint")
    engine.clock.ahead += SECONDS
    return index


@processes
def test_a_daemon_that_hangs_in_a_load_is_given_up(short_dir: Path, gate: Gate) -> None:
    with running(short_dir, f"load.in_flight@2={gate}", staged_pages=SLOTS, load_timeout=SECONDS) as (daemon, engine):
        index = late(engine, daemon)
        finished: list[bool] = []
        finishing = threading.Thread(target=lambda: finished.append(engine.side.loads.finish(index)))
        finishing.start()
        # Both sessions: the daemon would answer neither.
        eventually(lambda: not any(client.attached for client in engine.side._clients), "the end of the sessions")
        gate.let_pass()
        finishing.join(SECONDS)
        assert finished == [False]
        assert engine.counters.overdue_loads == 1
        engine.attach()
        engine.clock.ahead += 10
        eventually(lambda: engine.lookup("a", 3) == [3], "the daemon is used again")
        assert engine.load([11, 12, 13], "a")
        assert engine.side.loads.finish(engine.start())
        assert engine.holds([11, 12, 13], "a")


@processes
def test_a_load_that_misses_its_deadline_fails(short_dir: Path, gate: Gate) -> None:
    with running(short_dir, f"load.in_flight@2={gate}", staged_pages=SLOTS, load_timeout=SECONDS) as (daemon, engine):
        index = late(engine, daemon)
        engine.side.loads.wait_until(LAYERS - 1)
        gate.let_pass()
        assert not engine.side.loads.finish(index)
        assert not engine.holds([11, 12, 13], "a")
