"""What `kvsidecar.device.base` promises, held for both implementations with real processes and real memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

import kvsidecar
from kvsidecar.copier.copy_plan import BlockCopies
from kvsidecar.copier.copy_queue import CopyQueue, CopyResult, QueuedCopy
from kvsidecar.copier.recipes import bind
from kvsidecar.core.layout_checks import checking_regions
from kvsidecar.device.base import (
    CopyCall,
    CopyPlan,
    CudaIpcSource,
    Device,
    DeviceMemory,
    MemfdSource,
    Platform,
    RangesSource,
)
from kvsidecar.errors import CopyFailed, DeviceNotFound, ImportRefused
from kvsidecar.types import Direction, GroupLayout, Region
from tests.device.device_support import GUARD, Pool, only_cuda, plan_of
from tests.device.exporter import Exporter, pattern
from tests.harness import eventually
from tests.marks import processes
from tests.plans import CopyList, owner_of

Result = TypeVar("Result")
MIB = 1 << 20
SIZE = 4 * MIB
TIMEOUT = 60.0


def in_thread(function: Callable[[], Result]) -> Result:
    """Run in a thread that has never used the device: there, CUDA has no current context."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(TIMEOUT)
    return results[0]


def is_mapped(memory: DeviceMemory, kind: str) -> bool:
    if kind == "host":
        first = f"{memory.address:x}-"
        lines = Path("/proc/self/maps").read_text().splitlines()
        return any(line.startswith(first) and " ---p " not in line for line in lines)
    from kvsidecar.errors import NotExportable
    from kvsidecar.support import cuda_driver

    try:
        return cuda_driver.address_range(memory.address)[0] == memory.address
    except NotExportable:
        return False


class Copies:
    """One direction of a device, driven by this thread as a copier's thread does."""

    def __init__(self, device: Device, direction: Direction, pool: Pool, chunk: int | None = None) -> None:
        self._stream = device.open_stream(direction)
        self._ends: dict[int, CopyResult | CopyFailed] = {}
        self._queue = CopyQueue(self._stream, direction, pool.address, lambda copy, end: self._ended(copy.number, end))
        self._queue.pace = chunk
        self._submitted = 0

    def _ended(self, number: int, end: CopyResult | CopyFailed) -> None:
        self._ends[number] = end

    def submit(self, plan: CopyPlan) -> int:
        self._submitted += 1
        self._queue.submit(QueuedCopy(self._submitted, plan))
        return self._submitted

    def result(self, number: int) -> CopyResult:
        deadline = time.monotonic() + TIMEOUT
        while number not in self._ends:
            assert time.monotonic() < deadline
            if not self._queue.step():
                time.sleep(self._queue.wait() or 0.0)
        end = self._ends[number]
        if isinstance(end, CopyFailed):
            raise end
        return end

    def run(self, plan: CopyPlan) -> CopyResult:
        return self.result(self.submit(plan))

    def close(self) -> None:
        assert self._stream.is_done()
        self._stream.close()


def copy(device: Device, direction: Direction, pool: Pool, plan: CopyPlan, chunk: int | None = None) -> None:
    copies = Copies(device, direction, pool, chunk)
    assert copies.run(plan).nbytes == plan.nbytes
    copies.close()


# -- platform ----------------------------------------------------------------------------------------------------


def test_devices(platform: Platform, kind: str) -> None:
    uuids = platform.device_uuids()
    assert uuids
    assert len(set(uuids)) == len(uuids)
    assert all(uuid == "host" if kind == "host" else uuid.startswith("GPU-") for uuid in uuids)
    device = platform.device(uuids[0])
    assert device is platform.device(uuids[0])
    assert device.uuid == uuids[0]
    node = platform.numa_node(uuids[0])
    assert node is None or Path(f"/sys/devices/system/node/node{node}").exists()
    with pytest.raises(DeviceNotFound, match=f"GPU-none is not visible.*{uuids[0]}"):
        platform.device("GPU-none")


def test_pin_and_unpin(platform: Platform, kind: str) -> None:
    def locked_kib() -> int:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmLck:"))

    before = locked_kib()
    pools = [Pool(platform, MIB), Pool(platform, MIB)]
    if kind == "host":  # NVIDIA's driver pins without counting
        assert locked_kib() == before + 2048
    for pool in pools:
        pool.close()
    assert locked_kib() == before
    again = Pool(platform, MIB)
    again.close()


