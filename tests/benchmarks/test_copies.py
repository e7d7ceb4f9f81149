"""The arguments of the copies, checked by carrying them out on a memory of numpy bytes."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import copies
from benchmarks.peers.shapes import SHAPES, Shape

BLOCKS = 8
STACKED = Shape("stacked", rows=3, row_bytes=4)
SEPARATE = Shape("separate", rows=4, row_bytes=4, separate=True, planes=2)
ONE_ROW = Shape("contiguous", rows=1, row_bytes=8)

some_blocks = st.permutations(range(BLOCKS)).flatmap(
    lambda order: st.integers(1, BLOCKS).map(lambda count: list(order[:count]))
)


class Memory:
    """A toy address space: the engine's rows below, the pool above. Separate allocations have holes between them."""

    def __init__(self, shape: Shape) -> None:
        plane, hole = BLOCKS * shape.row_bytes, 16 if shape.separate else 0
        layers = [16 + index * (shape.planes * plane + hole) for index in range(shape.layers)]
        self.rows = np.array([base + p * plane for base in layers for p in range(shape.planes)], np.uint64)
        self.allocations = [range(base, base + shape.planes * plane) for base in layers]
        if not shape.separate:
            self.allocations = [range(layers[0], layers[0] + shape.rows * plane)]
        self.host = self.allocations[-1].stop + 16
        self.data = np.random.default_rng(0).integers(0, 256, self.host + BLOCKS * shape.block_bytes, np.uint8)

    def run(self, direction, device, host, width, heights=None, device_pitch=None, host_pitch=None):
        for index in range(len(device)):
            for row in range(int(heights[index]) if heights is not None else 1):
                on_gpu = int(device[index]) + (row * int(device_pitch[index]) if heights is not None else 0)
                on_host = int(host[index]) + (row * int(host_pitch[index]) if heights is not None else 0)
                size = int(width[index])
                source, target = (on_gpu, on_host) if direction == "store" else (on_host, on_gpu)
                self.data[target : target + size] = self.data[source : source + size]


def block(memory: Memory, shape: Shape, block_id: int) -> np.ndarray:
    starts = [int(row) + block_id * shape.row_bytes for row in memory.rows]
    return np.concatenate([memory.data[start : start + shape.row_bytes] for start in starts])


def slot(memory: Memory, shape: Shape, index: int) -> np.ndarray:
    start = memory.host + index * shape.block_bytes
    return memory.data[start : start + shape.block_bytes]


def carry_out(kind, shape, memory, direction, ids, slots):
    if kind == "pieces":
        plan = copies.slot_pieces(shape, memory.rows, memory.host, ids, slots)
        memory.run(direction, plan.device, plan.host, plan.sizes)
    else:
        rows = copies.pitched(shape, memory.rows, memory.host, ids, slots)
        arguments = rows.device, rows.host, rows.width, rows.height, rows.device_pitch, rows.host_pitch
        memory.run(direction, *arguments)


@pytest.mark.parametrize("kind", ["pieces", "pitched"])
@pytest.mark.parametrize("shape", [STACKED, SEPARATE, ONE_ROW], ids=lambda shape: shape.name)
@given(ids=some_blocks, shift=st.integers(0, BLOCKS - 1))
def test_each_block_goes_whole_to_its_slot_and_back(kind, shape, ids, shift):
    memory = Memory(shape)
    slots = [(index + shift) % BLOCKS for index in ids]
    before = memory.data.copy()
    arrays = np.array(ids, np.uint64), np.array(slots, np.uint64)
    carry_out(kind, shape, memory, "store", *arrays)
    assert all(np.array_equal(slot(memory, shape, s), block(memory, shape, i)) for i, s in zip(ids, slots, strict=True))
    assert np.array_equal(memory.data[: memory.host], before[: memory.host])  # a store writes to the host alone
    memory.data[: memory.host] = 0
    carry_out(kind, shape, memory, "load", *arrays)
    expected = np.zeros_like(before)
    for index in ids:
        for row in memory.rows:
            start = int(row) + index * shape.row_bytes
            expected[start : start + shape.row_bytes] = before[start : start + shape.row_bytes]
    assert np.array_equal(memory.data[: memory.host], expected[: memory.host])


@given(ids=some_blocks)
def test_a_pitched_copy_stays_in_one_allocation(ids):
    memory = Memory(SEPARATE)
    array = np.array(ids, np.uint64)
    plan = copies.pitched(SEPARATE, memory.rows, memory.host, array, array)
    for first, pitch, height in zip(plan.device, plan.device_pitch, plan.height, strict=True):
        last = int(first) + int(pitch) * (int(height) - 1) + SEPARATE.row_bytes - 1
        assert any(int(first) in held and last in held for held in memory.allocations)


