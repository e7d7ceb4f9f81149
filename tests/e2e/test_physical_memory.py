"""Engines whose KV memory is physical memory of the CUDA VMM API: many descriptors, sleep, and wake-up. On the host, a
memfd is what a descriptor of such memory is on a GPU; `tests/e2e/test_gpu.py` has the same on one."""

from __future__ import annotations

import mmap
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvsidecar.client import Allocation, Blocks, Client, GroupLayout, JobDone, KVBuffers, Outcome, PhysicalRange, Region
from kvsidecar.errors import ClientError
from kvsidecar.support import host_memory
from kvsidecar.support.memory_limits import PageKind, Pages
from kvsidecar.types import MAX_DESCRIPTORS
from tests.e2e.leftovers import holders
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, eventually, hashes
from tests.marks import both_protocols, daemon_may_open, lent_daemon, promise
from tests.open_files import open_files

pytestmark = lent_daemon

BLOCKS, ROW = 128, 4096
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
SMALL_PAGES = Pages(PageKind.SMALL, mmap.PAGESIZE)
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE


class Engine:
    """Layers in allocations of their own, each of several ranges of physical memory, whose addresses never change."""

    def __init__(self, daemon: DaemonProcess, *, layers: int = 3, ranges: int = 2) -> None:
        self._daemon = daemon
        self._range_bytes = BLOCKS * ROW // ranges
        self._addresses = [host_memory.mmap_at(None, BLOCKS * ROW, 0, RESERVED) for _ in range(layers)]
        self.layers: list[npt.NDArray[np.uint8]] = [
            host_memory.as_array(address, BLOCKS * ROW).reshape(BLOCKS, ROW) for address in self._addresses
        ]
        regions = tuple(Region(layer, 0, ROW, ROW, ROW, 1) for layer in range(layers))
        self._layout = GroupLayout(0, BLOCKS, 0, 1, regions)
        self.wake()

    def wake(self) -> None:
        allocations = []
        for address in self._addresses:
            found = []
            for at in range(address, address + BLOCKS * ROW, self._range_bytes):
                fd = host_memory.create_file(self._range_bytes, SMALL_PAGES, "kvsidecar-kv-range")
                os.posix_fallocate(fd, 0, self._range_bytes)
                host_memory.mmap_at(at, self._range_bytes, READ_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd)
                found.append(PhysicalRange(self._range_bytes, fd=fd))
            allocations.append(Allocation(BLOCKS * ROW, ranges=tuple(found)))
        self.buffers = KVBuffers("host", tuple(allocations))
        self.client: Client = self._daemon.client(name="sleepy")
        self.client.attach(instance="sleepy", namespace=NAMESPACE, buffers=self.buffers, groups=[self._layout])

    def sleep(self) -> bool:
        """Returns whether the daemon has unmapped the memory."""
        unmapped = self.client.close(SECONDS)
        self.free()
        return unmapped

    def free(self) -> None:
        for address in self._addresses:
            host_memory.mmap_at(address, BLOCKS * ROW, 0, RESERVED | MAP_FIXED)
        for allocation in self.buffers.allocations:
            for each in allocation.ranges:
                assert each.fd is not None
                os.close(each.fd)

    def fill(self, seed: int) -> npt.NDArray[np.uint8]:
        """Random content; a copy of it, as ``[layers, blocks, row]``."""
        rng = np.random.default_rng(seed)
        for layer in self.layers:
            layer[:] = rng.integers(0, 256, layer.shape, np.uint8)
        return self.content()

    def content(self) -> npt.NDArray[np.uint8]:
        return np.array(self.layers)

    def store(self, *ids: int) -> JobDone:
        return self.done(self.client.store([Blocks(0, hashes(*ids), list(ids))]))

    def load(self, *names: int, at: list[int]) -> JobDone:
        return self.done(self.client.load([Blocks(0, hashes(*names), at)]))

    def done(self, job: int) -> JobDone:
        return self.client.wait([job], SECONDS)[job]


def open_descriptors(daemon: DaemonProcess, *, copiers: bool = False) -> int:
    """Of an engine's physical memory, in the daemon, and in its copiers if asked: on the host they keep those of what
    they have mapped, to see whether it is still there."""
    pids = [daemon.process.pid, *(daemon.copiers() if copiers else ())]
    return sum("kvsidecar-kv-range" in file for pid in pids for file in open_files(pid).values())


