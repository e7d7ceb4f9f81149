"""Fills the daemon's notes as another user, in the namespace of an honest one. Takes the directory of ``kvs.sock``."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time

from benchmarks.attacks.support import become
from kvsidecar.client import Blocks, Client
from kvsidecar.core.watches import MAX_NOTE_BYTES
from tests.harness import NUM_BLOCKS, Rank

UID = 65533


def main(directory: str, seconds: float) -> dict[str, int]:
    become(UID)
    end = time.monotonic() + seconds
    rank = Rank(None, client=Client(f"{directory}/kvs.sock", name="attacker"), instance="notes")
    notes = bytes(MAX_NOTE_BYTES * NUM_BLOCKS)
    for number in itertools.count():
        hashes = [hashlib.sha256(b"%d %d" % (number, i)).digest() for i in range(NUM_BLOCKS)]
        rank.finish(rank.client.store([Blocks(0, hashes, list(range(NUM_BLOCKS)), notes=notes)]))
        if time.monotonic() > end:
            break
    rank.close()
    return {"noted_bytes": number * len(notes)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], float(sys.argv[2]))))