# -- import ------------------------------------------------------------------------------------------------------


@processes
def test_import_from_another_process(device: Device, kind: str) -> None:
    with Exporter(kind, SIZE, 2 * MIB) as exporter:
        assert exporter.device == device.uuid
        first = device.import_memory(exporter.source(0))
        second = in_thread(lambda: device.import_memory(exporter.source(1)))
        assert (first.nbytes, second.nbytes) == (SIZE, 2 * MIB)  # what the system says, to the byte
        assert first.key != second.key
        assert first.address + first.nbytes <= second.address or second.address + second.nbytes <= first.address
        in_thread(lambda: device.release_memory(first))
        device.release_memory(second)
        assert not is_mapped(first, kind)
        assert not is_mapped(second, kind)


@processes
def test_an_allocation_is_mapped_once_and_until_its_last_release(device: Device, kind: str) -> None:
    with Exporter(kind, SIZE) as exporter:
        memory = device.import_memory(exporter.source())
        again = device.import_memory(exporter.source())
        assert again == memory
        device.release_memory(again)
        assert is_mapped(memory, kind)
        device.release_memory(memory)
        assert not is_mapped(memory, kind)
        with pytest.raises(ValueError, match="not mapped"):
            device.release_memory(memory)
        fresh = device.import_memory(exporter.source())
        assert is_mapped(fresh, kind)
        device.release_memory(fresh)


@processes
def test_the_key_does_not_hold_the_handle(device: Device, kind: str) -> None:
    """A handle is a bearer secret, and keys get into logs."""
    with Exporter(kind, SIZE) as exporter:
        memory = device.import_memory(exporter.source())
        assert not exporter.handles or exporter.handles[0][:16] not in repr(memory).encode()
        assert len(memory.key) == 16
        device.release_memory(memory)


@processes
def test_garbage_is_refused_and_harms_nothing(device: Device, kind: str, pool: Pool) -> None:
    garbage: list[MemfdSource | CudaIpcSource] = [CudaIpcSource(b"short"), CudaIpcSource(b"\0" * 64)]
    garbage += [CudaIpcSource(b"\xff" * 64), CudaIpcSource(os.urandom(64)), MemfdSource(1 << 20)]
    with open(__file__, "rb") as file:
        garbage.append(MemfdSource(file.fileno()))
        for source in garbage:
            with pytest.raises(ImportRefused) as refusal:
                device.import_memory(source)
            assert len(str(refusal.value)) > 30  # it says something
    with Exporter(kind, SIZE) as exporter:
        memory = device.import_memory(exporter.source())
        copy(device, Direction.STORE, pool, plan_of((memory.address, 0, 0, SIZE, 1)))
        device.release_memory(memory)
    assert np.array_equal(pool.bytes[:SIZE], pattern(1, SIZE))


@processes
def test_ranges_are_mapped_at_a_constant_distance(device: Device, kind: str) -> None:
    sizes = SIZE, 6 * MIB, SIZE
    with Exporter(kind, *sizes, ranges=2) as exporter:
        memories = in_thread(lambda: device.import_ranges(exporter.range_sources()))
        first, second, third = (memory.address for memory in memories)
        assert third - second == second - first >= max(sizes)
        assert [memory.nbytes for memory in memories] == list(sizes)
        assert len({memory.key for memory in memories}) == 3
        assert len({memory.reservation for memory in memories} - {0}) == 1
        again = device.import_ranges(exporter.range_sources()[:1])  # a mapping of its own
        for memory in (memories[1], again[0], memories[0], memories[2]):
            assert is_mapped(memory, kind)
            device.release_memory(memory)
            assert not is_mapped(memory, kind)
        with pytest.raises(ValueError, match="not mapped"):
            device.release_memory(memories[0])


