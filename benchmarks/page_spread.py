"""Small rows in little and in much GPU memory, own and imported: how the pages under them change a pitched copy.

    python -m benchmarks.page_spread

Random blocks of 160 rows of 4 KiB, one pitched copy a block, no daemon. Each row of a block lies in another page as
soon as a row of all blocks fills one. ``own``: memory of this process. ``whole pages`` and ``as is``: of another
process, which exports an allocation of a multiple of 2 MiB, or of just the bytes. GB/s, store / load, median of five.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from benchmarks import copy_methods
from kvsidecar.bench.driver import Cuda
from kvsidecar.copier.copy_plan import MAX_PITCHED
from kvsidecar.device.base import CudaIpcSource, Device
from kvsidecar.device.cuda.platform import CudaPlatform
from kvsidecar.support import host_memory
from kvsidecar.support.memory_limits import THP_BYTES, PageKind, Pages
from kvsidecar.support.units import GiB, KiB, MiB
from kvsidecar.types import Direction

ROWS, ROW_BYTES, JOB = 160, 4 * KiB, 256
COUNTS = (64, 256, 1024, 1021, 4096, 4001)
POOL = GiB


def main() -> None:
    if sys.argv[1:2] == ["--export"]:
        export(int(sys.argv[2]))
        return
    platform = CudaPlatform()
    device = platform.device(platform.device_uuids()[0])
    pages = Pages(PageKind.THP, THP_BYTES)
    pool = host_memory.map_file(host_memory.create_file(POOL, pages), POOL, pages)
    host_memory.populate(pool, POOL, pages.kind)
    platform.pin(pool, POOL)
    streams = {direction: device.open_stream(direction) for direction in Direction}

    def measured(address: int, count: int) -> str:
        copy_methods.NUM_BLOCKS = count
        blocks = np.random.default_rng(0).permutation(count)[:JOB].astype(np.uint64)
        copies = copy_methods.copies_of(address, blocks, np.arange(len(blocks), dtype=np.uint64), ROWS, ROW_BYTES)
        calls = copy_methods.calls_of(copies, MAX_PITCHED, batched=False)
        return " / ".join(f"{copy_methods.measure(streams[each], pool, calls):.1f}" for each in Direction)

    print(f"{'blocks':>6} {'MiB':>8} {'own':>14} {'whole pages':>14} {'as is':>14}")
    for count in COUNTS:
        nbytes = count * ROWS * ROW_BYTES
        whole = -(-nbytes // (2 * MiB)) * 2 * MiB
        own = measured(device.allocate(whole).address, count)
        cells = [imported(device, each, count, measured) for each in (whole, nbytes)]
        print(f"{count:>6} {nbytes / MiB:>8.1f}" + "".join(f" {cell:>14}" for cell in (own, *cells)), flush=True)


def imported(device: Device, nbytes: int, count: int, measured: object) -> str:
    assert callable(measured)
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.page_spread", "--export", str(nbytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        memory = device.import_memory(CudaIpcSource(bytes.fromhex(child.stdout.readline())))
        try:
            return str(measured(memory.address, count))
        finally:
            device.release_memory(memory)
            child.stdin.close()


def export(nbytes: int) -> None:
    cuda = Cuda()
    print(cuda.ipc_handle(cuda.alloc(nbytes)).hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