@given(ids=some_blocks, shift=st.integers(0, BLOCKS - 1))
def test_vllm_copies_layer_after_layer_and_joins_neighbours(ids, shift):
    device, host = np.array([1000, 2000], np.uint64), np.array([5000, 7000], np.uint64)
    slots = [(index + shift) % BLOCKS for index in ids]
    plan = copies.layer_pieces(device, host, 4, np.array(ids, np.uint64), np.array(slots, np.uint64))
    moved = []
    for source, target, size in zip(plan.device.tolist(), plan.host.tolist(), plan.sizes.tolist(), strict=True):
        moved += [(source + step, target + step) for step in range(0, size, 4)]
    assert moved == [
        (base + 4 * i, there + 4 * s)
        for base, there in ((1000, 5000), (2000, 7000))
        for i, s in zip(ids, slots, strict=True)
    ]
    joined = sum((a + 1 == b) and (c + 1 == d) for a, b, c, d in zip(ids, ids[1:], slots, slots[1:], strict=False))
    assert len(plan.sizes) == 2 * (len(ids) - joined)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_random_ids_make_as_many_copies_as_the_readme_says(shape):
    ids = np.array([0, 2, 4, 6], np.uint64)
    rows = np.arange(shape.rows, dtype=np.uint64) * np.uint64(1 << 30)
    assert len(copies.slot_pieces(shape, rows, 0, ids, ids).device) == 4 * shape.rows
    assert len(copies.pitched(shape, rows, 0, ids, ids).device) == 4 * (shape.rows if shape.separate else 1)
    run = np.arange(4, dtype=np.uint64)
    assert len(copies.pitched(replace(shape, separate=True), rows, 0, run, run).device) == shape.rows


PLAN = copies.Pitched(*(np.array([value], np.uint64) for value in (0x1000, 0x2000, 0x300, 0x40, 0x20, 5)))


@pytest.mark.parametrize("direction", ["store", "load"])
def test_the_3d_structure_is_that_of_the_bindings(direction):
    driver = pytest.importorskip("cuda.bindings.driver")
    one = driver.CUDA_MEMCPY3D_BATCH_OP()
    device, host = (one.src, one.dst) if direction == "store" else (one.dst, one.src)
    for operand, address, pitch in ((device, 0x1000, 0x300), (host, 0x2000, 0x40)):
        operand.type = driver.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
        operand.op.ptr.ptr, operand.op.ptr.rowLength, operand.op.ptr.layerHeight = address, pitch, 5
    one.extent.width, one.extent.height, one.extent.depth = 0x20, 5, 1
    orders = driver.CUmemcpySrcAccessOrder
    stream, anyhow = orders.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, orders.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    one.srcAccessOrder = stream if direction == "store" else anyhow
    assert copies.copies_3d(PLAN, direction).tobytes() == ctypes.string_at(one.getPtr(), copies.COPY_3D.itemsize)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_the_2d_structure_is_that_of_the_bindings(direction):
    driver = pytest.importorskip("cuda.bindings.driver")
    one, kinds = driver.CUDA_MEMCPY2D(), driver.CUmemorytype
    if direction == "store":
        one.srcMemoryType, one.srcDevice, one.srcPitch = kinds.CU_MEMORYTYPE_DEVICE, 0x1000, 0x300
        one.dstMemoryType, one.dstHost, one.dstPitch = kinds.CU_MEMORYTYPE_HOST, 0x2000, 0x40
    else:
        one.dstMemoryType, one.dstDevice, one.dstPitch = kinds.CU_MEMORYTYPE_DEVICE, 0x1000, 0x300
        one.srcMemoryType, one.srcHost, one.srcPitch = kinds.CU_MEMORYTYPE_HOST, 0x2000, 0x40
    one.WidthInBytes, one.Height = 0x20, 5
    assert copies.copies_2d(PLAN, direction).tobytes() == ctypes.string_at(one.getPtr(), copies.COPY_2D.itemsize)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_the_attributes_are_those_of_the_bindings(direction):
    driver = pytest.importorskip("cuda.bindings.driver")
    one, orders = driver.CUmemcpyAttributes(), driver.CUmemcpySrcAccessOrder
    stream, anyhow = orders.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, orders.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    one.srcAccessOrder = stream if direction == "store" else anyhow
    assert copies.attributes(direction).tobytes() == ctypes.string_at(one.getPtr(), copies.ATTRIBUTES.itemsize)
