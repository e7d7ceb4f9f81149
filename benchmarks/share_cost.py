"""What shares and ``--eviction rhythm`` cost: the steps of stores, loads and lookups, without, with, and before them.

    git worktree add ../old COMMIT
    python -m benchmarks.share_cost --old ../old [--rounds 20] [--namespaces 10000]

The cache alone, in a full pool, so that every store evicts. "rhythm" counts as if LRU hit nothing, so that its own
order holds; "waiting" is the same policy in LRU's order. Each variant has a process of its own; they take turns, and
times are of the processor. Printed are the medians over the rounds, and the ratio to "off" of the same round. With
"old" the first column is that of the older version, and the others are compared with it.
"""

from __future__ import annotations

import argparse
import resource
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.turns import Script, python_of

JOBS = {"1": 1, "32": 32, "512": 512}
"""Blocks per job."""

CHILD = """
import hashlib, json, sys, time
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.types import LookupMode, Namespace

variant, count = sys.argv[1], int(sys.argv[2])
PAGE, BLOCKS = 4096, 1 << 16
more, now = {}, 0.0
if variant in ("rhythm", "waiting"):
    from kvsidecar.types import Eviction
    more["eviction"] = Eviction.RHYTHM
cache = BlockCache(SlotAllocator(BLOCKS * PAGE, 1024 * PAGE), **more)
if variant == "rhythm":
    rhythm = cache._table.rhythm
    count = rhythm.count
    rhythm.count = lambda hit, lru_hit, known, pools: count(hit, 0, known, pools)
    rhythm.count(0, 0, 1, 100.0)
    assert rhythm.on

def covers(model):
    return lambda namespace: namespace.model == model

if variant in ("two", "many"):
    from kvsidecar.cache.shares import ShareLimits
    half = BLOCKS * PAGE // 2
    cache.set_shares([ShareLimits("0", covers("0"), half), ShareLimits("1", covers("1"), half // 2, half)])

def name(number):
    return Namespace(str(number), "bf16", "l", 16, 1, 1, "sha256")

spaces = [cache.open_space(name(number), 0, 1, 0, PAGE) for number in range(count if variant == "many" else 2)]
serial = 0

def fresh(number):
    global serial
    serial += number
    return b"".join(hashlib.sha256(b"%d" % each).digest() for each in range(serial - number, serial))

def pass_time():  # so that blocks get into different classes
    global now
    for _ in range(40 if variant in ("rhythm", "waiting") else 0):
        now += 0.5
        cache.expire(now)

def store(space, hashes):
    cache.seal_all(cache.begin_store([(space, 0, hashes)]))

if variant == "many":
    for space in spaces:
        store(space, fresh(5))
for _ in range(BLOCKS // 512):
    store(spaces[0], fresh(512))
    pass_time()
print("null", flush=True)
for line in sys.stdin:
    size, rounds = json.loads(line)
    space, jobs = spaces[0], [fresh(size) for _ in range(rounds)]
    took = {}
    pass_time()
    start = time.process_time()
    for hashes in jobs:  # an engine looks up what it stores
        cache.lookup_and_lease([(space, hashes)], LookupMode.PREFIX, now, 10, "o")
    took["miss"] = time.process_time() - start
    start = time.process_time()
    for hashes in jobs:
        store(space, hashes)
    took["store"] = time.process_time() - start
    start = time.process_time()
    for hashes in jobs:
        cache.touch([(space, hashes)])
    took["touch"] = time.process_time() - start
    pass_time()
    start = time.process_time()
    for hashes in jobs:
        cache.lookup(space, hashes, LookupMode.PREFIX)
    took["lookup"] = time.process_time() - start
    start = time.process_time()
    for hashes in jobs:
        lease, _ = cache.lookup_and_lease([(space, hashes)], LookupMode.PREFIX, now, 10, "o")
        cache.release(lease.id)
    took["lease"] = time.process_time() - start
    pass_time()
    start = time.process_time()
    for hashes in jobs:
        cache.end_load(cache.begin_load([(space, 0, hashes)], None, now))
    took["load"] = time.process_time() - start
    print(json.dumps({each: 1e6 * seconds / rounds for each, seconds in took.items()}), flush=True)
"""


def resident(child: Script) -> int:
    fields = Path(f"/proc/{child.process.pid}/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--old", type=Path, help="a checkout of an older version")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--namespaces", type=int, default=10_000)
    given = options.parse_args()
    here = Path(__file__).parents[1]
    variants = {"off": here, "rhythm": here, "waiting": here, "two": here, "many": here}
    if given.old:
        variants = {"old": given.old.resolve(), **variants}
    base = next(iter(variants))
    with ExitStack() as stack:
        children = {
            variant: Script(stack, python_of(tree), CHILD, variant, given.namespaces)
            for variant, tree in variants.items()
        }
        for child in children.values():
            child.answer()  # it is ready
        print(f"{'':14}" + "".join(f"{variant:>18}" for variant in variants))
        for label, size in JOBS.items():
            count = max(20, 8192 // size // 4)
            rounds = [
                {variant: child.ask(size, count) for variant, child in children.items()} for _ in range(given.rounds)
            ]
            for step in rounds[0][base]:
                row = f"{step + ' ' + label:14}"
                for variant in variants:
                    time = median([each[variant][step] for each in rounds])
                    share = median([each[variant][step] / each[base][step] for each in rounds])
                    row += f"{time:10.1f} us {share:4.2f}"
                print(row, flush=True)
        print(f"{'resident':14}" + "".join(f"{resident(child) >> 20:15} MiB" for child in children.values()))


if __name__ == "__main__":
    main()
