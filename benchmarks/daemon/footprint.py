"""The daemon's memory besides its pool: on the GPU, and on the host with few and with many blocks."""

from __future__ import annotations

import re
from pathlib import Path

from kvsidecar.bench.layouts import TINY
from kvsidecar.bench.report import Measurement
from kvsidecar.bench.setting import Setting
from kvsidecar.support.units import KiB

MANY_BLOCKS = 131_072
JOB_BLOCKS, JOBS = 512, 16


def measure(setting: Setting, out: Measurement) -> None:
    # Before the daemon starts, if it is this run's own: what it takes of the GPU is the difference.
    free = setting.cuda.memory_info()[0] if setting.cuda is not None and setting.is_private else None
    daemon = setting.daemon()
    gpu_bytes = None
    if free is not None and setting.cuda is not None:
        gpu_bytes = free - setting.cuda.memory_info()[0]
    if daemon.pid is None or (before := beyond_pool(daemon.pid)) is None:
        out.add(gpu_bytes=gpu_bytes, host_bytes=None, bytes_per_block=None, blocks=None)
        out.note("the daemon's process cannot be seen from here: its host memory is not known")
        return
    with setting.engine(TINY) as engine:
        many = min(MANY_BLOCKS, setting.pool_bytes // 2 // TINY.block_bytes)
        for _ in range(0, many, JOB_BLOCKS * JOBS):
            engine.run(engine.stores(JOB_BLOCKS, JOBS), 4)
        blocks = engine.client.status().pool.blocks
        after = beyond_pool(daemon.pid) or before
        engine.clear()
    out.add(
        gpu_bytes=gpu_bytes,
        host_bytes=before,
        blocks=blocks,
        host_bytes_with_blocks=after,
        bytes_per_block=round((after - before) / blocks, 1) if blocks else None,
    )


def beyond_pool(pid: int) -> int | None:
    """Resident bytes of a process without its pool and without what engines share with it; None if it is not ours.

    The pool is shared memory, as is what engines share with it; or huge pages that no resident set counts.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    sizes = {name: int(size) * KiB for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return sizes.get("RssAnon", 0) + sizes.get("RssFile", 0)
