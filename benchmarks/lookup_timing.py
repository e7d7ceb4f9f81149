"""Does the time of a lookup tell a tenant what another one has stored? (Row 41 of docs/faults.md.)

python benchmarks/lookup_timing.py [--rounds 5000] [--hashes 64] [--shares]

Tenant B asks, in a random order that is new in each round: its own namespace about hashes that nobody stored; its own
namespace about the hashes of tenant A's blocks; a namespace that does not exist; and, for comparison, about blocks of
its own. Printed are the medians, and the Kolmogorov-Smirnov distance of each from the first with its critical value
at 1 %: below it, the two distributions cannot be told apart by this many lookups. ``--shares``: half of the pool is
guaranteed to tenant A, and A's blocks expire.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvsidecar.bench.engine import attached
from kvsidecar.bench.layouts import Form, Layout
from kvsidecar.bench.processes import private_daemon
from kvsidecar.client import Blocks, Client, LookupMode
from kvsidecar.support.units import MiB

LAYOUT = Layout("lookup-timing", Form.CONTIGUOUS, 1, 64, "blocks that take no room")
TENANT_A, TENANT_B, NOBODY = "tenant-a", "tenant-b", "tenant-x"  # of one length: the messages are equally long
SHARES = (
    f'[{{name = "a", namespaces = ["{LAYOUT.namespace(TENANT_A).model}"], guaranteed = "50%", ttl = 86400, '
    "idle_ttl = 86400}]"
)


def hashes(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]


@contextmanager
def attached_and_stored(socket: str, tenant: str, names: list[bytes]) -> Iterator[Client]:
    layout = replace(LAYOUT, num_blocks=len(names))
    with attached(socket, layout, None, run=tenant, rng=np.random.default_rng(0)) as engine:
        engine.finish(engine.client.store([Blocks(0, names, list(range(len(names))))]))
        yield engine.client


def ks_distance(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """The largest difference between the two empirical distribution functions."""
    at = np.sort(np.concatenate([one, other]))
    below = [np.searchsorted(np.sort(each), at, side="right") / len(each) for each in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


def measure(socket: str, rounds: int, count: int) -> dict[str, npt.NDArray[np.float64]]:
    """Seconds of each lookup, by case."""
    cases = {
        "nobody's hashes": (TENANT_B, hashes("x", count)),
        "another tenant's hashes": (TENANT_B, hashes("a", count)),
        "an unknown namespace": (NOBODY, hashes("a", count)),
        "another's namespace, nobody's hashes": (TENANT_A, hashes("x", count)),
        "its own blocks": (TENANT_B, hashes("b", count)),
    }
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    order = list(cases)
    with (
        attached_and_stored(socket, TENANT_A, hashes("a", count)),
        attached_and_stored(socket, TENANT_B, hashes("b", count)) as tenant_b,
    ):
        for number in range(-rounds // 10, rounds):  # the first tenth warms up
            random.shuffle(order)
            for case in order:
                tenant, names = cases[case]
                namespace = LAYOUT.namespace(tenant)
                started = time.perf_counter()
                found = tenant_b.lookup(namespace, {0: names}, mode=LookupMode.BITMAP)
                taken = time.perf_counter() - started
                if found.groups[0].hits != (count if case == "its own blocks" else 0):
                    raise RuntimeError(f"{case}: {found.groups[0].hits} hits")
                if number >= 0:
                    seconds[case].append(taken)
    return {case: np.array(taken) for case, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--hashes", type=int, default=64, help="of one lookup")
    parser.add_argument("--shares", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
        flags = ["--slab-size", "1MiB", "--chunk-size", "1MiB", *(["--share", SHARES] if options.shares else [])]
        with private_daemon(Path(directory), "host", 4 * MiB, flags) as daemon:
            seconds = measure(daemon.socket, options.rounds, options.hashes)
    critical = 1.63 * (2 / options.rounds) ** 0.5  # two samples of the same size, 1 %
    table = Table("lookup of", "median us", "p95 us", "KS distance", title=f"critical distance {critical:.3f}")
    base = seconds["nobody's hashes"]
    for case, taken in seconds.items():
        median, late = (float(np.quantile(taken, q)) * 1e6 for q in (0.5, 0.95))
        table.add_row(case, f"{median:.1f}", f"{late:.1f}", f"{ks_distance(base, taken):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
