"""A tenant whose requests are as large as they may be, in a namespace of its own: it stores blocks whose hashes differ
in the top bits of each word only, leases them all, clears them while they are leased, and stores them again.

Takes the directory of the daemon's ``kvs.sock``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import numpy as np

from kvsidecar.client import Blocks, Client, ClientError
from tests.harness import NAMESPACE, Rank, layout

BLOCKS = 16_384
ROW_BYTES = 512
OWN = dataclasses.replace(NAMESPACE, model="large requests")


def chosen(count: int) -> bytes:
    """Hashes of 32 bytes that collide in any sum of products of their words modulo 2**64."""
    words = np.zeros((count, 4), np.uint64)
    words[:, 0] = np.arange(count, dtype=np.uint64) << np.uint64(48)
    words[:, 1] = np.uint64(1)
    return words.tobytes()


def main(directory: str, seconds: float) -> dict[str, int]:
    end = time.monotonic() + seconds
    groups = layout(num_blocks=BLOCKS, row_bytes=ROW_BYTES, layers=1)
    client = Client(f"{directory}/kvs.sock", name="attacker")
    rank = Rank(None, client=client, instance="large", namespace=OWN, groups=groups)
    hashes, group = chosen(BLOCKS), groups.group
    did = {"stored": 0, "leased": 0, "cleared": 0, "refused": 0}
    while time.monotonic() < end:
        try:
            did["stored"] += rank.finish(client.store([Blocks(group, hashes, list(range(BLOCKS)))])).copied_blocks
            did["leased"] += client.lookup(OWN, {group: hashes}, lease_seconds=0.2).groups[group].hits
            client.clear(OWN, groups={group: hashes})
            did["cleared"] += 1
        except ClientError:  # other attacks have used up what this user may have
            did["refused"] += 1
    rank.close()
    return did


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], float(sys.argv[2]))))
