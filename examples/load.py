"""An engine that serves made-up conversations, so that there is something to see: python examples/load.py --seconds 60

Each turn of a conversation needs the KV cache of all turns before it. It looks for these blocks, in the pool and in the
slower tiers behind it, loads those that are there, "computes" the others, and stores them. There are as many
conversations as need half as much again as the pool, so that a disk behind it has something to do. Needs
kvsidecar-client, and a daemon on the host device.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time

from kvsidecar.client import (
    Blocks,
    Client,
    ClientError,
    GroupLayout,
    HostBuffer,
    LookupResult,
    Namespace,
    Region,
)

LAYERS, BLOCKS, BLOCK_TOKENS = 16, 256, 16
BLOCKS_OF_A_TURN, LONGEST = 8, 64
SMALLEST_ROW, LARGEST_ROW = 4096, 65536
"""Bytes of a layer's part of a block: up to 1 MiB a block, so that a large pool fills in minutes."""
WHOLE_POOL = 2048
"""Blocks that the pool has room for, if their size is between these."""
FETCH_SECONDS = 0.5
"""How long a turn waits for blocks that a slower tier has."""
PREFILL_RATE = 1000.0
"""Tokens a second that this engine would compute: the slower it is, the more is worth reading from a disk."""
USUAL_POOL = 64 << 20
"""Without a daemon to ask."""


def pool_bytes(client: Client) -> int:
    """Size of the daemon's pool."""
    try:
        return client.status().pool.total_bytes
    except ClientError:  # it does not run yet
        return USUAL_POOL


def look_up(client: Client, namespace: Namespace, prompt: list[bytes]) -> LookupResult:
    """What can be loaded, once the slower tiers have brought what they have."""
    end, lease = time.monotonic() + FETCH_SECONDS, None
    while True:
        left = max(0.0, end - time.monotonic())
        found = client.lookup(
            namespace, {0: prompt}, lease_seconds=10, fetch_seconds=left, prefill_rate=PREFILL_RATE, lease=lease
        )
        if not (found.coming and left):
            return found
        lease = found.lease
        time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--name", default="demo", help="of this engine")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="how long to run; without it, until stopped"
    )
    parser.add_argument(
        "--conversations", type=int, help="that go on at the same time; without it, as many as the pool asks for"
    )
    parser.add_argument("--turns-per-second", type=float, default=20.0)
    options = parser.parse_args()

    client = Client(name=options.name)
    pool = pool_bytes(client)
    row = min(LARGEST_ROW, max(SMALLEST_ROW, pool // WHOLE_POOL // LAYERS // 4096 * 4096))
    usual_length = (LONGEST + BLOCKS_OF_A_TURN) // 2
    conversations = options.conversations or max(2, pool * 3 // 2 // (LAYERS * row * usual_length))
    kv = HostBuffer(LAYERS * BLOCKS * row)
    namespace = Namespace(
        model="demo-model",
        dtype="bfloat16",
        kv_layout="LBNHC",
        block_size=BLOCK_TOKENS,
        tp_size=1,
        pp_size=1,
        hash_algorithm="sha256",
        extra=f"row={row}",
    )
    rows = Region(allocation=0, offset=0, row_stride=BLOCKS * row, block_stride=row, row_bytes=row, num_rows=LAYERS)
    layout = GroupLayout(group=0, num_blocks=BLOCKS, shard=0, num_shards=1, regions=(rows,))
    # With retry, it attaches whenever a daemon runs, and again after a restart.
    client.attach(instance=options.name, namespace=namespace, buffers=kv.kv_buffers(), groups=[layout], retry=True)
    print(f"{conversations} conversations, blocks of {LAYERS * row >> 10} KiB", flush=True)

    chance = random.Random(options.name)
    lengths = dict.fromkeys(range(conversations), 0)
    turns = hits = wanted = 0
    end, told = time.monotonic() + options.seconds, time.monotonic()
    while time.monotonic() < end:
        number = chance.randrange(conversations)
        if lengths[number] + BLOCKS_OF_A_TURN > LONGEST:
            lengths[number] = 0  # a new user, who begins with the same words
        prompt = [hashlib.sha256(f"{number}/{each}".encode()).digest() for each in range(lengths[number])]
        new = range(lengths[number], lengths[number] + BLOCKS_OF_A_TURN)
        lengths[number] += BLOCKS_OF_A_TURN
        if prompt:
            found = look_up(client, namespace, prompt)
            here = found.groups[0].hits if found.groups else 0
            hits, wanted = hits + here, wanted + len(prompt)
            if here:
                job = client.load(
                    [Blocks(group=0, hashes=prompt[:here], block_ids=list(range(here)))], lease=found.lease
                )
                client.wait([job], timeout=10)
            client.release(found.lease)
            # For the hit rate: an engine leaves out what its own cache has.
            client.report_prompts_nowait(namespace, len(prompt) * BLOCK_TOKENS, here * BLOCK_TOKENS)
        fresh = [hashlib.sha256(f"{number}/{each}".encode()).digest() for each in new]
        job = client.store([Blocks(group=0, hashes=fresh, block_ids=list(new))])
        client.wait([job], timeout=10)
        turns += 1
        if time.monotonic() > told + 5:
            told = time.monotonic()
            print(f"{turns} turns, {hits} of {wanted} blocks were hits", flush=True)
        time.sleep(chance.expovariate(options.turns_per_second))
    print(f"{turns} turns, {hits} of {wanted} blocks were hits", flush=True)
    client.close()


if __name__ == "__main__":
    main()