@processes
def test_one_pitched_copy_crosses_the_ranges_of_an_import(device: Device, kind: str, pool: Pool) -> None:
    """Layers in allocations of their own, several ranges each: a block is one pitched copy, in both directions."""
    layers, blocks, row = 8, 256, 16 << 10
    regions = tuple(Region(index, 0, row, row, row, 1) for index in range(layers))
    layout = GroupLayout(group=0, num_blocks=blocks, shard=0, num_shards=1, regions=regions)
    with Exporter(kind, *[blocks * row] * layers, ranges=2) as exporter:
        memories = device.import_ranges(exporter.range_sources())
        bound = bind(layout, [each.address for each in memories], reservations=[each.reservation for each in memories])
        ids = np.array([255, 3, 128, 127], np.int64)  # the second range begins with block 128
        slots = np.arange(len(ids)) * layout.shard_bytes
        plan = BlockCopies([(bound, ids, slots)], boundary=pool.nbytes)
        assert [each for call in plan.take(None) for each in call.copies["num_rows"].tolist()] == [layers] * len(ids)
        plan.rewind()
        copy(device, Direction.STORE, pool, plan)
        contents = [pattern(1 + index, blocks * row).reshape(blocks, row) for index in range(layers)]
        want = np.concatenate([content[block] for block in ids for content in contents])
        assert np.array_equal(pool.bytes[: len(want)], want)
        pool.bytes[: len(want)] = pattern(9, len(want))
        plan.rewind()
        copy(device, Direction.LOAD, pool, plan)
        for index, content in enumerate(contents):
            content[ids] = pattern(9, len(want)).reshape(len(ids), layers, row)[:, index]
            assert np.array_equal(exporter.read(index), content.reshape(-1))
        for memory in memories:
            device.release_memory(memory)


