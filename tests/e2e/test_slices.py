"""Slices of a group: an engine loads its first layers before the others, from blocks that hold all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvsidecar.client import Blocks, Client, GroupLayout, HostBuffer, JobDone, Outcome, Region
from kvsidecar.errors import ClientError
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, closed_after_the_test, hashes
from tests.marks import both_protocols, lent_daemon, promise

pytestmark = [both_protocols, lent_daemon]

LAYERS, BLOCKS, ROW = 5, 8, 4096
FIRST, REST = slice(0, 2), slice(2, LAYERS)
"""The layers of the two slices."""


def layout(*slices: int) -> GroupLayout:
    """Three regions: one of two layers, one of one, one of two."""
    regions = tuple(
        Region(0, first * BLOCKS * ROW, BLOCKS * ROW, ROW, ROW, count) for first, count in ((0, 2), (2, 1), (3, 2))
    )
    return GroupLayout(0, BLOCKS, 0, 1, regions, slices)


class Engine:
    def __init__(self, daemon: DaemonProcess, *slices: int) -> None:
        self.buffer = closed_after_the_test(HostBuffer(LAYERS * BLOCKS * ROW))
        self.kv = np.frombuffer(self.buffer.memory, np.uint8).reshape(LAYERS, BLOCKS, ROW)
        self.client: Client = daemon.client(name="test")
        self.client.attach(
            instance="test", namespace=NAMESPACE, buffers=self.buffer.kv_buffers(), groups=[layout(*slices)]
        )

    def done(self, job: int) -> JobDone:
        return self.client.wait([job], SECONDS)[job]

    def store(self, *ids: int, number: int = 0) -> JobDone:
        return self.done(self.client.store([Blocks(0, hashes(*ids), list(ids), slice=number)]))

    def load(self, *names: int, at: list[int], number: int) -> JobDone:
        return self.done(self.client.load([Blocks(0, hashes(*names), at, slice=number)]))


@promise("copies only the first slice")
def test_each_slice_is_loaded_alone(daemon: DaemonProcess) -> None:
    engine = Engine(daemon, 1, 2)
    engine.kv[:] = np.random.default_rng(1).integers(0, 256, engine.kv.shape, np.uint8)
    stored = engine.kv[:, :3].copy()
    assert engine.store(0, 1, 2).copied_blocks == 3
    engine.kv[:] = 0
    first = engine.load(2, 0, 1, at=[4, 5, 7], number=1)
    assert (first.outcome, first.nbytes) == (Outcome.DONE, 3 * 2 * ROW)
    assert np.array_equal(engine.kv[FIRST][:, [4, 5, 7]], stored[FIRST][:, [2, 0, 1]])
    assert not engine.kv[REST].any()
    assert engine.load(2, 0, 1, at=[4, 5, 7], number=2).nbytes == 3 * 3 * ROW
    assert daemon.metric("kvsidecar_loaded_tokens_total") == 3 * NAMESPACE.block_size, "not once for each slice"
    assert np.array_equal(engine.kv[:, [4, 5, 7]], stored[:, [2, 0, 1]])
    others = [0, 1, 2, 3, 6]
    assert not engine.kv[:, others].any()
    assert engine.load(0, at=[3], number=0).nbytes == LAYERS * ROW
    assert np.array_equal(engine.kv[:, 3], stored[:, 0])


def test_engines_that_cut_their_layers_differently_share_blocks(daemon: DaemonProcess) -> None:
    one, other = Engine(daemon, 1, 2), Engine(daemon, 2, 1)
    one.kv[:] = np.random.default_rng(2).integers(0, 256, one.kv.shape, np.uint8)
    one.store(0, 1)
    for number in (1, 2):
        assert other.load(0, 1, at=[6, 5], number=number).outcome is Outcome.DONE
    assert np.array_equal(other.kv[:, [6, 5]], one.kv[:, :2])


def test_what_cannot_be_cut_is_refused(daemon: DaemonProcess) -> None:
    engine = Engine(daemon, 1, 2)
    assert engine.store(0).outcome is Outcome.DONE
    for done, why in (
        (engine.store(1, number=1), "a store names a slice"),
        (engine.load(0, at=[1], number=3), "group 0 has 2 slices, but no slice 3"),
    ):
        assert (done.outcome, done.reason) == (Outcome.DECLINED, "invalid_request")
        assert why in done.error
    for slices in ((1, 1), (3, 0), (1, 3), (4,)):
        with pytest.raises(ClientError, match="do not add up to its 3"):
            Engine(daemon, *slices)


def test_checksums_are_of_all_of_a_block(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, "--verify", "always", local=local).wait_ready() as daemon:
        engine = Engine(daemon, 1, 2)
        engine.kv[:] = 7
        engine.store(0)
        for number in (1, 2):
            assert engine.load(0, at=[5], number=number).outcome is Outcome.DONE
        assert (engine.kv[:, 5] == 7).all()
