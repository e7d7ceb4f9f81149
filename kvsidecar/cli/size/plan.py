"""Computes the pool, disk and limits that a model and its users need on a machine. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvsidecar.cli.size.kv import KV
from kvsidecar.support.memory_limits import bookkeeping_bytes, page_table_bytes
from kvsidecar.support.units import GiB, MiB, format_size

LOST_SHARE: Final = 0.03
"""Most of the pool that is lost to rounding (docs/operating.md, Memory)."""
LARGEST_SHARD_SHARE: Final = 8
"""A pool is at least this many times as large as a block's shard."""
DAEMON_BYTES: Final = GiB
"""Least memory of the daemon. It has `IDLE_BYTES`, with what its clients may take while they behave, and the tables of
the blocks."""
IDLE_BYTES: Final = 256 * MiB
BLOCK_BYTES: Final = 180
"""Size of the tables for each block, and once more for each of its shards, with its record of 128 bytes in the table of
a kept pool. A restart that takes all of them over needs no more (docs/benchmarks.md, Scale of the cache)."""
COPIER_BYTES: Final = 100 * MiB
"""Memory of a copier besides the pool, the same as in the systemd unit."""
FRESH_MS_PER_GIB: Final = 287.0
"""Time to pin memory that the machine has never used, measured on an H200's host (docs/benchmarks.md, Pinning)."""
USED_MS_PER_GIB: Final = 43.0
"""Time to pin memory that was used before, measured there."""
HUGE_PAGE: Final = 2 * MiB


@dataclass(frozen=True, slots=True)
class Demand:
    """The sessions whose KV is to be kept."""

    context: int
    """Tokens of a session."""
    sessions: int
    shared: int = 0
    """Tokens at the start of every session that are the same, such as a system prompt."""
    retention: int | None = 0
    """See `kv.KVGroup.blocks_of`."""