@processes
def test_ranges_of_another_size_are_refused_and_nothing_stays_mapped(device: Device, kind: str) -> None:
    with Exporter(kind, SIZE, SIZE, ranges=2) as exporter:
        first, second = exporter.range_sources()
        for wrong in (SIZE // 4, SIZE):
            fd, _ = second.ranges[1]
            with pytest.raises(ImportRefused, match="all of it"):
                device.import_ranges([first, RangesSource((second.ranges[0], (fd, wrong)))])
        with open(__file__, "rb") as file, pytest.raises(ImportRefused):
            device.import_ranges([first, RangesSource(((file.fileno(), SIZE),))])
        free = exporter.free_bytes()
        exporter.sleep()
        for fd in exporter.fds:
            os.close(fd)
        exporter.fds.clear()
        if kind == "cuda":
            eventually(lambda: exporter.free_bytes() >= free + 2 * SIZE)


@only_cuda
@pytest.mark.alone  # the free memory is that of the whole GPU
def test_ranges_of_a_sleeping_process_are_free_after_the_release(device: Device, kind: str) -> None:
    with Exporter(kind, 64 * MIB, 64 * MIB, ranges=3) as exporter:
        memories = device.import_ranges(exporter.range_sources())
        for fd in exporter.fds:
            os.close(fd)
        exporter.fds.clear()
        free = exporter.free_bytes()
        exporter.sleep()
        assert exporter.free_bytes() == free  # held by the import
        for memory in memories:
            device.release_memory(memory)
        assert exporter.free_bytes() == free + 128 * MIB


@only_cuda
def test_the_handle_of_a_dead_process_is_refused(device: Device, kind: str) -> None:
    """(A memfd lives as long as a descriptor of it does.)"""
    with Exporter(kind, SIZE) as exporter:
        source = exporter.source()
        exporter.kill()
        with pytest.raises(ImportRefused, match="does not open"):
            device.import_memory(source)


def test_own_memory(device: Device, pool: Pool) -> None:
    one, two = device.allocate(2 * MIB), in_thread(lambda: device.allocate(2 * MIB))
    assert one.key != two.key
    pool.bytes[: 2 * MIB] = pattern(5, 2 * MIB)
    copy(device, Direction.LOAD, pool, plan_of((one.address, 0, 0, 2 * MIB, 1)))
    copy(device, Direction.STORE, pool, plan_of((one.address, 0, 4 * MIB, 2 * MIB, 1)))
    assert np.array_equal(pool.bytes[4 * MIB : 6 * MIB], pattern(5, 2 * MIB))
    device.release_memory(one)
    device.release_memory(two)


# -- copies ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    name: str
    regions: tuple[Region, ...]
    num_blocks: int
    allocations: tuple[int, ...]


def _shapes() -> list[Shape]:
    layers, blocks, row = 8, 48, 3 * 1024 + 8
    return [
        Shape("layer_stacked", (Region(0, 512, blocks * row, row, row, layers),), blocks, (SIZE,)),
        Shape("block_contiguous", (Region(0, 0, row, layers * row, row, layers),), blocks, (SIZE,)),
        Shape(
            "blocks_outermost_with_gaps", (Region(0, 64, row + 24, layers * (row + 24), row, layers),), blocks, (SIZE,)
        ),
        Shape(
            "per_layer", tuple(Region(i, i * 8, blocks * row, row, row, 2) for i in range(4)), blocks, (2 * MIB,) * 4
        ),
        Shape(
            "two_widths_interleaved",
            (Region(0, 0, 0, 2 * row, row, 1), Region(0, row, 0, 2 * row, row // 2, 1)),
            blocks,
            (2 * MIB,),
        ),
    ]


def expected(shape: Shape, block: int, contents: list[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """One slot's content, by the definition in `Region`."""
    rows = []
    for region in shape.regions:
        for row in range(region.num_rows):
            first = region.offset + row * region.row_stride + block * region.block_stride
            rows.append(contents[region.allocation][first : first + region.row_bytes])
    return np.concatenate(rows)


SMALL: dict[str, Any] = {"LEAD_BYTES": 1, "SLICE_BYTES": 400 << 10, "CALL_BYTES": 100 << 10}
METHODS: dict[str, tuple[dict[str, Any], int | None]] = {
    "default": ({}, None),
    "pieces": (SMALL | {"PIECE_ISSUE_US": 0.0, "PITCHED_US": 1e9}, None),
    "pitched": (SMALL | {"PITCHED_US": -1e9}, None),
    "paced": (SMALL, 10_000),
}
"""What makes the plan choose each kind of copy although the blocks are few, and the chunk."""


@pytest.mark.parametrize("shape", _shapes(), ids=lambda shape: shape.name)
@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("method", METHODS)
@processes
def test_store_and_load_move_the_blocks_and_nothing_else(
    device: Device, kind: str, pool: Pool, shape: Shape, seed: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants, chunk = METHODS[method]
    for name, value in constants.items():
        monkeypatch.setattr(owner_of(name), name, value)
    rng = np.random.default_rng(seed)
    layout = GroupLayout(group=0, num_blocks=shape.num_blocks, shard=0, num_shards=1, regions=shape.regions)
    # Slots apart, so that guard bytes lie between them; for the second seed side by side, so that copies merge.
    slot = layout.shard_bytes + (64 if seed == 11 else 0)
    count = min(shape.num_blocks, pool.nbytes // slot) // 2
    ids = rng.permutation(shape.num_blocks)[:count].astype(np.int64)
    places = rng.permutation(pool.nbytes // slot)[:count]
    if seed == 12:
        ids, places = np.sort(ids), np.arange(count)
    slots = (places * slot).astype(np.int64)
    with Exporter(kind, *shape.allocations, seed=seed) as exporter:
        memories = [device.import_memory(exporter.source(i)) for i in range(len(shape.allocations))]
        list(checking_regions(layout, [memory.nbytes for memory in memories]))
        bound = bind(layout, [memory.address for memory in memories])
        before = [pattern(seed + i, nbytes) for i, nbytes in enumerate(shape.allocations)]
        copy(device, Direction.STORE, pool, BlockCopies([(bound, ids, slots)], boundary=1 << 20), chunk)
        want = np.full(pool.nbytes, GUARD, np.uint8)
        for block, at in zip(ids, slots, strict=True):
            want[at : at + layout.shard_bytes] = expected(shape, int(block), before)
        assert np.array_equal(pool.bytes, want)
        for index, content in enumerate(before):
            assert np.array_equal(exporter.read(index), content)  # a store writes nothing to the device

        # Load other content into other blocks.
        pool.bytes[:] = pattern(seed + 100, pool.nbytes)
        kept = pool.bytes.copy()
        ids = rng.permutation(shape.num_blocks)[:count].astype(np.int64)
        copy(device, Direction.LOAD, pool, BlockCopies([(bound, ids, slots)], boundary=1 << 20), chunk)
        after = [content.copy() for content in before]
        for block, at in zip(ids, slots, strict=True):
            _scatter(shape, int(block), after, pool.bytes[at : at + layout.shard_bytes])
        for index, content in enumerate(after):
            assert np.array_equal(exporter.read(index), content)
        assert np.array_equal(pool.bytes, kept)
        for memory in memories:
            device.release_memory(memory)


def _scatter(shape: Shape, block: int, contents: list[npt.NDArray[np.uint8]], slot: npt.NDArray[np.uint8]) -> None:
    at = 0
    for region in shape.regions:
        for row in range(region.num_rows):
            first = region.offset + row * region.row_stride + block * region.block_stride
            contents[region.allocation][first : first + region.row_bytes] = slot[at : at + region.row_bytes]
            at += region.row_bytes


@pytest.mark.parametrize("method", ["pieces", "pitched"])
def test_fifty_thousand_copies_in_one_job(
    device: Device, platform: Platform, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 51,828 copies in one call hung a peer's driver; the calls of a plan are bounded."""
    for name, value in METHODS[method][0].items():
        monkeypatch.setattr(owner_of(name), name, value)
    rows, blocks, row = 84, 617, 128  # less than the 8 MiB that a user may lock
    memory = device.allocate(rows * blocks * row)
    big = Pool(platform, rows * blocks * row)
    layout = GroupLayout(0, blocks, 0, 1, (Region(0, 0, blocks * row, row, row, rows),))
    content = pattern(3, rows * blocks * row).reshape(rows, blocks, row)
    big.bytes[: content.size] = content.transpose(1, 0, 2).ravel()
    ids = np.arange(blocks, dtype=np.int64)
    bound = bind(layout, [memory.address])
    copy(device, Direction.LOAD, big, BlockCopies([(bound, ids, ids * (rows * row))], boundary=1 << 40))
    big.bytes[:] = GUARD
    shuffled = np.random.default_rng(3).permutation(ids)
    copy(device, Direction.STORE, big, BlockCopies([(bound, shuffled, ids * (rows * row))], boundary=1 << 40))
    assert np.array_equal(big.bytes[: content.size], content[:, shuffled].transpose(1, 0, 2).ravel())
    big.close()
    device.release_memory(memory)


class Slow:
    """A plan of several slices, each of which takes its time to be planned."""

    def __init__(self, *slices: CopyList) -> None:
        self.nbytes = sum(each.nbytes for each in slices)
        self.took = 0.0
        self._slices = list(slices)

    def take(self, chunk: int | None) -> Sequence[CopyCall]:
        if not self._slices:
            return []
        began = time.monotonic()
        time.sleep(0.05)
        self.took += time.monotonic() - began
        return self._slices.pop(0).take(chunk)


@pytest.mark.parametrize("chunk", [None, 1 << 20])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.alone
def test_the_time_of_a_copy_is_the_devices_alone(
    device: Device, pool: Pool, direction: Direction, chunk: int | None
) -> None:
    """Planning is not in it, neither before the first call nor between two: that is shown as waiting."""
    memory = device.allocate(8 * MIB)
    copies = Copies(device, direction, pool, chunk)
    run = copies.run

    def part(nbytes: int, at: int = 0) -> CopyList:
        return plan_of((memory.address + at, 0, at, nbytes, 1))

    slow, small, big = [], [], []
    for _ in range(7):  # of each the best: others use this machine, too
        planned = Slow(part(64), part(64, MIB), part(64, 2 * MIB))
        result = run(planned)
        assert result.queue_seconds >= 0.9 * planned.took
        slow.append(result.copy_seconds / planned.took)
        small.append(run(part(64)).copy_seconds)
        big.append(run(part(4 * MIB)).copy_seconds)
    assert 0 < min(slow) < 0.1
    assert 0 < min(small) <= min(big)
    copies.close()
    device.release_memory(memory)


def test_many_plans_in_order(device: Device, pool: Pool) -> None:
    """Loads are first in, first out: of many that write the same bytes the last one wins."""
    memory = device.allocate(2 * MIB)
    copies = Copies(device, Direction.LOAD, pool)
    for index in range(100):
        pool.bytes[index * 4096 : (index + 1) * 4096] = index
    numbers = [copies.submit(plan_of((memory.address, 0, index * 4096, 4096, 1))) for index in range(100)]
    results = [copies.result(number) for number in numbers]
    assert all(result.copy_seconds > 0 and result.queue_seconds >= 0 for result in results)
    copies.close()
    copy(device, Direction.STORE, pool, plan_of((memory.address, 0, MIB, 4096, 1)))
    assert (pool.bytes[MIB : MIB + 4096] == 99).all()
    device.release_memory(memory)


# -- engines die -------------------------------------------------------------------------------------------------


@processes
def test_memory_of_a_killed_engine_is_usable_until_released_and_free_after(
    device: Device, kind: str, pool: Pool
) -> None:
    size = 256 * MIB if kind == "cuda" else SIZE
    with Exporter(kind) as watcher, Exporter(kind, size) as engine:
        memory = device.import_memory(engine.source())
        engine.kill()
        copy(device, Direction.STORE, pool, plan_of((memory.address, 0, 0, SIZE, 1)))
        assert np.array_equal(pool.bytes[:SIZE], pattern(1, size)[:SIZE])
        free = watcher.free_bytes()
        device.release_memory(memory)
        assert not is_mapped(memory, kind)
        if kind == "cuda":
            eventually(lambda: watcher.free_bytes() >= free + size, "the memory of the dead engine is free")


# -- only a GPU has these ----------------------------------------------------------------------------------------


@only_cuda
def test_a_refused_piece_fails_its_job_and_not_the_device(device: Device, pool: Pool) -> None:
    memory = device.allocate(2 * MIB)
    copies = Copies(device, Direction.STORE, pool)
    # Beyond its allocation. (An address that is none at all would be taken for one of the host's.)
    good, bad = (memory.address, 0, 0, 4096, 1), (memory.address, 0, 4096, 4 * MIB, 1)
    for plan in (plan_of(bad), plan_of(good, bad), plan_of(good, (memory.address, 2 * MIB, 0, 4096, 2))):
        with pytest.raises(CopyFailed, match="CUDA_ERROR_INVALID_VALUE") as failure:
            copies.run(plan)
        assert failure.value.outcome_known
    assert copies.run(plan_of(good)).nbytes == 4096
    copies.close()
    device.release_memory(memory)


@only_cuda
def test_rows_farther_apart_than_the_driver_takes(device: Device, pool: Pool) -> None:
    """Layers of a large KV cache lie more than 2 GiB apart, beyond the largest pitch of a single 2D copy."""
    pitch = (1 << 31) + 4096
    memory = device.allocate(2 * pitch + MIB)
    pool.bytes[: 3 * MIB] = pattern(9, 3 * MIB)
    copy(device, Direction.LOAD, pool, plan_of((memory.address, pitch, 0, MIB, 3)))
    copy(device, Direction.STORE, pool, plan_of((memory.address + pitch, 0, 4 * MIB, MIB, 1)))
    assert np.array_equal(pool.bytes[4 * MIB : 5 * MIB], pattern(9, 3 * MIB)[MIB : 2 * MIB])
    copy(device, Direction.STORE, pool, plan_of((memory.address, pitch, 4 * MIB, MIB, 3)))
    assert np.array_equal(pool.bytes[4 * MIB : 7 * MIB], pattern(9, 3 * MIB))
    device.release_memory(memory)


CONTEXT = """
from kvsidecar.device.platforms import open_platform
platform, _ = open_platform("cuda")
platform.device(platform.device_uuids()[0])
print("open", flush=True)
input()
"""


@only_cuda
@pytest.mark.alone  # the free memory is that of the whole GPU
def test_a_context_is_small(device: Device) -> None:
    """527 MiB by default on an H200, 267 MiB with the limits that `CudaDevice` sets."""
    root = str(Path(kvsidecar.__file__).parents[1])
    with Exporter("cuda") as watcher:
        before = watcher.free_bytes()
        command = [sys.executable, "-c", CONTEXT]
        pipe = subprocess.PIPE
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            used = before - watcher.free_bytes()
            process.communicate("\n")
    print(f"a context takes {used / MIB:.0f} MiB")
    assert used < 400 * MIB
