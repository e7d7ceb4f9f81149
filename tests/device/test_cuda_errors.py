"""What `device/cuda/` make of errors that a healthy GPU does not have. Scripted answers, no driver."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda.bindings import driver

from kvsidecar.device.base import CopyCall, CopyMark, CopyStream, CudaIpcSource, DeviceMemory
from kvsidecar.device.cuda import calls as driver_calls
from kvsidecar.device.cuda import platform as cuda
from kvsidecar.device.cuda import status as cuda_status
from kvsidecar.device.cuda import stream as cuda_stream
from kvsidecar.device.cuda.calls import ATTRIBUTES, COPY_2D, OPERATION, SIGNATURES
from kvsidecar.device.cuda.platform import CudaPlatform
from kvsidecar.device.cuda.status import STICKY, check, initialize
from kvsidecar.errors import (
    CopyFailed,
    DeviceError,
    DeviceLost,
    DeviceNotFound,
    DriverUnusable,
    ImportRefused,
    PinFailed,
)
from kvsidecar.types import Direction
from tests.device.device_support import plan_of

OK = driver.CUresult.CUDA_SUCCESS
INVALID = driver.CUresult.CUDA_ERROR_INVALID_VALUE
LOST = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
FIRST, SECOND = (f"GPU-{n:08x}-0000-0000-0000-000000000000" for n in (1, 2))


class Handle:
    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    def __int__(self) -> int:
        return self._ordinal


class Uuid:
    def __init__(self, number: int) -> None:
        self.bytes = number.to_bytes(4, "big") + bytes(12)


class Driver:
    """The functions that `cuda.py` calls; everything works, until a test puts other answers into ``answers``.

    An answer is a tuple, or a list of tuples for one call after another.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answers: dict[str, Any] = {
            "cuGetErrorString": (OK, b"scripted"),
            "cuDriverGetVersion": (OK, 13000),
            "cuDeviceGetCount": (OK, 2),
            "cuDeviceGet": [(OK, Handle(0)), (OK, Handle(1))],
            "cuDeviceGetName": (OK, b"NVIDIA H200\0"),
            "cuDeviceGetUuid": [(OK, Uuid(1)), (OK, Uuid(2))],
            "cuDeviceGetPCIBusId": (OK, b"ffff:ff:00.0\0\0\0"),
            "cuDevicePrimaryCtxRetain": (OK, object()),
            "cuIpcOpenMemHandle": (OK, 4096),
            "cuMemGetAddressRange": (OK, 4096, 1 << 20),
            "cuMemGetInfo": (OK, 1, 2),
            "cuStreamCreate": (OK, 77),
            "cuEventCreate": (OK, Handle(5)),
        }
        self.attributes = {"CU_DEVICE_ATTRIBUTE_COMPUTE_MODE": 0, "CU_DEVICE_ATTRIBUTE_MAX_PITCH": 2**31 - 1}

    def cuDeviceGetAttribute(self, attribute: Any, handle: Any) -> tuple[Any, int]:  # noqa: N802
        return OK, self.attributes[attribute.name]

    def __getattr__(self, name: str) -> Any:
        real = getattr(driver, name)
        if not name.startswith("cu"):
            return real

        def answer(*arguments: Any) -> Any:
            self.calls.append(name)
            script = self.answers.get(name, (OK,))
            if callable(script):
                return script(*arguments)
            return script.pop(0) if isinstance(script, list) else script

        return answer


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Driver:
    scripted = Driver()
    for module in (cuda, cuda_status, cuda_stream):
        monkeypatch.setattr(module, "driver", scripted)
    monkeypatch.setattr(cuda, "mps_runs", lambda: False)
    return scripted


def test_check(scripted: Driver) -> None:
    assert check((OK,), "x") == ()
    assert check((OK, 7), "x") == 7
    assert check((OK, 7, 8), "x") == (7, 8)
    with pytest.raises(DeviceError, match=r"^doing x: CUDA_ERROR_INVALID_VALUE: scripted$"):
        check((INVALID, None), "doing x")
    with pytest.raises(ImportRefused):
        check((INVALID,), "x", ImportRefused)
    with pytest.raises(DeviceLost):
        check((LOST,), "x", ImportRefused)


