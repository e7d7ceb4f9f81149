"""Kills a process that stores and evicts blocks with real bytes, again and again, and compares what the next one finds.

Run by `tests.pool.test_record_table` in a process of its own: it forks, which is safe only without other threads. It
prints how many blocks were compared, and how many of them were wrong.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import sys
import traceback

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.arrays import Words
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.records import Records
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import Space
from kvsidecar.pool.record_table import RecordTable, TableFacts, map_table
from tests.cache.support import PAGE, key, namespace, open_space

SLAB = 8 * PAGE
POOL = 5 * SLAB
FACTS = TableFacts(POOL, SLAB, "small", "this boot")
SHARDS = {"one": (1,), "two": (1, 2)}
"""Name of each space, and its shards in pages."""
NAMES = range(60)
PIECES = 4
"""Copies that fill one page."""

Bytes = npt.NDArray[np.uint8]
CONTENT: dict[tuple[str, int, int], Bytes] = {
    (space, name, shard): np.frombuffer(random.Random(f"{space} {name} {shard}").randbytes(pages * PAGE), np.uint8)
    for space, shards in SHARDS.items()
    for name in NAMES
    for shard, pages in enumerate(shards)
}


def start(words: Words) -> BlockCache:
    return BlockCache(SlotAllocator(POOL, SLAB), records=RecordTable.open(words, FACTS).records)


def live(words: Words, pool: Bytes, progress: memoryview, rng: random.Random) -> None:
    """Store, load, evict and clear until killed."""
    cache = start(words)
    spaces = {name: open_space(cache, name, shards=shards) for name, shards in SHARDS.items()}
    while True:
        progress[0] += 1
        name = rng.choice(list(SHARDS))
        first, count = rng.choice(NAMES), rng.choice((1, 1, 2, 3, 12))
        names = [each % len(NAMES) for each in range(first, first + count)]
        choice = rng.random()
        if choice < 0.9:
            for shard in range(len(SHARDS[name])):
                store(cache, pool, spaces[name], name, shard, names, abort=rng.random() < 0.05)
        elif choice < 0.99:
            grant = cache.begin_load([(spaces[name], 0, [key(names[0])])], None, 0.0)
            if isinstance(grant, LoadGrant):
                cache.end_load(grant)
        else:
            cache.clear(namespace(name), sweep=2)
            progress[1] += 1


def store(
    cache: BlockCache, pool: Bytes, space: Space, name: str, shard: int, names: list[int], *, abort: bool
) -> None:
    grant = cache.begin_store([(space, shard, [key(each) for each in names])])
    if not isinstance(grant, StoreGrant):
        return
    (part,) = grant.parts
    for index, slot in zip(part.index.tolist(), part.slots.tolist(), strict=True):
        content = CONTENT[name, names[index], shard]
        for piece in range(0, len(content), PAGE // PIECES):
            pool[slot + piece : slot + piece + PAGE // PIECES] = content[piece : piece + PAGE // PIECES]
    (cache.abort_all if abort else cache.seal_all)(grant)


def compare(words: Words, pool: Bytes) -> tuple[int, int]:
    """How many blocks the next run would find, and how many of them have other bytes than were stored."""
    cache = start(words.copy())
    found = wrong = 0
    for name, shards in SHARDS.items():
        space = cache.find_space(namespace(name), 0)
        if space is None:
            continue
        rows = space.blocks.index.find(space.blocks.index.keys([key(each) for each in NAMES])).tolist()
        for each, row in zip(NAMES, rows, strict=True):
            if row < 0:
                continue
            found += 1
            slots = space.blocks.slots[:, row].tolist()
            wrong += any(
                not np.array_equal(pool[slot : slot + pages * PAGE], CONTENT[name, each, shard])
                for shard, (slot, pages) in enumerate(zip(slots, shards, strict=True))
            )
    assert found == cache.adopted.kept_blocks
    return found, wrong


def kill_at_random(words: Words, pool: Bytes, progress: memoryview, rng: random.Random) -> None:
    """Let a process live for a few steps, then kill it wherever it is."""
    progress[0] = 0
    until = rng.randrange(1, 40)
    seed = rng.random()
    pid = os.fork()
    if not pid:
        try:
            live(words, pool, progress, random.Random(seed))
        except BaseException:  # noqa: BLE001 - the parent sees that it has ended
            traceback.print_exc()
        os._exit(1)
    while progress[0] < until and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        os.sched_yield()
    for _ in range(rng.randrange(200)):
        pass
    os.kill(pid, signal.SIGKILL)
    if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
        sys.exit("the process has ended by itself")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--until-wrong", action="store_true", help="no more kills than it takes to find wrong bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--never-unseal", action="store_true", help="a bug: a slot is filled while its old record is sealed"
    )
    options = parser.parse_args()
    if options.never_unseal:
        Records.unseal = lambda *_: None  # type: ignore[method-assign]
    files = [os.memfd_create(name) for name in ("pool", "table")]
    os.ftruncate(files[0], POOL)
    os.ftruncate(files[1], RecordTable.file_bytes(FACTS))
    pool = np.frombuffer(mmap.mmap(files[0], POOL), np.uint8)
    words = map_table(files[1])
    RecordTable.create(words, FACTS)
    progress = memoryview(mmap.mmap(-1, PAGE)).cast("Q")
    rng = random.Random(options.seed)
    found = wrong = 0
    for _ in range(options.kills):
        kill_at_random(words, pool, progress, rng)
        more, bad = compare(words, pool)
        found, wrong = found + more, wrong + bad
        if wrong and options.until_wrong:
            break
    print(json.dumps({"found": found, "wrong": wrong, "clears": progress[1]}))


if __name__ == "__main__":
    main()
