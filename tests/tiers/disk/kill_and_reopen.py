"""Kills a process that reads, writes, evicts and removes shards in several threads, again and again, and reads what the
next one finds.

Run by `tests.tiers.disk.test_kills` in a process of its own: it forks, which is safe only without other threads. It
prints how the reads ended, and how many of those that were done gave wrong bytes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import sys
import threading
import traceback
from collections import Counter
from pathlib import Path

from kvsidecar.cache.records import Records
from kvsidecar.support import log
from kvsidecar.tiers.backend import ReadEnd
from kvsidecar.tiers.disk import backend as backend_module
from kvsidecar.tiers.disk.backend import DiskBackend
from tests.tiers.support import PAGE, content, key, memory, space

CAPACITY, SLAB = 40 * PAGE, 8 * PAGE
SPACES = [space(), space("two", nbytes=2 * PAGE - 100)]
NAMES = range(60)
THREADS = 3
CONTENT = {(at, name): content(of, name) for at, of in enumerate(SPACES) for name in NAMES}


def open_tier(path: Path) -> DiskBackend:
    return DiskBackend(path, CAPACITY, slab_bytes=SLAB)


def read(tier: DiskBackend, at: int, names: list[int]) -> Counter[str]:
    """How the reads ended, by name; ``WRONG`` those that are done with wrong bytes."""
    slots = memory(SPACES[at], len(names))
    ends = tier.read(SPACES[at], [key(name) for name in names], slots)
    return Counter(
        "WRONG" if end is ReadEnd.DONE and slot != CONTENT[at, name] else end.name
        for name, slot, end in zip(names, slots, ends, strict=True)
    )


def live(tier: DiskBackend, progress: memoryview, thread: int, rng: random.Random) -> None:
    """Until killed."""
    while True:
        progress[thread] += 1
        at, first, count = rng.randrange(len(SPACES)), rng.choice(NAMES), rng.choice((1, 1, 2, 3, 12))
        names = [each % len(NAMES) for each in range(first, first + count)]
        choice = rng.random()
        if choice < 0.7:
            slots = memory(SPACES[at], len(names))
            for slot, name in zip(slots, names, strict=True):
                slot[:] = CONTENT[at, name]
            tier.write(SPACES[at], [key(name) for name in names], slots, [None] * len(names))
        elif choice < 0.98:
            progress[THREADS] += read(tier, at, names)["WRONG"]
        else:
            tier.forget(SPACES[at].namespace)
            progress[THREADS + 1] += 1


def run_threads(path: Path, progress: memoryview, seed: float) -> None:
    tier = open_tier(path)

    def work(thread: int) -> None:
        try:
            live(tier, progress, thread, random.Random(seed + thread))
        except BaseException:  # noqa: BLE001 - the parent sees that it has ended
            traceback.print_exc()
            os._exit(1)

    for thread in range(1, THREADS):
        threading.Thread(target=work, args=[thread], daemon=True).start()
    work(0)


def kill_at_random(path: Path, progress: memoryview, rng: random.Random) -> None:
    """Let a process live for a few steps, then kill it wherever it is."""
    progress[0] = 0
    until, seed = rng.randrange(1, 30), rng.random()
    pid = os.fork()
    if not pid:
        run_threads(path, progress, seed)
    while progress[0] < until and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        os.sched_yield()
    for _ in range(rng.randrange(2000)):
        pass
    os.kill(pid, signal.SIGKILL)
    if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
        sys.exit("the process has ended by itself")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--never-unseal", action="store_true", help="a bug: an extent is written while its old record is sealed"
    )
    parser.add_argument("--never-verify", action="store_true", help="a bug: the checksum of a read always fits")
    options = parser.parse_args()
    log.configure(log_format="text", level="error")
    if options.never_unseal:
        Records.unseal = lambda *_: None  # type: ignore[method-assign]
    if options.never_verify:
        backend_module._checksum = lambda *_: 1
    progress = memoryview(mmap.mmap(-1, PAGE)).cast("Q")
    rng = random.Random(options.seed)
    ends: Counter[str] = Counter()
    for _ in range(options.kills):
        kill_at_random(options.directory, progress, rng)
        tier = open_tier(options.directory)
        kept = tier.stats().kept_blocks
        found: Counter[str] = Counter()
        for at in range(len(SPACES)):
            found += read(tier, at, list(NAMES))
        assert found.total() - found["MISS"] <= kept
        ends += found
        ends["KEPT"] += kept
        tier.close()
    ends["WRONG"] += progress[THREADS]
    print(json.dumps({**dict.fromkeys(("DONE", "CORRUPT", "WRONG"), 0), **ends, "removes": progress[THREADS + 1]}))


if __name__ == "__main__":
    main()
