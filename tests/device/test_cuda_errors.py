"""What `device/cuda.py` makes of errors that a healthy GPU does not have. Scripted answers, no driver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from kvsidecar.device import cuda
from kvsidecar.device.base import PITCHED_COPY, CudaIpcSource
from kvsidecar.device.cuda import CudaPlatform, check, initialize
from kvsidecar.device.pitch import split_wide
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
            "cuPointerGetAttribute": (OK, 0),
            "cuMemGetInfo": (OK, 1, 2),
            "cuStreamCreate": (OK, object()),
            "cuEventCreate": (OK, object()),
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
            return script.pop(0) if isinstance(script, list) else script

        return answer


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Driver:
    scripted = Driver()
    monkeypatch.setattr(cuda, "driver", scripted)
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
    assert names >= cuda.STICKY


def test_a_driver_that_is_too_old(scripted: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.answers["cuDriverGetVersion"] = (OK, 12020)
    monkeypatch.setattr(cuda, "nvidia_module_version", lambda: "535.161.08")
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
        CudaPlatform(pin_device="GPU-3")


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
    platform = CudaPlatform(pin_device=SECOND)
    scripted.answers["cuMemHostRegister"] = (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
    with pytest.raises(PinFailed, match="cuMemHostRegister of 4096 bytes: CUDA_ERROR_OUT_OF_MEMORY"):
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
    with pytest.raises(ImportRefused, match=r"expandable_segments.*sleep mode.*freed.*another GPU.*PID"):
        device.import_memory(HANDLE)
    scripted.answers["cuMemGetInfo"] = (LOST, None, None)
    with pytest.raises(DeviceLost):
        device.import_memory(HANDLE)


@pytest.mark.parametrize(
    ("name", "answer", "kind"),
    [
        ("cuPointerGetAttribute", (OK, 1), ImportRefused),
        ("cuPointerGetAttribute", (INVALID, None), ImportRefused),
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
        device.release_memory(cuda.DeviceMemory(4096, 1, b"k"))


GOOD, ROWS = (4096, 0, 0, 64, 1), (4096, 128, 0, 64, 2)


@pytest.mark.parametrize(
    ("statuses", "drained", "kind", "known", "synchronized"),
    [
        ([INVALID], OK, CopyFailed, True, False),  # nothing was started
        ([OK, INVALID], OK, CopyFailed, True, True),  # what was started is over
        ([OK, INVALID], INVALID, CopyFailed, False, True),
        ([OK, INVALID], LOST, DeviceLost, None, True),
        ([LOST], OK, DeviceLost, None, False),
        ([OK, LOST], OK, DeviceLost, None, False),
    ],
)
@pytest.mark.parametrize("piece", [GOOD, ROWS])
@pytest.mark.parametrize("direction", list(Direction))
def test_what_a_failed_issue_says_of_its_outcome(
    scripted: Driver,
    direction: Direction,
    piece: tuple[int, int, int, int, int],
    statuses: list[Any],
    drained: Any,
    kind: type[DeviceError],
    known: bool | None,
    synchronized: bool,
) -> None:
    stream = CudaPlatform().device(FIRST).open_stream(direction)
    plain = "cuMemcpyDtoHAsync" if direction is Direction.STORE else "cuMemcpyHtoDAsync"
    name = plain if piece is GOOD else "cuMemcpy2DAsync"
    scripted.answers[name] = [(status,) for status in statuses]
    scripted.answers["cuStreamSynchronize"] = (drained,)
    with pytest.raises(kind, match="piece") as failure:
        stream.issue(plan_of(piece, piece, piece), 0)
    assert getattr(failure.value, "outcome_known", None) is known
    assert ("cuStreamSynchronize" in scripted.calls) is synchronized


def test_a_failed_event_or_wait(scripted: Driver) -> None:
    stream = CudaPlatform().device(FIRST).open_stream(Direction.STORE)
    scripted.answers["cuEventRecord"] = (INVALID,)
    with pytest.raises(CopyFailed) as failure:
        stream.issue(plan_of(GOOD), 0)
    assert failure.value.outcome_known
    scripted.answers["cuEventSynchronize"] = (INVALID,)
    with pytest.raises(CopyFailed) as failure:
        stream.wait()
    assert not failure.value.outcome_known
    scripted.answers["cuEventSynchronize"] = (LOST,)
    with pytest.raises(DeviceLost):
        stream.wait()


def test_a_stream_without_an_event_is_given_back(scripted: Driver) -> None:
    device = CudaPlatform().device(FIRST)
    scripted.answers["cuEventCreate"] = (INVALID, None)
    with pytest.raises(DeviceError):
        device.open_stream(Direction.LOAD)
    assert "cuStreamDestroy" in scripted.calls


def test_wide_pitches_become_rows() -> None:
    copies = plan_of((10, 100, 0, 4, 3), (5000, 4, 12, 4, 1), (7000, 101, 16, 4, 2), (0, 999, 24, 8, 1)).copies
    assert split_wide(copies, 101) is copies
    assert split_wide(copies, 100).tolist() == [
        (10, 100, 0, 4, 3),
        (5000, 4, 12, 4, 1),
        (7000, 101, 16, 4, 1),
        (7101, 101, 20, 4, 1),
        (0, 999, 24, 8, 1),
    ]
    assert split_wide(copies, 1)["device_address"].tolist() == [10, 110, 210, 5000, 7000, 7101, 0]
    assert split_wide(copies, 1)["host_offset"].tolist() == [0, 4, 8, 12, 16, 20, 24]
    assert copies["num_rows"].tolist() == [3, 1, 2, 1]
    assert len(split_wide(np.zeros(0, dtype=PITCHED_COPY), 100)) == 0
