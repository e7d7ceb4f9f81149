"""Copies without any RPC, in this process: each way the driver offers (``driver``), and vLLM's own path (``vllm``).

    python -m benchmarks.peers.in_process driver|vllm --rows FILE --repeat N

``driver`` is the ceiling of each copy method: the arguments are built before the clock starts, and the host memory is
one pinned pool whose slots hold all rows of a block, as kvsidecar's. ``vllm`` is what vLLM's SimpleCPUOffloadConnector
does for one job: pinned memory per layer, arrays built from the block ids (inside the clock, as there), then one
``cuMemcpyBatchAsync``, layer after layer (vllm/v1/simple_kv_offload/cuda_mem_ops.py, copy_blocks).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import numpy as np

from benchmarks.peers import copies
from benchmarks.peers.copies import Addresses
from benchmarks.peers.cuda import CUDA_ERRORS, Gpu, opened_gpu
from benchmarks.peers.report import Transfer
from benchmarks.peers.shapes import BLOCKS, BOTH, DEPTH, Direction, Order, Shape
from benchmarks.peers.timing import Timing, measure
from benchmarks.peers.worker import Rows, Settings, settings_from

WATCHED: Final = 128
"""Blocks whose every byte is compared; half of them are stored and loaded."""
POISON: Final = 0xA5


class Memory:
    """The engine's KV on the GPU, and pinned memory for as many blocks on the host, in both arrangements.

    Attributes:
        device_rows: address of block 0 in each row.
        host: the pool: slots of all rows one behind the other. 0 with ``per_layer``.
        host_rows: with ``per_layer``, address of slot 0 in each row. K and V of a layer are one allocation.
    """

    def __init__(self, gpu: Gpu, shape: Shape, *, per_layer: bool) -> None:
        self._held = ExitStack()
        plane = BLOCKS * shape.row_bytes
        layer = plane * shape.planes

        def device(nbytes: int) -> int:
            address = gpu.alloc(nbytes)
            self._held.callback(gpu.free, address)
            return address

        def host(nbytes: int) -> int:
            pinned = gpu.pinned(nbytes)
            self._held.callback(pinned.close)
            return pinned.address

        def rows(bases: list[int]) -> Addresses:
            return np.array([base + index * plane for base in bases for index in range(shape.planes)], np.uint64)

        try:
            if shape.separate:
                self.device_rows = rows([device(layer) for _ in range(shape.layers)])
            else:
                base = device(plane * shape.rows)
                self.device_rows = rows([base + index * layer for index in range(shape.layers)])
            self.host = 0 if per_layer else host(plane * shape.rows)
            self.host_rows = rows([host(layer) for _ in range(shape.layers)]) if per_layer else np.empty(0, np.uint64)
        except CUDA_ERRORS:
            self._held.close()
            raise

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()


class Method(ABC):
    """One way to copy the blocks ``ids`` of the GPU to the slots ``slots`` of the host, or back."""

    system = "driver"
    variant = ""
    per_layer = False

    def __init__(self, gpu: Gpu, shape: Shape, memory: Memory) -> None:
        self.gpu, self.shape, self.memory = gpu, shape, memory

    @abstractmethod
    def prepare(self, direction: Direction, ids: Addresses, slots: Addresses) -> Callable[[], None]:
        """What may be done before the clock starts; the result issues the copies of the job."""


class Batch(Method):
    """One ``cuMemcpyBatchAsync`` of rows."""

    variant = "batch"

    def prepare(self, direction: Direction, ids: Addresses, slots: Addresses) -> Callable[[], None]:
        pieces = copies.slot_pieces(self.shape, self.memory.device_rows, self.memory.host, ids, slots)
        return _batch(self.gpu, direction, pieces)


class Each2D(Method):
    """One ``cuMemcpy2DAsync`` per block, or per row and run of blocks; the loop over them is Python's."""

    variant = "2d"

    def prepare(self, direction: Direction, ids: Addresses, slots: Addresses) -> Callable[[], None]:
        plan = copies.pitched(self.shape, self.memory.device_rows, self.memory.host, ids, slots)
        array = copies.copies_2d(plan, direction)
        return lambda: self.gpu.each_2d(array)


class Batch3D(Method):
    """The same pitched copies in one ``cuMemcpy3DBatchAsync``."""

    variant = "3d-batch"

    def prepare(self, direction: Direction, ids: Addresses, slots: Addresses) -> Callable[[], None]:
        plan = copies.pitched(self.shape, self.memory.device_rows, self.memory.host, ids, slots)
        array = copies.copies_3d(plan, direction)
        return lambda: self.gpu.batch_3d(array)


class Vllm(Method):
    """vLLM's own: the arrays are built inside the clock."""

    system = "vllm"
    per_layer = True

    def prepare(self, direction: Direction, ids: Addresses, slots: Addresses) -> Callable[[], None]:
        block_ids, host_ids = ids.tolist(), slots.tolist()
        memory, row_bytes = self.memory, self.shape.row_bytes

        def issue() -> None:
            on_gpu, on_host = np.array(block_ids, np.uint64), np.array(host_ids, np.uint64)
            pieces = copies.layer_pieces(memory.device_rows, memory.host_rows, row_bytes, on_gpu, on_host)
            _batch(self.gpu, direction, pieces)()

        return issue


