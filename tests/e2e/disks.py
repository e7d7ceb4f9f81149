"""Daemons with a disk behind their pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvsidecar.client import LookupResult
from tests.harness import SECONDS, SHARD_BYTES, DaemonProcess, Rank, done, eventually, hashes

POOL_BLOCKS = 8
_POOL = f"{POOL_BLOCKS * SHARD_BYTES >> 10}KiB"
SIZES = ("--pool-size", _POOL, "--slab-size", _POOL, "--chunk-size", _POOL)
TIER = "kvsidecar.tiers.process"


def patient(tier: str) -> str:
    """A flag: a machine may stand still for longer than the two seconds after which a read of a tier is late."""
    return f"--{tier}-deadline={SECONDS}"


def disk(directory: Path) -> tuple[str, ...]:
    """The flags of a disk of 256 blocks."""
    return ("--disk-dir", str(directory / "disk"), "--disk-size", f"{256 * SHARD_BYTES >> 10}KiB", patient("disk"))


def disk_daemon(directory: Path, *more: str, under: Sequence[str] = (), **environment: str) -> DaemonProcess:
    """A pool of eight blocks, and a disk of 256."""
    return DaemonProcess(directory, *SIZES, *disk(directory), *more, under=under, **environment)


def tier_metric(daemon: DaemonProcess, name: str, tier: str = "disk", **labels: str) -> float:
    text = ",".join(f'{key}="{value}"' for key, value in sorted({"tier": tier, **labels}.items()))
    return daemon.metric(f"kvsidecar_tier_{name}{{{text}}}")


def written(daemon: DaemonProcess) -> float:
    return tier_metric(daemon, "copied_blocks_total", direction="write")


def keep_on_disk(daemon: DaemonProcess, rank: Rank, *names: str) -> None:
    """Use blocks twice, and wait until they are on the disk."""
    eventually(lambda: tier_metric(daemon, "up") == 1)
    before = written(daemon)
    done(rank.store(*names))
    done(rank.load(*names, at=list(range(len(names)))))
    eventually(lambda: written(daemon) == before + len(names))


def tier_pid(daemon: DaemonProcess) -> int:
    (pid,) = daemon.children(TIER)
    return pid


def evict_all(rank: Rank) -> None:
    done(rank.store(*(f"other {each}" for each in range(POOL_BLOCKS))))


def fetched(rank: Rank, *names: str) -> LookupResult:
    """Look up until no more is coming."""
    results: list[LookupResult] = []

    def ended() -> bool:
        groups = {rank.layout.group: hashes(*names)}
        results.append(rank.client.lookup(rank.namespace, groups, fetch_seconds=60.0, prefill_rate=0.001))
        return not results[-1].coming

    eventually(ended)
    return results[-1]
