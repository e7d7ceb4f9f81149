"""Lookups within a budget."""

from __future__ import annotations

from pathlib import Path

from kvsidecar.client import Client, LookupMode
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.client.fake_daemon import FakeDaemon
from tests.harness import NAMESPACE, SECONDS, hashes


def test_hits_of_a_bitmap_are_flags_per_hash(short_dir: Path) -> None:
    with FakeDaemon(short_dir) as daemon:
        bitmap = bytes((0b10110001, 0b1))
        daemon.on_lookup = lambda _: pb.LookupReply(ready=True, groups=[pb.GroupHits(group=0, hits=5, bitmap=bitmap)])
        client = Client(daemon.socket, step_budget=SECONDS)
        expected = tuple(bool(bitmap[i // 8] >> i % 8 & 1) for i in range(10))
        for asked in (hashes(*range(10)), b"".join(hashes(*range(10)))):
            result = client.lookup(NAMESPACE, {0: asked}, mode=LookupMode.BITMAP)
            assert result.groups[0].found == expected
        client.close()
