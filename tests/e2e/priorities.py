"""Stores with priorities."""

from __future__ import annotations

from kvsidecar.client import Blocks, Priority
from tests.harness import NUM_BLOCKS, Rank, done, hashes

IDS = list(range(NUM_BLOCKS))


def names(kind: object) -> list[str]:
    return [f"{kind} {number}" for number in IDS]


def store(rank: Rank, kind: object, priority: Priority = Priority.NORMAL) -> None:
    done(rank.finish(rank.client.store([Blocks(0, hashes(*names(kind)), IDS)], priority=priority)))
