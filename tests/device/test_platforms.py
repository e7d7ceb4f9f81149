"""Which platform is chosen, and that a broken driver is never taken for no driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NoReturn

import pytest

from kvsidecar.device import platforms
from kvsidecar.device.cuda import status as cuda_status
from kvsidecar.device.platforms import open_platform
from kvsidecar.errors import ConfigError, DriverUnusable
from kvsidecar.support import cuda_driver


@pytest.fixture(autouse=True)
def loaded_anew() -> Iterator[None]:
    cuda_driver._library.cache_clear()
    yield
    cuda_driver._library.cache_clear()


def no_such_file(name: str) -> NoReturn:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


def broken(name: str) -> NoReturn:
    raise OSError(f"libnvidia-ptxjitcompiler.so.1: cannot open shared object file (needed by {name})")


def test_the_host_when_asked_for() -> None:
    platform, why = open_platform("host")
    assert (platform.name, platform.device_uuids(), why) == ("host", ("host",), "the host was asked for")


def test_auto_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", no_such_file)
    platform, why = open_platform("auto")
    assert platform.name == "host"
    assert "no CUDA driver" in why


def test_auto_with_a_driver_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_has_driver", lambda: True)
    monkeypatch.setattr(cuda_status, "initialize", lambda: 0)
    platform, why = open_platform("auto")
    assert (platform.name, why) == ("host", "the CUDA driver sees no GPU")
    with pytest.raises(DriverUnusable, match="sees no GPU"):
        open_platform("cuda")


def test_auto_with_a_driver_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", broken)
    assert platforms._has_driver()

    def too_old() -> NoReturn:
        raise DriverUnusable("too old")

    monkeypatch.setattr(cuda_status, "initialize", too_old)
    for kind in ("auto", "cuda"):
        with pytest.raises(DriverUnusable, match="too old"):
            open_platform(kind)


def test_cuda_without_a_driver() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(DriverUnusable, match=r"libcuda\.so\.1 does not load"):
            open_platform("cuda")
    else:
        pytest.skip("there is a driver")


def test_an_unknown_kind() -> None:
    with pytest.raises(ConfigError, match="'gpu'; it must be auto, cuda or host"):
        open_platform("gpu")
