"""A process that owns engine memory and shares it: the other end of `Device.import_memory`.

As a script it fills allocations with a pattern, hands them over, and answers one line for each line on standard input.
The first line it prints is JSON: ``{"kind": ..., "handles": [hex, ...], "device": uuid}``; memfds go over the socket
``--socket-fd`` instead (SCM_RIGHTS). Commands:

    checksum I             blake2b of allocation I
    read I [OFFSET BYTES]  its bytes, in hexadecimal
    fill I SEED            fill it with ``pattern(SEED, ...)``
    free                   free bytes of the GPU (0 on the host)
    sleep                  unmap what consists of ranges
    exit

As a module it has `Exporter`, which starts and talks to such a process.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvsidecar.device.base import RangesSource

F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2
MAP_FIXED = 0x10
RANGE_BYTES = 2 << 20


def pattern(seed: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """What allocation ``i`` holds at the start, with ``seed + i``."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


# -- the parent's side -------------------------------------------------------------------------------------------


class Exporter:
    """A running exporter. Use as a context manager: it is killed at the end.

    Args:
        kind: ``host`` or ``cuda``.
        sizes: bytes of each allocation. On CUDA use multiples of 2 MiB: smaller ones share a larger mapping.
        ordinal: of the GPU.
        ranges: how many ranges of physical memory each allocation consists of; 0: plain allocations.
    """

    def __init__(self, kind: str, *sizes: int, seed: int = 1, ordinal: int = 0, ranges: int = 0) -> None:
        import kvsidecar

        root = str(Path(kvsidecar.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, "--kind", kind, "--seed", str(seed), "--ordinal", str(ordinal)]
        command += ["--ranges", str(ranges), "--socket-fd", str(theirs.fileno()), "--bytes", *map(str, sizes)]
        self._sizes, self._ranges = sizes, ranges
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()
        self.fds: list[int] = []
        try:
            line = self._reply()
            self.device: str = line["device"]
            self.handles = [bytes.fromhex(handle) for handle in line["handles"]]
            if kind == "host" or ranges:
                _, self.fds, _, _ = socket.recv_fds(ours, 1, len(sizes) * max(1, ranges))
        except BaseException:
            self.kill()
            raise
        finally:
            ours.close()

    def source(self, index: int = 0) -> Any:
        """What `Device.import_memory` takes."""
        from kvsidecar.device.base import CudaIpcSource, MemfdSource

        return MemfdSource(self.fds[index]) if self.fds else CudaIpcSource(self.handles[index])

    def range_sources(self) -> list[RangesSource]:
        """What `Device.import_ranges` takes: all allocations."""
        from kvsidecar.device.base import RangesSource

        fds = iter(self.fds)
        return [RangesSource(tuple((next(fds), each) for each in parts(size, self._ranges))) for size in self._sizes]

    def sleep(self) -> None:
        """It unmaps its ranges, as an engine does that goes to sleep."""
        self._ask("sleep")

    def read(self, index: int = 0) -> npt.NDArray[np.uint8]:
        return np.frombuffer(bytes.fromhex(self._ask(f"read {index}")), np.uint8)

    def checksum(self, index: int = 0) -> str:
        return str(self._ask(f"checksum {index}"))

    def fill(self, index: int, seed: int) -> None:
        self._ask(f"fill {index} {seed}")

    def free_bytes(self) -> int:
        return int(self._ask("free"))

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        while self.fds:
            os.close(self.fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.returncode is None:
            self.kill()

    def _ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return self._reply()

    def _reply(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the exporter ended with exit code {self.process.wait()}; its error is above")
        return json.loads(line)


def parts(size: int, ranges: int) -> list[int]:
    """Bytes of the ranges of an allocation: one unit each, and the rest in the last one."""
    return [RANGE_BYTES] * (ranges - 1) + [size - RANGE_BYTES * (ranges - 1)]


# -- the process itself ------------------------------------------------------------------------------------------


class HostMemory:
    """Sealed memfds."""

    device = "host"

    def __init__(self, sizes: list[int], ranges: int) -> None:
        from kvsidecar.support import host_memory

        self.fds: list[int] = []
        self._views: list[npt.NDArray[np.uint8]] = []
        for nbytes in sizes:
            reserved = at = host_memory.mmap_at(None, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for each in parts(nbytes, ranges or 1):
                fd = os.memfd_create("engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.posix_fallocate(fd, 0, each)
                fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
                self.fds.append(fd)
                protection = mmap.PROT_READ | mmap.PROT_WRITE
                host_memory.mmap_at(at, each, protection, mmap.MAP_SHARED | MAP_FIXED, fd)
                at += each
            self._views.append(host_memory.as_array(reserved, nbytes))

    def share(self, channel: socket.socket) -> list[str]:
        socket.send_fds(channel, [b"."], self.fds)
        return []

    def write(self, index: int, content: npt.NDArray[np.uint8]) -> None:
        self._views[index][:] = content

    def read(self, index: int) -> npt.NDArray[np.uint8]:
        return self._views[index]

    def size(self, index: int) -> int:
        return self._views[index].nbytes

    def free_bytes(self) -> int:
        return 0

    def sleep(self) -> None:
        """Nothing is measured here."""


class CudaMemory:
    """Device memory, without torch."""

    def __init__(self, sizes: list[int], ordinal: int, ranges: int) -> None:
        from kvsidecar.support import cuda_driver

        self._driver = cuda_driver
        self._context = cuda_driver.CudaContext(ordinal)
        self.device = self._context.uuid
        self._ranges = ranges
        self._allocations = [
            (self._context.alloc_ranges(parts(nbytes, ranges)) if ranges else self._context.alloc(nbytes), nbytes)
            for nbytes in sizes
        ]

    def share(self, channel: socket.socket) -> list[str]:
        if self._ranges:
            fds = []
            for address, nbytes in self._allocations:
                assert not self._driver.is_legacy_ipc_capable(address)
                found = self._driver.physical_ranges(address, nbytes)
                assert [size for _, size in found] == parts(nbytes, self._ranges)
                fds += [self._driver.exported_fd(base) for base, _ in found]
            socket.send_fds(channel, [b"."], fds)
            for fd in fds:
                os.close(fd)
            return []
        for address, nbytes in self._allocations:
            assert self._driver.address_range(address) == (address, nbytes)
            assert self._driver.is_legacy_ipc_capable(address)
            assert self._driver.pointer_uuid(address) == self.device
        return [self._driver.ipc_handle(address).hex() for address, _ in self._allocations]

    def write(self, index: int, content: npt.NDArray[np.uint8]) -> None:
        self._context.copy_to_device(self._allocations[index][0], content)

    def read(self, index: int) -> npt.NDArray[np.uint8]:
        address, nbytes = self._allocations[index]
        content = np.empty(nbytes, np.uint8)
        self._context.copy_from_device(content, address)
        return content

    def size(self, index: int) -> int:
        return self._allocations[index][1]

    def free_bytes(self) -> int:
        return self._context.memory_info()[0]

    def sleep(self) -> None:
        for address, nbytes in self._allocations:
            self._context.unmap_ranges(address, parts(nbytes, self._ranges))


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["host", "cuda"], required=True)
    parser.add_argument("--bytes", type=int, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ordinal", type=int, default=0)
    parser.add_argument("--ranges", type=int, default=0)
    parser.add_argument("--socket-fd", type=int, required=True)
    options = parser.parse_args()
    memory: HostMemory | CudaMemory
    if options.kind == "host":
        memory = HostMemory(options.bytes, options.ranges)
    else:
        memory = CudaMemory(options.bytes, options.ordinal, options.ranges)
    for index, nbytes in enumerate(options.bytes):
        memory.write(index, pattern(options.seed + index, nbytes))
    with socket.socket(fileno=options.socket_fd) as channel:
        handles = memory.share(channel)
        say({"kind": options.kind, "device": memory.device, "handles": handles})
    for line in sys.stdin:
        match line.split():
            case ["checksum", index]:
                say(hashlib.blake2b(memory.read(int(index)).tobytes()).hexdigest())
            case ["read", index]:
                say(memory.read(int(index)).tobytes().hex())
            case ["read", index, offset, nbytes]:
                say(memory.read(int(index))[int(offset) : int(offset) + int(nbytes)].tobytes().hex())
            case ["fill", index, seed]:
                memory.write(int(index), pattern(int(seed), memory.size(int(index))))
                say(True)
            case ["free"]:
                say(memory.free_bytes())
            case ["sleep"]:
                memory.sleep()
                say(True)
            case ["exit"]:
                return
            case unknown:
                sys.exit(f"unknown command {unknown}")


if __name__ == "__main__":
    main()
