"""Has, as another user, more blocks fetched from the disk tier than the pool has room for, over many connections. Takes
the directory of ``kvs.sock``; the blocks are those of `NAMES`."""

from __future__ import annotations

import json
import sys

from benchmarks.attacks.lookup_flood import lookup, main
from tests.harness import hashes

NAMES = [f"on disk {number}" for number in range(1500)]
AT_ONCE, APART = 256, 80
"""Blocks of a lookup, and between the first ones of two lookups."""


if __name__ == "__main__":
    asked = [
        lookup(b"".join(hashes(*NAMES[start : start + AT_ONCE])), fetch_ms=1000, prefill_rate=1)
        for start in range(0, len(NAMES) - AT_ONCE, APART)
    ]
    print(json.dumps(main(sys.argv[1], float(sys.argv[2]), asked)))