METHODS: Final[dict[str, tuple[type[Method], ...]]] = {"driver": (Batch, Each2D, Batch3D), "vllm": (Vllm,)}


def _batch(gpu: Gpu, direction: Direction, pieces: copies.Pieces) -> Callable[[], None]:
    attributes = copies.attributes(direction)
    if direction == "store":
        return lambda: gpu.batch(pieces.host, pieces.device, pieces.sizes, attributes)
    return lambda: gpu.batch(pieces.device, pieces.host, pieces.sizes, attributes)


def choose(rng: np.random.Generator, order: Order, count: int, among: int) -> Addresses:
    """``count`` different ids below ``among``."""
    if order == "random":
        return rng.permutation(among)[:count].astype(np.uint64)
    first = int(rng.integers(among - count + 1))
    return np.arange(first, first + count, dtype=np.uint64)


def verified(method: Method, order: Order, rng: np.random.Generator) -> bool:
    """Store, poison the GPU, load: loaded blocks must be what they were, byte for byte, and all others poison."""
    gpu, shape, rows = method.gpu, method.shape, method.memory.device_rows
    ids = choose(rng, order, WATCHED // 2, WATCHED)
    slots = choose(rng, order, WATCHED // 2, BLOCKS)
    words = WATCHED * shape.row_bytes // 8
    salt = int(rng.integers(1 << 62))

    def content(row: int) -> Addresses:  # each word of all rows is another one, and in each trial
        return np.arange(words, dtype=np.uint64) + np.uint64(salt + row * words)

    for row, address in enumerate(rows.tolist()):
        gpu.copy_to_device(address, content(row))
    method.prepare("store", ids, slots)()
    gpu.work.synchronize()
    for address in rows.tolist():
        gpu.memset(address, POISON, words * 8)
    method.prepare("load", ids, slots)()
    gpu.work.synchronize()
    for row, address in enumerate(rows.tolist()):
        expected = np.full((WATCHED, shape.row_bytes), POISON, np.uint8)
        expected[ids] = content(row).view(np.uint8).reshape(WATCHED, -1)[ids]
        if not np.array_equal(gpu.read(address, words * 8), expected.ravel()):
            return False
    return True


def timed(
    method: Method, direction: Direction, order: Order, rng: np.random.Generator, *, blocks: int, jobs: int, depth: int
) -> Timing:
    """Times of ``jobs`` jobs of ``blocks`` blocks each, after one to warm up. Every job has ids of its own."""
    gpu = method.gpu

    def prepared() -> Callable[[], None]:
        return method.prepare(direction, choose(rng, order, blocks, BLOCKS), choose(rng, order, blocks, BLOCKS))

    prepared()()
    gpu.work.synchronize()
    issue = [prepared() for _ in range(jobs)]
    events = [gpu.event() for _ in range(depth)]

    def submit(job: int) -> object:
        issue[job]()
        gpu.record(events[job % depth])
        return events[job % depth]

    try:
        return measure(jobs, depth, submit, gpu.wait)
    finally:
        for event in events:
            gpu.destroy(event)


def rows_of(method: Method, settings: Settings, order: Order) -> Iterator[Transfer]:
    """All rows of one method on one layout."""
    rng = np.random.default_rng(1)
    right = verified(method, order, rng)
    depths = [(size, 1) for size in settings.sizes] + [(size, DEPTH) for size in settings.deep_sizes]
    for blocks, depth in depths:
        for direction in BOTH:
            jobs = settings.repeat * depth
            timing = timed(method, direction, order, rng, blocks=blocks, jobs=jobs, depth=depth)
            yield Transfer(
                method.system,
                method.shape.name,
                blocks,
                depth,
                direction,
                gbps=timing.gbps(blocks * method.shape.block_bytes),
                ms_p50=timing.ms_p50,
                variant=method.variant,
                ids=order,
                verified=right,
            )


def measure_layout(gpu: Gpu, system: str, shape: Shape, settings: Settings, rows: Rows) -> None:
    """All methods of a system on one layout. A method that the driver refuses does not keep the next from its turn."""
    kinds = METHODS[system]
    orders: tuple[Order, ...] = ("random", "consecutive") if shape.separate else ("random",)
    with Memory(gpu, shape, per_layer=kinds[0].per_layer) as memory:
        for kind in kinds:
            for order in orders:
                try:
                    for row in rows_of(kind(gpu, shape, memory), settings, order):
                        rows.add(row)
                except CUDA_ERRORS as error:
                    rows.refuse(f"{system} {kind.variant}".strip(), f"{shape.name}, {order} ids: {error}")


def main(system: str, settings: Settings) -> None:
    with Rows(settings.rows) as rows:
        try:
            with opened_gpu() as gpu:
                rows.add_limits(system, gpu.bulk_gbps)
                for shape in settings.shapes:
                    measure_layout(gpu, system, shape, settings, rows)
        except CUDA_ERRORS as error:
            rows.refuse(system, error)


if __name__ == "__main__":
    main(sys.argv[1], settings_from(sys.argv[2:]))
