"""The CUDA driver: its statuses, and how it is started.

Sources: CUDA Driver API, "Data types used by CUDA driver" (CUresult), "Initialization".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from cuda.bindings import driver

from kvsidecar.device.system import nvidia_module_version
from kvsidecar.errors import DeviceError, DeviceLost, DriverUnusable

MIN_CUDA: Final = 12080
"""12.8, the first driver with the batched copies; written as cuDriverGetVersion does: 1000 * major + 10 * minor."""

STICKY: Final = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "DEINITIALIZED",
        "DEVICE_UNAVAILABLE",
        "ECC_UNCORRECTABLE",
        "NVLINK_UNCORRECTABLE",
        "CONTAINED",
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "CONTEXT_IS_DESTROYED",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "TENSOR_MEMORY_LEAK",
        "MPS_RPC_FAILURE",
        "MPS_CLIENT_TERMINATED",
        "EXTERNAL_DEVICE",
        "UNKNOWN",
    )
)
"""Names of errors that a context does not survive: the driver's text says "leaves the process in an inconsistent
state", or that the device is gone. By name, because older bindings lack some of them."""

OK: Final = driver.CUresult.CUDA_SUCCESS


def describe(status: Any) -> str:
    """``CUDA_ERROR_...: the driver's sentence``."""
    _, text = driver.cuGetErrorString(status)
    return f"{status.name}: {text.decode()}" if text else str(status.name)


def check(result: tuple[Any, ...], doing: str, refuse: Callable[[str], DeviceError] = DeviceError) -> Any:
    """The values that a call of the bindings returned after its status.

    Args:
        result: the tuple, status first.
        doing: begins the error's text, e.g. ``creating a stream``.
        refuse: makes the exception of an error that the context survives.

    Raises:
        DeviceLost: the error is one of `STICKY`.
        DeviceError: made by ``refuse``, for any other error.
    """
    status, *values = result
    if status != OK:
        text = f"{doing}: {describe(status)}"
        raise DeviceLost(text) if status.name in STICKY else refuse(text)
    return values[0] if len(values) == 1 else tuple(values)


def initialize() -> int:
    """Start the driver. Returns the number of visible GPUs.

    Raises:
        DriverUnusable: there is no driver, it does not start, or it is too old.
    """
    try:
        (status,) = driver.cuInit(0)
    except (RuntimeError, OSError) as error:  # the bindings load libcuda here; they have exceptions of their own
        raise DriverUnusable("no CUDA driver: libcuda.so.1 does not load; install the NVIDIA driver") from error
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return 0
    if status != OK:
        raise DriverUnusable(f"the CUDA driver does not start: {describe(status)}")
    version = check(driver.cuDriverGetVersion(), "asking for the driver's version", DriverUnusable)
    if version < MIN_CUDA:
        raise DriverUnusable(
            f"driver {nvidia_module_version()} (CUDA {version // 1000}.{version % 1000 // 10}) is too old: "
            f"kvsidecar needs {MIN_CUDA // 1000}.{MIN_CUDA % 1000 // 10} (driver 570 or newer)"
        )
    return int(check(driver.cuDeviceGetCount(), "counting GPUs", DriverUnusable))
