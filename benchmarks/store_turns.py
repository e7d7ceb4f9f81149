"""What `begin_store` takes in two versions of the code, in turns: the event loop does nothing else meanwhile.

    git worktree add ../old COMMIT
    python -m benchmarks.store_turns --old ../old [--rounds 20] [--stores 20] [--only large-mixed]

Each version runs in a process of its own, and both make the same stores of 32 blocks. "fresh": of one size, into a pool
with room. "evicting": the same where the pool is full. "nested-mixed": of three sizes that nest, into a full pool.
"large-mixed": of three sizes between a 300th and a 500th of the pool, at random; "large-groups": the same, all three in
each store; "large-one": one block a store. Printed are the median and the longest CPU time, in milliseconds, and new /
old of the same round: its median, and the first and the last tenth.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median

from benchmarks.turns import Script, python_of, ratio, turns

POOL = 1 << 30
SCENARIOS = {
    "fresh": [POOL >> 14],
    "evicting": [POOL >> 14],
    "nested-mixed": [POOL // 2000, POOL // 3000, POOL // 5000],
    "large-mixed": [POOL // 300, POOL // 400, POOL // 500],
    "large-groups": [POOL // 300, POOL // 400, POOL // 500],
    "large-one": [POOL // 300, POOL // 400, POOL // 500],
}

CHILD = """
import gc, hashlib, json, random, sys, time
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.types import Namespace

name, pool, sizes = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
rng, cache, count = random.Random(1), None, 0
gc.disable()

def begin():
    global cache, spaces
    cache = BlockCache(SlotAllocator(pool, 2 << 20))
    spaces = [
        cache.open_space(Namespace(str(group), "bf16", "l", 16, 1, 1, "sha256"), 0, 1, 0, size)
        for group, size in enumerate(sizes)
    ]

def store():
    global count
    hashes = [hashlib.sha256(str(count + each).encode()).digest() for each in range(1 if name == "large-one" else 32)]
    count += len(hashes)
    parts = [(rng.choice(spaces), 0, hashes)]
    if name == "large-groups":
        parts = [(space, 0, hashes[at :: len(spaces)]) for at, space in enumerate(spaces)]
    began = time.thread_time()
    grant = cache.begin_store(parts)
    took = time.thread_time() - began
    cache.seal_all(grant)
    return took

begin()
while name != "fresh" and count * min(sizes) < 3 * pool:
    store()
for line in sys.stdin:
    if name == "fresh":
        begin()
    (stores,) = json.loads(line)
    times = [store() for _ in range(stores)]
    gc.collect()
    print(json.dumps(times), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="root of the other version's tree")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--stores", type=int, default=20)
    parser.add_argument("--only", choices=SCENARIOS)
    args = parser.parse_args()
    for name in [args.only] if args.only else SCENARIOS:
        times: dict[str, list[float]] = {"old": [], "new": []}
        means: dict[str, list[float]] = {"old": [], "new": []}
        with ExitStack() as stack:
            sizes = json.dumps([-(-size // 4096) * 4096 for size in SCENARIOS[name]])
            sides = {
                side: Script(stack, python_of(tree), CHILD, name, POOL, sizes)
                for side, tree in (("old", args.old), ("new", Path.cwd()))
            }
            for counts, order in turns(args.rounds, ("old", "new")):
                for side in order:
                    took = sides[side].ask(args.stores)
                    if counts:
                        times[side] += took
                        means[side].append(mean(took))
        print(f"{name:13}", end="")
        for side, took in times.items():
            print(f" {side} {1000 * median(took):.3f} ms, longest {1000 * max(took):.1f};", end="")
        print(f" new / old {ratio(*means.values())}", flush=True)


if __name__ == "__main__":
    main()
