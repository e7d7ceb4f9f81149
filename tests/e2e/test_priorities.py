"""What a client marks high stays when the pool is full, and what it marks low goes, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsidecar.client import Blocks, Outcome, Priority, pack_ids
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.priorities import names, store
from tests.e2e.raw_rank import raw_rank
from tests.harness import NUM_BLOCKS, DaemonProcess, Rank, hashes


def test_high_blocks_stay_and_low_ones_go_also_after_a_restart(short_dir: Path, pool_dir: Path, local: bool) -> None:
    flags = ("--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *flags, local=local) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        store(rank, "high", Priority.HIGH)
        store(rank, "normal")
        store(rank, "low", Priority.LOW)
        rank.close()
        daemon.process.kill()
        daemon.process.wait()
    with DaemonProcess(short_dir, *flags, local=local) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        for number in range(1000):  # until the pool is full
            if daemon.metric("kvsidecar_evicted_blocks_total"):
                break
            store(rank, number)
        assert (rank.hits(*names("high")), rank.hits(*names("normal"))) == (NUM_BLOCKS, NUM_BLOCKS)
        assert rank.hits(*names("low")) < NUM_BLOCKS, "the newest of the three"
        for number in range(1000, 1020):  # twice what the pool holds
            store(rank, number)
        assert (rank.hits(*names("high")), rank.hits(*names("normal"))) == (NUM_BLOCKS, 0)


def test_a_priority_that_does_not_exist_is_refused(daemon: DaemonProcess) -> None:
    with raw_rank(daemon) as rank:
        blocks = [pb.Blocks(group=0, hashes=hashes("a")[0], block_ids=pack_ids([0]))]
        rank.send(pb.AttachRequest(store=pb.Store(job=1, blocks=blocks, priority=7)))  # type: ignore[arg-type]
        end = rank.next("done").done
        assert (end.outcome, end.reason) == (pb.JobDone.OUTCOME_DECLINED, "invalid_request")
        assert "priority is 7" in end.error
        rank.store(2)
        assert rank.ended(1) == [(2, "")]


def test_a_client_refuses_a_priority_that_does_not_exist(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    with pytest.raises(ValueError, match="7"):
        rank.client.store([Blocks(0, hashes("a"), [0])], priority=7)  # type: ignore[arg-type]
    assert rank.store("a").outcome is Outcome.DONE
