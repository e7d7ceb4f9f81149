"""The ctypes shim of the CUDA driver, with a driver in Python: on a machine without one nothing else looks at it."""

from __future__ import annotations

import ast
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.bench import driver
from kvsidecar.cli.doctor import probe
from kvsidecar.errors import DriverUnusable, NotExportable
from kvsidecar.support import cuda_driver
from kvsidecar.support.cuda_driver import FABRIC, POSIX_DESCRIPTOR

NO_DEVICE = 100


def take(call: Callable[..., int]) -> Any:
    """A function whose argument types can be set, as those of a library can."""

    class Function:
        def __call__(self, *arguments: Any) -> int:
            return call(*arguments)

    return Function()


class Library:
    """A driver that has these functions, and knows the texts of its errors."""

    def __init__(self, **functions: Callable[..., int]) -> None:
        self.__dict__ |= {name: take(function) for name, function in functions.items()}
        self.cuGetErrorName = take(lambda status, text: self._say(text, f"CUDA_ERROR_{status}"))
        self.cuGetErrorString = take(lambda status, text: self._say(text, f"it is {status}"))

    def _say(self, text: Any, value: str) -> int:
        text._obj.value = value.encode()
        return 0


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    caches = (cuda_driver._library, cuda_driver._function, cuda_driver._start)

    def forget() -> None:
        for each in caches:
            each.cache_clear()

    def put(library: Any) -> None:
        forget()

        def load(_name: str) -> Any:
            if isinstance(library, OSError):
                raise library
            return library

        monkeypatch.setattr(ctypes, "CDLL", load)

    yield put
    forget()


def test_no_driver_is_not_a_driver_that_does_not_load(install: Callable[[Any], None]) -> None:
    install(OSError("libcuda.so.1: cannot open shared object file: No such file or directory"))
    assert not cuda_driver.is_installed()
    with pytest.raises(DriverUnusable, match=r"no CUDA driver: libcuda\.so\.1"):
        cuda_driver.device_count()
    assert probe.probe() == {"installed": False}
    install(OSError("libother.so.1: cannot open shared object file (needed by libcuda.so.1)"))
    with pytest.raises(DriverUnusable, match="libother"):
        cuda_driver.is_installed()
    assert probe.probe()["problem"].startswith("libcuda.so.1 does not load: libother.so.1")


def test_a_call_that_fails_says_which_and_why(install: Callable[[Any], None]) -> None:
    install(Library(cuInit=lambda _: 0, cuDeviceGetCount=lambda _: 2))
    with pytest.raises(DriverUnusable, match=r"^cuDeviceGetCount: CUDA_ERROR_2: it is 2$"):
        cuda_driver.device_count()
    with pytest.raises(KeyError, match=r"cuDeviceGetCount.*; stop it"):
        cuda_driver.call("cuDeviceGetCount", None, error=KeyError, hint="stop it")


def test_a_driver_that_is_too_old_or_does_not_start_says_so(install: Callable[[Any], None]) -> None:
    install(Library(cuInit=lambda _: 0))
    with pytest.raises(DriverUnusable, match="has no cuDeviceGetCount: it is too old"):
        cuda_driver.device_count()
    install(Library(cuInit=lambda _: 999))
    with pytest.raises(DriverUnusable, match="does not start: CUDA_ERROR_999"):
        cuda_driver.device_count()


def test_the_doctor_hears_of_a_driver_without_gpus_and_of_the_calls_it_lacks(install: Callable[[Any], None]) -> None:
    def version(number: Any) -> int:
        number._obj.value = 12080
        return 0

    def find(name: bytes, address: Any, _version: int, _flags: int, _status: None) -> int:
        address._obj.value = None if name == b"cuMemcpyBatchAsync" else 1
        return 0

    install(Library(cuInit=lambda _: NO_DEVICE, cuDriverGetVersion=version, cuGetProcAddress_v2=find))
    found = probe.probe()
    assert (found["installed"], found["cuda_version"], "gpus" in found) == (True, 12080, False)
    assert (found["missing_calls"], found["missing_optional_calls"]) == ([], ["cuMemcpyBatchAsync"])


def exporting(types: int, status: int = 0) -> Library:
    """A driver of memory with these forms of export. A fabric handle is 64 times the number of the handle, 7."""
    given: list[int] = []

    def retain(handle: Any, _address: int) -> int:
        handle._obj.value = 7
        return 0

    def attribute(value: Any, _which: int, _pointer: int) -> int:
        value._obj.value = types
        return 0

    def export(out: Any, handle: Any, kind: int, _flags: int) -> int:
        given.append(kind)
        if kind == POSIX_DESCRIPTOR:
            out._obj.value = os.open("/dev/null", os.O_RDONLY)
        else:
            out.raw = bytes([handle.value]) * 64
        return status

    library = Library(
        cuInit=lambda _: 0, cuMemRetainAllocationHandle=retain, cuPointerGetAttribute=attribute,
        cuMemExportToShareableHandle=export, cuMemRelease=lambda _: 0,
    )  # fmt: skip
    library.__dict__["given"] = given
    return library


@pytest.mark.parametrize(
    ("types", "form"),
    [(POSIX_DESCRIPTOR, POSIX_DESCRIPTOR), (POSIX_DESCRIPTOR | FABRIC, POSIX_DESCRIPTOR), (FABRIC, FABRIC)],
)
def test_memory_goes_by_descriptor_and_by_a_fabric_handle_only_where_it_has_no_other_form(
    install: Callable[[Any], None], types: int, form: int
) -> None:
    library = exporting(types)
    install(library)
    fd = cuda_driver.exported_fd(1 << 40)
    assert library.__dict__["given"] == [form]
    assert cuda_driver.fabric_handle(fd) == (b"\x07" * 64 if form == FABRIC else None)
    os.close(fd)


def test_a_fabric_handle_that_is_not_permitted_names_the_service_that_must_run(install: Callable[[Any], None]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    install(exporting(FABRIC, status=800))
    with pytest.raises(NotExportable, match=r"CUDA_ERROR_800.*IMEX"):
        cuda_driver.exported_fd(1 << 40)
    assert set(os.listdir("/proc/self/fd")) == before


def test_only_a_memfd_is_read_for_a_fabric_handle(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    with path.open("rb") as file:
        assert cuda_driver.fabric_handle(file.fileno()) is None
    fd = os.memfd_create("test")
    for length, found in ((0, 0), (63, 63), (64, 64), (4096, 65)):
        os.ftruncate(fd, length)
        assert cuda_driver.fabric_handle(fd) == bytes(found)
    blind = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)  # another user's copier must not end by it
    assert cuda_driver.fabric_handle(blind) is None
    os.close(blind)
    os.close(fd)


def test_every_call_in_the_code_has_a_signature_with_as_many_arguments() -> None:
    """Where there is no GPU nothing else would notice a slip."""
    calls = 0
    for module in (cuda_driver, driver, probe):
        assert module.__file__ is not None
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = str(node.args[0].value)
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("call", "_call", "status_of") and not any(
                isinstance(each, ast.Starred) for each in node.args
            ):
                if any(isinstance(each, ast.Starred) for each in node.args):
                    continue
                assert len(node.args) - 1 == len(cuda_driver._SIGNATURES[name]), name
                calls += 1
    assert calls > 30
    assert all(ctypes.sizeof(each) for arguments in cuda_driver._SIGNATURES.values() for each in arguments)