def test_sticky_names_exist() -> None:
    names = {status.name for status in driver.CUresult}
    assert names >= STICKY


def test_a_driver_that_is_too_old(scripted: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.answers["cuDriverGetVersion"] = (OK, 12020)
    monkeypatch.setattr(cuda_status, "nvidia_module_version", lambda: "535.161.08")
    with pytest.raises(DriverUnusable, match=r"driver 535\.161\.08 \(CUDA 12\.2\) is too old: kvsidecar needs 12\.8"):
        initialize()


def test_a_driver_that_does_not_start(scripted: Driver) -> None:
    scripted.answers["cuInit"] = (driver.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,)
    with pytest.raises(DriverUnusable, match="does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"):
        initialize()
    scripted.answers["cuInit"] = (driver.CUresult.CUDA_ERROR_NO_DEVICE,)
    assert initialize() == 0
    with pytest.raises(DriverUnusable, match="sees no GPU"):
        CudaPlatform()


def test_devices_by_uuid(scripted: Driver) -> None:
    platform = CudaPlatform()
    assert platform.device_uuids() == (FIRST, SECOND)
    with pytest.raises(DeviceNotFound, match=f"visible: {FIRST}, {SECOND}"):
        platform.device("GPU-3")
    assert "cuDevicePrimaryCtxRetain" not in scripted.calls  # contexts cost 270 MiB: only at need
    assert platform.device(SECOND).uuid == SECOND
    assert platform.device(SECOND) is platform.device(SECOND)
    assert scripted.calls.count("cuDevicePrimaryCtxRetain") == 1
    platform.close()
    assert scripted.calls.count("cuDevicePrimaryCtxRelease") == 1
    scripted.answers.update(cuDeviceGet=[(OK, 0), (OK, 1)], cuDeviceGetUuid=[(OK, Uuid(1)), (OK, Uuid(2))])
    with pytest.raises(DeviceNotFound):
        CudaPlatform(["GPU-3"])
    scripted.answers.update(cuDeviceGet=[(OK, 0), (OK, 1)], cuDeviceGetUuid=[(OK, Uuid(1)), (OK, Uuid(2))])
    assert CudaPlatform(["1"]).device_uuids() == (SECOND,), "by its index"


def test_mig_is_refused(scripted: Driver) -> None:
    scripted.answers["cuDeviceGetName"] = [(OK, b"NVIDIA H200\0"), (OK, b"NVIDIA H200 MIG 1g.18gb\0")]
    platform = CudaPlatform()
    mig = platform.device_uuids()[1]
    assert mig.startswith("MIG-")
    with pytest.raises(DeviceNotFound, match="MIG device"):
        platform.device(mig)


@pytest.mark.parametrize(("mode", "name"), [(3, "EXCLUSIVE_PROCESS"), (2, "PROHIBITED")])
def test_compute_modes(scripted: Driver, monkeypatch: pytest.MonkeyPatch, mode: int, name: str) -> None:
    scripted.attributes["CU_DEVICE_ATTRIBUTE_COMPUTE_MODE"] = mode
    platform = CudaPlatform()
    with pytest.raises(DriverUnusable, match=f"compute mode {name}.*nvidia-smi -i {FIRST} -c DEFAULT"):
        platform.device(FIRST)
    assert "cuDevicePrimaryCtxRetain" not in scripted.calls  # the daemon must not take it from the engine
    monkeypatch.setattr(cuda, "mps_runs", lambda: True)
    if mode == 3:
        assert platform.device(FIRST).uuid == FIRST


def test_no_memory_for_a_context(scripted: Driver) -> None:
    scripted.answers["cuDevicePrimaryCtxRetain"] = (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    with pytest.raises(DriverUnusable, match="gpu_memory_utilization"):
        CudaPlatform().device(FIRST)


def test_pin_errors(scripted: Driver) -> None:
    platform = CudaPlatform([SECOND])
    scripted.answers["cuMemHostRegister"] = (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
    with pytest.raises(PinFailed, match="cuMemHostRegister of 4096 bytes: CUDA_ERROR_OUT_OF_MEMORY"):
        platform.pin(0, 4096)
    scripted.answers["cuMemHostRegister"] = (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED,)
    with pytest.raises(PinFailed, match="this driver cannot register host memory here: see kvsidecar doctor"):
        platform.pin(0, 4096)
    scripted.answers["cuMemHostRegister"] = (LOST,)
    with pytest.raises(PinFailed):
        platform.pin(0, 4096)
    scripted.answers["cuMemHostUnregister"] = (LOST,)
    platform.unpin(0, 4096)  # nothing to be done, and the next chunk must still be tried
    scripted.answers["cuMemHostUnregister"] = (driver.CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,)
    with pytest.raises(DeviceError, match="NOT_REGISTERED"):
        platform.unpin(0, 4096)


HANDLE = CudaIpcSource(b"h" * 64)


def test_a_refused_handle_and_a_dead_context_are_told_apart(scripted: Driver) -> None:
    device = CudaPlatform().device(FIRST)
    # Whatever code the driver picks for a bad handle, the client is told what may be wrong.
    scripted.answers["cuIpcOpenMemHandle"] = (driver.CUresult.CUDA_ERROR_UNKNOWN, None)
    with pytest.raises(ImportRefused, match=r"cuMemCreate.*freed.*another GPU.*PID"):
        device.import_memory(HANDLE)
    scripted.answers["cuMemGetInfo"] = (LOST, None, None)
    with pytest.raises(DeviceLost):
        device.import_memory(HANDLE)


@pytest.mark.parametrize(
    ("name", "answer", "kind"),
    [
        ("cuMemGetAddressRange", (INVALID, None, None), ImportRefused),
        ("cuMemGetAddressRange", (LOST, None, None), DeviceLost),
    ],
)
def test_an_import_that_fails_after_opening_closes_again(
    scripted: Driver, name: str, answer: Any, kind: type[DeviceError]
) -> None:
    device = CudaPlatform().device(FIRST)
    scripted.answers[name] = answer
    with pytest.raises(kind):
        device.import_memory(HANDLE)
    assert scripted.calls.count("cuIpcCloseMemHandle") == 1
    with pytest.raises(ValueError, match="not mapped"):
        device.release_memory(DeviceMemory(4096, 1, b"k"))


GOOD, ROWS = (4096, 0, 0, 64, 1), (4096, 128, 0, 64, 2)


class Functions:
    """The driver's copy calls as C functions that answer with scripted statuses and note what they were asked."""

    def __init__(self, scripted: Driver, *names: str) -> None:
        self.statuses: dict[str, list[Any]] = {name: [] for name in names}
        self.calls: list[str] = []
        self.batches: list[npt.NDArray[np.void]] = []
        self.timed: list[tuple[int, int]] = []
        """Pairs of events."""
        self._keep: list[Any] = []
        self._addresses = {name: self._function(name) for name in names}
        scripted.answers["cuGetProcAddress"] = self._find

    @property
    def copies(self) -> list[str]:
        return [name for name in self.calls if "Memcpy" in name]

    def _find(self, name: bytes, version: int, flags: int) -> tuple[Any, int, Any]:
        return OK, self._addresses.get(name.decode(), 0), None

    def _function(self, name: str) -> int:
        def call(*arguments: Any) -> int:
            if name != "cuEventQuery":
                self.calls.append(name)
            if name == "cuEventElapsedTime":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_float))[0] = 250.0
                self.timed.append((arguments[1], arguments[2]))
            if name == "cuMemcpy3DBatchAsync":
                nbytes = arguments[0] * OPERATION.itemsize
                self.batches.append(np.frombuffer(ctypes.string_at(arguments[1], nbytes), OPERATION))
            statuses = self.statuses[name]
            return int(statuses.pop(0)) if statuses else 0

        function = ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES[name])(call)
        self._keep.append(function)
        return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def opened(scripted: Driver, direction: Direction = Direction.STORE) -> tuple[Functions, CopyStream]:
    """All of the driver's copy calls, and a stream that makes them."""
    functions = Functions(scripted, *SIGNATURES)
    return functions, CudaPlatform().device(FIRST).open_stream(direction)


