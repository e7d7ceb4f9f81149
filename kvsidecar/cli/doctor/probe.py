"""Queries libcuda and prints JSON: ``python -m kvsidecar.cli.doctor.probe``. It creates no CUDA context.

It runs as a separate process, without the CUDA bindings, because it may hang or crash with the driver.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from kvsidecar.device.cuda.calls import NEEDED, OPTIONAL, SIGNATURES, SINCE
from kvsidecar.errors import DriverUnusable
from kvsidecar.support import cuda_driver

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE"""
_COMPUTE_MODE = 20
"""CU_DEVICE_ATTRIBUTE_COMPUTE_MODE"""
_HOST_REGISTER_SUPPORTED = 99
"""CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED"""


def probe() -> dict[str, Any]:
    """The fields of `kvsidecar.cli.doctor.facts.Driver` that come from the library."""
    try:
        if not cuda_driver.is_installed():
            return {"installed": False}
    except DriverUnusable as error:
        return {"installed": True, "problem": f"{cuda_driver.LIBRARY} does not load: {error.__cause__}"}
    found: dict[str, Any] = {"installed": True}
    status = cuda_driver.status_of("cuInit", 0)
    version = ctypes.c_int()
    if cuda_driver.status_of("cuDriverGetVersion", ctypes.byref(version)) == 0:
        found["cuda_version"] = version.value
    missing = [name for name in sorted(NEEDED | set(SIGNATURES)) if not _has(name)]
    found["calls"] = len(NEEDED | set(SIGNATURES))
    found["missing_calls"] = [name for name in missing if name not in OPTIONAL]
    found["missing_optional_calls"] = [name for name in missing if name in OPTIONAL]
    if status == NO_DEVICE:
        return found
    if status:
        return {**found, "problem": f"the CUDA driver does not start: {cuda_driver.error_text(status)}"}
    return {**found, "gpus": [_gpu(ordinal) for ordinal in range(cuda_driver.device_count())]}


def _has(name: str) -> bool:
    if not cuda_driver.has_symbol("cuGetProcAddress_v2"):
        return cuda_driver.has_symbol(name)
    address = ctypes.c_void_p()
    status = cuda_driver.status_of("cuGetProcAddress_v2", name.encode(), ctypes.byref(address), SINCE, 0, None)
    return (status == 0 and bool(address.value)) or cuda_driver.has_symbol(name)


def _gpu(ordinal: int) -> dict[str, Any]:
    return {
        "uuid": cuda_driver.device_uuid(ordinal),
        "name": cuda_driver.device_name(ordinal),
        "bus_id": cuda_driver.device_bus_id(ordinal),
        "memory_bytes": cuda_driver.device_memory(ordinal),
        "compute_mode": cuda_driver.device_attribute(ordinal, _COMPUTE_MODE),
        "registers_host_memory": bool(cuda_driver.device_attribute(ordinal, _HOST_REGISTER_SUPPORTED)),
    }


if __name__ == "__main__":
    json.dump(probe(), sys.stdout)
