"""The copies of `driver` and `vllm`, on a GPU that is ordinary memory."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.peers import copies, in_process
from benchmarks.peers.cuda import CudaError
from benchmarks.peers.shapes import BLOCKS, Shape
from benchmarks.peers.worker import Rows, Settings

STACKED = Shape("stacked", rows=4, row_bytes=8, planes=2)
SEPARATE = Shape("separate", rows=4, row_bytes=8, separate=True)
ONE_ROW = Shape("contiguous", rows=1, row_bytes=16)
SHAPES = (STACKED, SEPARATE, ONE_ROW)
METHODS = [kind for kinds in in_process.METHODS.values() for kind in kinds]


class MemoryGpu:
    """What `in_process` asks of a GPU, with `ctypes.memmove` for its copy engines and plain memory on both sides."""

    def __init__(self):
        self.held = {}
        self.events = set()

    def alloc(self, nbytes):
        buffer = ctypes.create_string_buffer(nbytes)
        address = ctypes.addressof(buffer)
        self.held[address] = buffer
        return address

    def free(self, address):
        del self.held[address]

    alloc_host, free_host = alloc, free

    def fill(self, address, value, nbytes):
        ctypes.memset(address, value, nbytes)

    def write(self, address, data):
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def read(self, address, nbytes):
        return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)

    def batch(self, targets, sources, sizes, attributes):
        assert attributes["order"] in (copies.SOURCE_IN_STREAM_ORDER, copies.SOURCE_IN_ANY_ORDER)
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    def batch_3d(self, array):
        for one in array:
            self._rows(one, int(one["source"]), int(one["source_row"]), int(one["target"]), int(one["target_row"]))

    def each_2d(self, array):
        for one in array:
            source = int(one["source_device"]) or int(one["source_host"])
            target = int(one["target_device"]) or int(one["target_host"])
            self._rows(one, source, int(one["source_pitch"]), target, int(one["target_pitch"]))

    @staticmethod
    def _rows(one, source, source_pitch, target, target_pitch):
        for row in range(int(one["height"])):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, int(one["width"]))

    def event(self):
        event = object()
        self.events.add(event)
        return event

    def record(self, event):
        assert event in self.events

    wait = record

    def destroy(self, event):
        self.events.remove(event)

    def drain(self):
        pass


def method_on(kind, shape):
    gpu = MemoryGpu()
    return kind(gpu, shape, in_process.Memory(gpu, shape, per_layer=kind.per_layer))


@pytest.mark.parametrize("order", ["random", "consecutive"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_every_method_brings_every_byte_back(kind, shape, order):
    assert in_process.verified(method_on(kind, shape), order, np.random.default_rng(3))


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("wrong", ["nothing is loaded", "nothing is stored", "one block too many"])
def test_a_copy_that_does_not_do_its_work_is_seen(kind, wrong):
    class Wrong(kind):  # type: ignore[valid-type]
        def prepare(self, direction, ids, slots):
            if (wrong, direction) in (("nothing is loaded", "load"), ("nothing is stored", "store")):
                return lambda: None
            if wrong == "one block too many":
                absent = np.setdiff1d(np.arange(in_process.WATCHED, dtype=np.uint64), ids)[:1]
                return super().prepare(direction, np.append(ids, absent), np.append(slots, np.uint64(0)))
            return super().prepare(direction, ids, slots)

    assert not in_process.verified(method_on(Wrong, STACKED), "random", np.random.default_rng(3))


def test_ids_are_different_and_in_range_and_consecutive_ones_follow_each_other():
    rng = np.random.default_rng(0)
    for count in (1, 7, BLOCKS):
        for order in ("random", "consecutive"):
            ids = in_process.choose(rng, order, count, BLOCKS).tolist()
            assert len(set(ids)) == count
            assert all(0 <= one < BLOCKS for one in ids)
            assert order == "random" or ids == list(range(ids[0], ids[0] + count))


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_there_is_a_row_for_each_size_direction_and_depth(kind, tmp_path):
    settings = Settings(tmp_path / "rows", repeat=2, quick=False, shapes=SHAPES)
    method = method_on(kind, STACKED)
    rows = list(in_process.rows_of(method, settings, "random"))
    assert not method.gpu.events
    found = {(row.blocks, row.in_flight, row.direction) for row in rows}
    expected = {(size, 1, way) for size in (1, 8, 64, 512) for way in ("store", "load")}
    expected |= {(size, 4, way) for size in (64, 512) for way in ("store", "load")}
    assert found == expected
    assert all(row.gbps > 0 and row.ms_p50 > 0 and row.verified for row in rows)


def test_memory_is_given_back_also_when_there_is_not_enough():
    class Small(MemoryGpu):
        def alloc(self, nbytes):
            if len(self.held) == 2:
                raise CudaError("CUDA_ERROR_OUT_OF_MEMORY")
            return super().alloc(nbytes)

    gpu = Small()
    with pytest.raises(CudaError):
        in_process.Memory(gpu, SEPARATE, per_layer=True)
    assert not gpu.held
    enough = MemoryGpu()
    with in_process.Memory(enough, SEPARATE, per_layer=True):
        assert len(enough.held) == 8
    assert not enough.held


def test_a_method_that_the_driver_refuses_does_not_keep_the_others_from_their_turn(tmp_path):
    class Old(MemoryGpu):
        def batch_3d(self, array):
            raise CudaError("cuMemcpy3DBatchAsync:\n CUDA_ERROR_NOT_SUPPORTED")

    settings = Settings(tmp_path / "rows", repeat=1, quick=True, shapes=(ONE_ROW,))
    with Rows(settings.rows) as rows:
        in_process.measure_layout(Old(), "driver", replace(ONE_ROW), settings, rows)
    lines = settings.rows.read_text().splitlines()
    assert sum('"Transfer"' in line for line in lines) == 2 * 6
    assert [line for line in lines if "Problem" in line] == [
        '{"kind": "Problem", "system": "driver 3d-batch", '
        '"reason": "contiguous, random ids: cuMemcpy3DBatchAsync: CUDA_ERROR_NOT_SUPPORTED"}'
    ]