PLAIN = {Direction.STORE: "cuMemcpyDtoHAsync", Direction.LOAD: "cuMemcpyHtoDAsync"}


def call_of(*copies: tuple[int, int, int, int, int], batched: bool = False) -> CopyCall:
    (call,) = plan_of(*copies).take(None)
    return replace(call, batched=batched)


@pytest.mark.parametrize(
    ("statuses", "drained", "kind", "known"),
    [
        ([INVALID], OK, CopyFailed, True),  # what was started, if anything, is over
        ([INVALID], INVALID, CopyFailed, False),
        ([INVALID], LOST, DeviceLost, None),
        ([LOST], OK, DeviceLost, None),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("direction", list(Direction))
def test_what_a_failed_issue_says_of_its_outcome(
    scripted: Driver,
    direction: Direction,
    batched: bool,
    statuses: list[Any],
    drained: Any,
    kind: type[DeviceError],
    known: bool | None,
) -> None:
    functions, stream = opened(scripted, direction)
    functions.statuses["cuMemcpyBatchAsync" if batched else "cuMemcpy3DBatchAsync"] = list(statuses)
    scripted.answers["cuStreamSynchronize"] = (drained,)
    with pytest.raises(kind, match="issuing 3 copies") as failure:
        stream.issue(stream.prepare(call_of(GOOD, GOOD, GOOD, batched=batched), 0))
    assert getattr(failure.value, "outcome_known", None) is known


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("lacking", ["the driver", "the system"])
def test_without_the_batched_calls_each_copy_is_its_own(scripted: Driver, direction: Direction, lacking: str) -> None:
    names = [name for name in SIGNATURES if lacking == "the system" or "Batch" not in name]
    functions = Functions(scripted, *names)
    for name in names:
        if "Batch" in name:
            functions.statuses[name] = [driver.CUresult.CUDA_ERROR_NOT_SUPPORTED]
    stream = CudaPlatform().device(FIRST).open_stream(direction)
    wide = (4096, 2**31, 0, 512, 3)  # over the maximum pitch: a copy a row
    for _ in range(2):
        functions.calls.clear()
        stream.issue(stream.prepare(call_of(GOOD, GOOD, batched=True), 0))
        stream.issue(stream.prepare(call_of(GOOD, ROWS, wide), 0))
    assert functions.copies == [PLAIN[direction]] * 3 + ["cuMemcpy2DAsync"] + [PLAIN[direction]] * 3  # asked once
    functions.statuses["cuMemcpy2DAsync"] = [INVALID]
    with pytest.raises(CopyFailed):
        stream.issue(stream.prepare(call_of(ROWS, GOOD), 0))


@pytest.mark.parametrize("direction", list(Direction))
def test_a_plain_copy_that_is_not_supported_fails_and_is_asked_again(scripted: Driver, direction: Direction) -> None:
    functions = Functions(scripted, *SIGNATURES)
    functions.statuses[PLAIN[direction]] = [driver.CUresult.CUDA_ERROR_NOT_SUPPORTED]
    stream = CudaPlatform().device(FIRST).open_stream(direction)
    with pytest.raises(CopyFailed):
        stream.issue(stream.prepare(call_of(GOOD, batched=False), 0))
    stream.issue(stream.prepare(call_of(GOOD, batched=False), 0))
    assert functions.copies == [PLAIN[direction]] * 2


def test_stores_read_in_stream_order_and_loads_when_they_like(scripted: Driver) -> None:
    functions = Functions(scripted, *SIGNATURES)
    device = CudaPlatform().device(FIRST)
    orders = driver.CUmemcpySrcAccessOrder
    for direction, order in (
        (Direction.STORE, orders.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM),
        (Direction.LOAD, orders.CU_MEMCPY_SRC_ACCESS_ORDER_ANY),
    ):
        stream = device.open_stream(direction)
        stream.issue(stream.prepare(call_of(*[ROWS] * 100), 1 << 30))
        batch = functions.batches.pop()
        assert len(batch) == 100
        assert (batch["srcAccessOrder"] == int(order)).all()
        there, here = ("src", "dst") if direction is Direction.STORE else ("dst", "src")
        address, pitch, offset, row_bytes, num_rows = ROWS
        assert (batch[there]["ptr"] == address).all()
        assert (batch[there]["rowLength"] == pitch).all()
        assert (batch[here]["ptr"] == (1 << 30) + offset).all()
        assert (batch[here]["rowLength"] == row_bytes).all()
        assert (batch["width"] == row_bytes).all()
        assert (batch["height"] == num_rows).all()
        assert (batch["depth"] == 1).all()


@pytest.mark.parametrize("direction", list(Direction))
def test_one_copy_is_issued_without_arrays_and_says_the_same(scripted: Driver, direction: Direction) -> None:
    functions, stream = opened(scripted, direction)
    stream.issue(stream.prepare(call_of(GOOD), 1 << 30))
    assert functions.copies == [PLAIN[direction]]
    stream.issue(stream.prepare(call_of(ROWS), 1 << 30))
    stream.issue(stream.prepare(call_of(ROWS, ROWS), 1 << 30))
    one, two = functions.batches
    assert one.tolist() == two.tolist()[:1]


def test_the_arrays_have_the_layout_of_the_drivers_structures() -> None:
    """The bindings know the driver's headers: each field, written through them, must be found in our record."""

    def bytes_of(structure: Any, dtype: np.dtype[np.void]) -> Any:
        return np.frombuffer(ctypes.string_at(structure.getPtr(), dtype.itemsize), dtype)[0]

    operation = driver.CUDA_MEMCPY3D_BATCH_OP()
    operand = driver.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
    locations = driver.CUmemLocationType
    for number, side in enumerate((operation.src, operation.dst)):
        side.type = operand
        side.op.ptr.ptr = 1000 + number
        side.op.ptr.rowLength = 2000 + number
        side.op.ptr.layerHeight = 3000 + number
        side.op.ptr.locHint.type = locations.CU_MEM_LOCATION_TYPE_DEVICE
        side.op.ptr.locHint.id = 7 + number
    operation.extent.width, operation.extent.height, operation.extent.depth = 11, 12, 13
    operation.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    operation.flags = 1
    found = bytes_of(operation, OPERATION)
    assert driver_calls._OPERATION.size == OPERATION.itemsize
    assert driver_calls._OPERATION.pack(
        1, 1000, 2000, 3000, 1, 7, 1, 1001, 2001, 3001, 1, 8, 11, 12, 13, 3, 1
    ) == ctypes.string_at(operation.getPtr(), OPERATION.itemsize)
    for number, side_name in enumerate(("src", "dst")):
        side = found[side_name]
        assert (side["type"], side["ptr"], side["rowLength"], side["layerHeight"]) == (
            1, 1000 + number, 2000 + number, 3000 + number
        )  # fmt: skip
        assert side["locHint"].tolist() == (1, 7 + number)
    assert [found[name] for name in ("width", "height", "depth", "srcAccessOrder", "flags")] == [11, 12, 13, 3, 1]
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    attributes.srcLocHint.type, attributes.srcLocHint.id = locations.CU_MEM_LOCATION_TYPE_DEVICE, 5
    attributes.dstLocHint.type, attributes.dstLocHint.id = locations.CU_MEM_LOCATION_TYPE_HOST, 0
    attributes.flags = 1
    assert bytes_of(attributes, ATTRIBUTES).tolist() == (1, (1, 5), (2, 0), 1)
    copy = driver.CUDA_MEMCPY2D()
    kinds = driver.CUmemorytype
    copy.srcMemoryType, copy.dstMemoryType = kinds.CU_MEMORYTYPE_DEVICE, kinds.CU_MEMORYTYPE_HOST
    copy.srcDevice, copy.srcPitch, copy.dstHost, copy.dstPitch = 21, 22, 23, 24
    copy.WidthInBytes, copy.Height = 25, 26
    record = bytes_of(copy, COPY_2D)
    assert (record["src"]["MemoryType"], record["src"]["Device"], record["src"]["Pitch"]) == (2, 21, 22)
    assert (record["dst"]["MemoryType"], record["dst"]["Host"], record["dst"]["Pitch"]) == (1, 23, 24)
    assert (record["WidthInBytes"], record["Height"]) == (25, 26)


def test_a_driver_without_the_plain_calls_is_refused(scripted: Driver) -> None:
    Functions(scripted, "cuMemcpyBatchAsync")
    with pytest.raises(DriverUnusable, match="cuMemcpyDtoHAsync"):
        CudaPlatform().device(FIRST).open_stream(Direction.STORE)


def test_a_failed_event_or_wait(scripted: Driver) -> None:
    functions, stream = opened(scripted)
    for alone in (False, True):
        for after in (False, True):  # before the copies, and after them
            if after and not alone:
                scripted.answers["cuEventRecord"] = (INVALID,)
            else:
                functions.statuses["cuEventRecord"] = [OK] * after + [INVALID]
            with pytest.raises(CopyFailed) as failure:
                stream.issue(stream.prepare(call_of(GOOD), 0), alone=alone)
            assert failure.value.outcome_known
            scripted.answers["cuEventRecord"] = (OK,)
            assert not functions.statuses["cuEventRecord"]
    assert scripted.calls.count("cuEventCreate") == 2, "events of refused calls are used again"
    scripted.answers["cuEventQuery"] = (INVALID,)
    mark = stream.issue(stream.prepare(call_of(GOOD), 0))
    with pytest.raises(CopyFailed) as failure:
        mark.is_done()
    assert not failure.value.outcome_known
    scripted.answers["cuEventQuery"] = (LOST,)
    mark = stream.issue(stream.prepare(call_of(GOOD), 0))
    with pytest.raises(DeviceLost):
        mark.is_done()


def test_marks_are_asked_and_their_events_used_again(scripted: Driver) -> None:
    _, stream = opened(scripted)
    for _ in range(3):
        mark = stream.issue(stream.prepare(call_of(GOOD), 0))
        scripted.answers["cuEventQuery"] = (driver.CUresult.CUDA_ERROR_NOT_READY,)
        assert not mark.is_done()
        scripted.answers["cuEventQuery"] = (OK,)
        assert mark.is_done()
        scripted.answers["cuEventQuery"] = (driver.CUresult.CUDA_ERROR_NOT_READY,)
        assert mark.is_done(), "the driver was asked about an event that may serve another call by now"
        mark.seconds()
    assert scripted.calls.count("cuEventCreate") == 2


@pytest.mark.parametrize("alone", [False, True])
def test_a_call_is_timed_by_the_device_from_before_its_copies_to_after_them(scripted: Driver, alone: bool) -> None:
    order: list[str] = []
    functions = Functions(scripted, *SIGNATURES)
    functions.calls = order
    scripted.answers["cuEventRecord"] = lambda *_: order.append("cuEventRecord that may block") or (OK,)
    stream = CudaPlatform().device(FIRST).open_stream(Direction.STORE)
    mark = stream.issue(stream.prepare(call_of(GOOD), 0), alone=alone)
    # Where nothing is in flight it is recorded without giving up the interpreter.
    assert order == [
        "cuEventRecord",
        PLAIN[Direction.STORE],
        "cuEventRecord" if alone else "cuEventRecord that may block",
    ]
    assert mark.is_done()
    assert mark.seconds() == 0.25
    functions.statuses["cuEventElapsedTime"] = [INVALID]
    mark = stream.issue(stream.prepare(call_of(GOOD), 0), alone=alone)
    assert mark.is_done()
    assert mark.seconds() == 0.0, "a time that the driver does not tell fails a copy that is over"


def test_a_call_alone_that_is_not_timed_has_no_event(scripted: Driver) -> None:
    functions, stream = opened(scripted)
    mark = stream.issue(stream.prepare(call_of(GOOD), 0), alone=True, timed=False)
    scripted.answers["cuStreamQuery"] = (driver.CUresult.CUDA_ERROR_NOT_READY,)
    assert not mark.is_done()
    scripted.answers["cuStreamQuery"] = (OK,)
    assert mark.is_done()
    assert functions.calls == [PLAIN[Direction.STORE]]
    assert "cuEventCreate" not in scripted.calls
    mark = stream.issue(stream.prepare(call_of(GOOD), 0), alone=True, timed=False)
    scripted.answers["cuStreamQuery"] = (LOST,)
    with pytest.raises(DeviceLost):
        mark.is_done()


def test_a_call_behind_one_in_flight_begins_where_that_one_ends(scripted: Driver) -> None:
    functions = Functions(scripted, *SIGNATURES)
    numbers = iter(range(10, 100))
    scripted.answers["cuEventCreate"] = lambda *_: (OK, Handle(next(numbers)))
    stream = CudaPlatform().device(FIRST).open_stream(Direction.STORE)

    def issue(*, in_flight: bool) -> CopyMark:
        functions.statuses["cuEventQuery"] = [driver.CUresult.CUDA_ERROR_NOT_READY] if in_flight else []
        return stream.issue(stream.prepare(call_of(GOOD), 0))

    marks = [issue(in_flight=False), *[issue(in_flight=True) for _ in range(2)]]
    assert functions.calls.count("cuEventRecord") == 1, "only the first of them has a start of its own"
    for mark in marks[:2]:
        assert mark.is_done()
        mark.seconds()
    # The second one's end is the third one's start: two of the four events are free, those are not among them.
    marks += [issue(in_flight=True), issue(in_flight=False)]
    for mark in marks[2:]:
        assert mark.is_done()
        mark.seconds()
    assert functions.timed == [(10, 11), (11, 12), (12, 13), (13, 11), (10, 14)]
    issue(in_flight=True)  # its mark was asked already: it is over, whatever the driver says
    assert functions.calls.count("cuEventRecord") == 3


@pytest.mark.parametrize(("status", "error"), [(INVALID, CopyFailed), (LOST, DeviceLost)])
def test_whether_a_stream_is_over(scripted: Driver, status: Any, error: type[DeviceError]) -> None:
    _, stream = opened(scripted)
    assert stream.is_done()
    scripted.answers["cuStreamQuery"] = (driver.CUresult.CUDA_ERROR_NOT_READY,)
    assert not stream.is_done()
    scripted.answers["cuStreamQuery"] = (status,)
    with pytest.raises(error) as failure:
        stream.is_done()
    assert not getattr(failure.value, "outcome_known", False)


def test_events_of_a_call_of_unknown_outcome_are_not_used_again(scripted: Driver) -> None:
    functions, stream = opened(scripted)
    for drained, created in ((INVALID, 2), (OK, 4), (OK, 4)):
        functions.statuses[PLAIN[Direction.STORE]] = [INVALID]
        scripted.answers["cuStreamSynchronize"] = (drained,)
        with pytest.raises(CopyFailed):
            stream.issue(stream.prepare(call_of(GOOD), 0))
        assert scripted.calls.count("cuEventCreate") == created


def test_without_an_event_nothing_is_issued(scripted: Driver) -> None:
    functions, stream = opened(scripted, Direction.LOAD)
    scripted.answers["cuEventCreate"] = (INVALID, None)
    with pytest.raises(CopyFailed):
        stream.issue(stream.prepare(call_of(GOOD), 0))
    assert functions.calls == []
