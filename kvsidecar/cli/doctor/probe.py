"""Asks libcuda what it is, and prints JSON: ``python -m kvsidecar.cli.doctor.probe``. Makes no context on any GPU.

A process of its own, by ctypes: it needs no bindings, and may hang or crash with the driver.
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid as uuids
from typing import Any

from kvsidecar.device.cuda.calls import NEEDED, OPTIONAL, SIGNATURES, SINCE

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE"""
_COMPUTE_MODE = 20
"""CU_DEVICE_ATTRIBUTE_COMPUTE_MODE"""


def probe() -> dict[str, Any]:
    """The fields of `kvsidecar.cli.doctor.facts.Driver` that come from the library."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        # The loader names the file that is missing: the library itself, or one that it needs.
        if str(error).startswith("libcuda.so.1: cannot open shared object file"):
            return {"installed": False}
        return {"installed": True, "problem": f"libcuda.so.1 does not load: {error}"}
    found: dict[str, Any] = {"installed": True}
    status = cuda.cuInit(0)
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        found["cuda_version"] = version.value
    missing = [name for name in sorted(NEEDED | set(SIGNATURES)) if not _has(cuda, name)]
    found["calls"] = len(NEEDED | set(SIGNATURES))
    found["missing_calls"] = [name for name in missing if name not in OPTIONAL]
    found["missing_optional_calls"] = [name for name in missing if name in OPTIONAL]
    if status == NO_DEVICE:
        return found
    if status:
        return {**found, "problem": f"the CUDA driver does not start: {_text(cuda, status)}"}
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return {**found, "gpus": [_gpu(cuda, ordinal) for ordinal in range(count.value)]}


def _has(cuda: ctypes.CDLL, name: str) -> bool:
    address = ctypes.c_void_p()
    get = getattr(cuda, "cuGetProcAddress_v2", None)
    if get is None:
        return hasattr(cuda, name)
    flags = ctypes.c_uint64(0)
    status = get(name.encode(), ctypes.byref(address), ctypes.c_int(SINCE), flags, None)
    return (status == 0 and bool(address.value)) or hasattr(cuda, name)


def _text(cuda: ctypes.CDLL, status: int) -> str:
    texts = []
    for function in (cuda.cuGetErrorName, cuda.cuGetErrorString):
        text = ctypes.c_char_p()
        if function(status, ctypes.byref(text)) == 0 and text.value is not None:
            texts.append(text.value.decode())
    return ": ".join(texts) or f"error {status}"


def _gpu(cuda: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device, mode = ctypes.c_int(), ctypes.c_int()
    raw, name, bus = (ctypes.create_string_buffer(size) for size in (16, 128, 32))
    size = ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetUuid_v2(raw, device)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetPCIBusId(bus, len(bus), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, device)
    return {
        "uuid": f"{'MIG' if b' MIG ' in name.value else 'GPU'}-{uuids.UUID(bytes=raw.raw)}",
        "name": name.value.decode(errors="replace"),
        "bus_id": bus.value.decode(errors="replace"),
        "memory_bytes": size.value,
        "compute_mode": mode.value,
    }


if __name__ == "__main__":
    json.dump(probe(), sys.stdout)
