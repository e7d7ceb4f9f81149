"""An engine that serves made-up conversations, so that there is something to see: python examples/load.py --seconds 60

Each turn of a conversation needs the KV cache of all turns before it. It looks for these blocks, loads those that are
there, "computes" the others, and stores them. Needs kvsidecar-client, and a daemon on the host device.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time

from kvsidecar.client import Blocks, Client, GroupLayout, HostBuffer, Namespace, Region

LAYERS, BLOCKS, ROW = 16, 256, 4096
BLOCKS_OF_A_TURN, LONGEST = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--name", default="demo", help="of this engine")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="how long to run; without it, until stopped"
    )
    parser.add_argument("--conversations", type=int, default=50, help="that go on at the same time")
    parser.add_argument("--turns-per-second", type=float, default=20.0)
    options = parser.parse_args()

    kv = HostBuffer(LAYERS * BLOCKS * ROW)
    namespace = Namespace(
        model="demo-model",
        dtype="bfloat16",
        kv_layout="LBNHC",
        block_size=16,
        tp_size=1,
        pp_size=1,
        hash_algorithm="sha256",
    )
    rows = Region(allocation=0, offset=0, row_stride=BLOCKS * ROW, block_stride=ROW, row_bytes=ROW, num_rows=LAYERS)
    layout = GroupLayout(group=0, num_blocks=BLOCKS, shard=0, num_shards=1, regions=(rows,))
    client = Client(name=options.name)
    # With retry, it attaches whenever a daemon runs, and again after a restart.
    client.attach(instance=options.name, namespace=namespace, buffers=kv.kv_buffers(), groups=[layout], retry=True)

    chance = random.Random(options.name)
    lengths = dict.fromkeys(range(options.conversations), 0)
    turns = hits = wanted = 0
    end, told = time.monotonic() + options.seconds, time.monotonic()
    while time.monotonic() < end:
        number = chance.randrange(options.conversations)
        if lengths[number] + BLOCKS_OF_A_TURN > LONGEST:
            lengths[number] = 0  # a new user, who begins with the same words
        prompt = [hashlib.sha256(f"{number}/{each}".encode()).digest() for each in range(lengths[number])]
        new = range(lengths[number], lengths[number] + BLOCKS_OF_A_TURN)
        lengths[number] += BLOCKS_OF_A_TURN
        if prompt:
            found = client.lookup(namespace, {0: prompt}, lease_seconds=10)
            here = found.groups[0].hits if found.groups else 0
            hits, wanted = hits + here, wanted + len(prompt)
            if here:
                job = client.load(
                    [Blocks(group=0, hashes=prompt[:here], block_ids=list(range(here)))], lease=found.lease
                )
                client.wait([job], timeout=10)
            client.release(found.lease)
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