@both_protocols
def test_hundreds_of_ranges_are_mapped_and_no_descriptor_stays_open(daemon: DaemonProcess) -> None:
    engine = Engine(daemon, layers=5, ranges=64)
    assert open_descriptors(daemon) == 0, "a descriptor keeps the memory allocated after the engine has unmapped it"
    want = engine.fill(1)
    ids = [127, 1, 64, 63, 2]
    assert engine.store(*ids).copied_blocks == len(ids)
    engine.fill(2)
    at = [3, 66, 5, 126, 0]
    assert engine.load(*ids, at=at).outcome is Outcome.DONE
    assert np.array_equal(engine.content()[:, at], want[:, ids])
    assert engine.sleep()
    assert open_descriptors(daemon, copiers=True) == 0


@daemon_may_open(12_000)
def test_as_many_descriptors_as_a_rank_may_share_arrive(daemon: DaemonProcess) -> None:
    fd = host_memory.create_file(mmap.PAGESIZE, SMALL_PAGES, "kvsidecar-kv-range")
    os.posix_fallocate(fd, 0, mmap.PAGESIZE)
    ranges = tuple(PhysicalRange(mmap.PAGESIZE, fd=fd) for _ in range(MAX_DESCRIPTORS))
    buffers = KVBuffers("host", (Allocation(MAX_DESCRIPTORS * mmap.PAGESIZE, ranges=ranges),))
    layout = GroupLayout(0, 1, 0, 1, (Region(0, 0, ROW, ROW, ROW, 1),))
    with daemon.client() as client:
        client.attach(instance="many", namespace=replace(NAMESPACE, model="other"), buffers=buffers, groups=[layout])
        assert open_descriptors(daemon) == 0
    os.close(fd)


@promise("its memory is free at once; hits when it wakes with the same weights")
@both_protocols
def test_nothing_holds_a_sleeping_engines_memory_and_its_blocks_hit_when_it_wakes(daemon: DaemonProcess) -> None:
    engine = Engine(daemon)
    want = engine.fill(1)
    assert engine.store(*range(8)).copied_blocks == 8
    for _ in range(3):
        # Stores are under way: the sleep waits for them.
        last = engine.client.store([Blocks(0, hashes(*range(8, 64)), list(range(8, 64)))])
        assert holders(daemon) == set(daemon.copiers())
        assert engine.sleep()
        assert holders(daemon) == set()
        assert {each.job: each.outcome for each in engine.client.poll()}[last] is Outcome.DONE
        engine.wake()
        assert engine.load(*range(64), at=list(range(64, 128))).outcome is Outcome.DONE
        assert np.array_equal(engine.content()[:, 64:], want[:, :64])
        engine.fill(1)
    assert engine.sleep()


def test_an_engine_sleeps_although_its_copier_hangs(short_dir: Path) -> None:
    """The daemon kills a copier that does not answer, and its death unmaps."""
    with DaemonProcess(short_dir, "--stuck-after", "1") as daemon:
        daemon.wait_ready()
        engine = Engine(daemon)
        engine.fill(1)
        (copier,) = daemon.copiers()
        os.kill(copier, signal.SIGSTOP)
        engine.client.store([Blocks(0, hashes(1), [1])])
        assert engine.sleep()
        assert holders(daemon) == set()
        daemon.wait_log("a copier is down")
        eventually(lambda: daemon.get("/ready")[0] == 200)
        engine.wake()
        engine.fill(2)
        assert engine.store(2).copied_blocks == 1
        assert engine.sleep()


def test_ranges_that_do_not_fit_their_memory_are_refused(daemon: DaemonProcess) -> None:
    engine = Engine(daemon)
    half = PhysicalRange(engine._range_bytes // 2, fd=engine.buffers.allocations[0].ranges[0].fd)
    wrong = KVBuffers("host", (Allocation(half.size, ranges=(half,)),))
    layout = GroupLayout(0, 1, 0, 1, (Region(0, 0, ROW, ROW, ROW, 1),))
    with daemon.client() as client, pytest.raises(ClientError, match="all of it"):
        client.attach(instance="wrong", namespace=replace(NAMESPACE, model="other"), buffers=wrong, groups=[layout])
    assert engine.store(1).copied_blocks == 1
    assert engine.sleep()