@dataclass(frozen=True, slots=True)
class Machine:
    gpus: int
    host_bytes: int
    """Memory that the daemon may take: that of the machine, minus what the engines and the system need."""
    disk_bytes: int | None = None
    """Free space on a local disk; None: there is none."""
    huge_pages: bool = True
    """Whether the pool gets huge pages, of any kind."""
    pin_ms_per_gib: float | None = None
    """Measured time to pin; None: the times of docs/benchmarks.md."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The recommendation. Sizes in bytes."""

    session_bytes: int
    session_blocks: int
    wanted_bytes: int
    """Size of a pool for all sessions."""
    pool_bytes: int
    memory_bytes: int
    """Limit for the daemon and its copiers, the pool included."""
    disk_bytes: int
    """Size of the disk tier. 0: none, because the pool has room for all, or there is no disk."""
    disk_wanted_bytes: int
    """Size of a disk tier for all sessions."""
    sessions_in_pool: int
    sessions_kept: int
    """Sessions in the pool or on the disk."""
    pin_seconds: tuple[float, float]
    """Time to pin memory that was used before, and memory that was never used."""

    @property
    def huge_page_count(self) -> int:
        return -(-self.pool_bytes // HUGE_PAGE)


def beside(pool_bytes: int, gpus: int, *, huge_pages: bool, tables: float = 0.0) -> int:
    """Memory that the daemon and its copiers need in addition to the pool.

    Args:
        tables: bytes of the tables for each byte of the pool, see `table_share`.
    """
    page_tables = 0 if huge_pages else page_table_bytes(pool_bytes) * (gpus + 1)
    daemon = max(DAEMON_BYTES, IDLE_BYTES + int(pool_bytes * tables))
    return daemon + gpus * (bookkeeping_bytes(pool_bytes) + COPIER_BYTES) + page_tables


def table_share(kv: KV, demand: Demand) -> float:
    """Size of the tables for the blocks of these sessions, as a fraction of the blocks' size."""
    blocks = [(each, each.blocks_of(demand.context, demand.retention)) for each in kv.groups]
    tables = sum(count * BLOCK_BYTES * (1 + each.shards) for each, count in blocks)
    return tables / max(1, sum(count * each.block_bytes for each, count in blocks))


def plan(kv: KV, demand: Demand, machine: Machine) -> Plan:
    """The plan. Raises ValueError: not even one session fits the machine's memory; the text names both sizes."""
    whole, shared = (kv.nbytes(tokens, demand.retention) for tokens in (demand.context, demand.shared))
    own = max(1, whole - shared)

    def fits(nbytes: float) -> int:
        return max(0, min(demand.sessions, int((nbytes - shared) // own)))

    everything = shared + demand.sessions * own
    wanted = _up(max(everything / (1 - LOST_SHARE), kv.largest_shard * LARGEST_SHARD_SHARE))
    tables = table_share(kv, demand)
    room = _largest_pool(machine, tables)
    pool = min(wanted, room)
    least = _up(max(whole / (1 - LOST_SHARE), kv.largest_shard * LARGEST_SHARD_SHARE))
    if pool < least:
        raise ValueError(
            f"one session needs a pool of {format_size(least)}, and the memory has room for {format_size(room)} beside "
            "the daemon: give it more with --host-memory, or a shorter --context"
        )
    disk_wanted = 0 if pool >= wanted else _up(everything * 1.02)  # its allocation is by extents
    disk = min(disk_wanted, machine.disk_bytes or 0) // (64 * MiB) * (64 * MiB)
    in_pool = fits(pool * (1 - LOST_SHARE))
    rates = (machine.pin_ms_per_gib,) * 2 if machine.pin_ms_per_gib else (USED_MS_PER_GIB, FRESH_MS_PER_GIB)
    slow, fast = (pool / GiB * rate / 1000 for rate in reversed(rates))
    return Plan(
        session_bytes=whole,
        session_blocks=kv.blocks(demand.context, demand.retention),
        wanted_bytes=wanted,
        pool_bytes=pool,
        memory_bytes=_up(pool + beside(pool, machine.gpus, huge_pages=machine.huge_pages, tables=tables)),
        disk_bytes=disk,
        disk_wanted_bytes=disk_wanted,
        sessions_in_pool=in_pool,
        sessions_kept=max(in_pool, fits(disk)),
        pin_seconds=(fast, slow),
    )


def _up(nbytes: float) -> int:
    """Round up to whole GiB, or below one to whole 64 MiB."""
    step = GiB if nbytes > GiB else 64 * MiB
    return -int(-nbytes // step) * step


def _largest_pool(machine: Machine, tables: float) -> int:
    """The largest pool that fits the machine with what is needed besides it: a whole number of `_up`'s steps."""
    low, high = 0, machine.host_bytes // (64 * MiB)
    while low < high:
        middle = (low + high + 1) // 2
        nbytes = middle * 64 * MiB
        if nbytes + beside(nbytes, machine.gpus, huge_pages=machine.huge_pages, tables=tables) <= machine.host_bytes:
            low = middle
        else:
            high = middle - 1
    nbytes = low * 64 * MiB
    return nbytes // GiB * GiB if nbytes > GiB else nbytes


# -- what to paste -----------------------------------------------------------------------------------------------------


def size_text(nbytes: int, suffix: str = "iB") -> str:
    """A whole number of GiB or MiB, as the daemon reads it: ``512GiB``. For Kubernetes with the suffix ``i``, for
    systemd without one."""
    unit, letter = (GiB, "G") if nbytes % GiB == 0 else (MiB, "M")
    return f"{nbytes // unit}{letter}{suffix}"


def toml(found: Plan) -> str:
    """Lines of /etc/kvsidecar/kvsidecar.toml."""
    lines = [f'pool_size = "{size_text(found.pool_bytes)}"']
    if found.disk_bytes:
        lines += ['disk_dir = "/var/cache/kvsidecar"', f'disk_size = "{size_text(found.disk_bytes)}"']
    return "\n".join(lines)


def systemd(found: Plan) -> str:
    """A drop-in, for units whose memory is to be limited."""
    return f"[Service]\nMemoryMax={size_text(found.memory_bytes, '')}"


def helm(found: Plan) -> str:
    """The chart's values."""
    lines = ["pool:", f"  size: {size_text(found.pool_bytes)}", f'  memory: "{size_text(found.memory_bytes, "i")}"']
    if found.disk_bytes:
        lines += [
            "tiers:",
            "  disk:",
            f"    size: {size_text(found.disk_bytes)}",
            "    volume: {hostPath: {path: /var/cache/kvsidecar, type: DirectoryOrCreate}}",
        ]
    return "\n".join(lines)


def sysctl(found: Plan) -> str:
    """Reserves huge pages for the pool: a line of /etc/sysctl.d/kvsidecar.conf."""
    return f"vm.nr_hugepages = {found.huge_page_count}"


PASTED: Final[dict[str, tuple[str, Callable[[Plan], str]]]] = {
    "toml": ("/etc/kvsidecar/kvsidecar.toml", toml),
    "systemd": ("systemctl edit kvsidecar, only if its memory is to be limited", systemd),
    "helm": ("values of the Helm chart", helm),
    "sysctl": ("/etc/sysctl.d/kvsidecar.conf, only for huge pages of its own", sysctl),
}
"""Where the lines belong, and the function that makes them, by their name in the JSON."""


def as_json(kv: KV, found: Plan) -> dict[str, Any]:
    """All figures, and the lines to paste."""
    return {
        "kv": {
            "token_bytes": kv.token_bytes,
            "block_tokens": kv.block_tokens,
            "groups": [
                {
                    "kind": each.kind.value,
                    "layers": each.layers,
                    "block_tokens": each.block_tokens,
                    "block_bytes": each.block_bytes,
                    "shards": each.shards,
                    "shard_bytes": each.layers * each.page_bytes,
                    "window": each.window,
                }
                for each in kv.groups
            ],
        },
        "session_bytes": found.session_bytes,
        "session_blocks": found.session_blocks,
        "wanted_pool_bytes": found.wanted_bytes,
        "pool_bytes": found.pool_bytes,
        "memory_limit_bytes": found.memory_bytes,
        "huge_pages_2mib": found.huge_page_count,
        "disk_bytes": found.disk_bytes,
        "wanted_disk_bytes": found.disk_wanted_bytes,
        "sessions_in_pool": found.sessions_in_pool,
        "sessions_kept": found.sessions_kept,
        "pin_seconds": {"memory_used_before": found.pin_seconds[0], "memory_never_used": found.pin_seconds[1]},
        "paste": {name: make(found) for name, (_, make) in PASTED.items()},
    }
