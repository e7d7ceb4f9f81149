"""Chooses the platform of this machine. Imports an implementation only when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence

from kvsidecar.device.base import Platform
from kvsidecar.errors import ConfigError, DriverUnusable
from kvsidecar.support import cuda_driver


def open_platform(kind: str, *, devices: Sequence[str] = ()) -> tuple[Platform, str]:
    """The platform, and one sentence that explains the choice.

    ``auto`` is ``cuda`` where the driver sees a GPU and ``host`` where there is no driver or no GPU. A driver that
    does not work is an error: a daemon that fell back to the host would look healthy and serve no engine.

    Args:
        kind: ``auto``, ``cuda`` or ``host``.
        devices: those to use, by UUID or by index in the driver's order; empty for all. On the host ``host``, and
            ``host-1``, ``host-2`` and so on, which stand for several GPUs.

    Raises:
        ConfigError: ``kind`` is something else.
        DriverUnusable: the driver does not work; or, with ``cuda``, there is no driver or no GPU.
        DeviceNotFound: one of ``devices`` is not visible.
    """
    if kind not in ("auto", "cuda", "host"):
        raise ConfigError(f"the device is {kind!r}; it must be auto, cuda or host")
    if kind == "host":
        return _host(devices), "the host was asked for"
    if kind == "auto" and not _has_driver():
        return _host(devices), "there is no CUDA driver (libcuda.so.1)"
    try:
        from kvsidecar.device.cuda import platform as cuda
        from kvsidecar.device.cuda import status as cuda_status
    except ImportError as error:
        raise DriverUnusable(f"cuda-python does not import: {error}; install cuda-python 13") from error
    if kind == "auto" and cuda_status.initialize() == 0:
        return _host(devices), "the CUDA driver sees no GPU"
    platform = cuda.CudaPlatform(devices)
    count = len(platform.device_uuids())
    return platform, f"the CUDA driver sees {count} GPU{'s' if count > 1 else ''}"


def _host(devices: Sequence[str]) -> Platform:
    from kvsidecar.device.host import HostPlatform

    return HostPlatform(devices)


def _has_driver() -> bool:
    """Whether there is a CUDA driver. True for one that does not load, so that the caller reports the error."""
    try:
        return cuda_driver.is_installed()
    except DriverUnusable:
        return True
