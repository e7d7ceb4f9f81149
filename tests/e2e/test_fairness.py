"""Tenants of one device take turns: who submits much delays the others by little."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsidecar.client import Blocks
from kvsidecar.types import Direction
from tests.harness import SECONDS, DaemonProcess, Gate, Rank, done, eventually, hashes

MANY = 20


@pytest.mark.parametrize("direction", list(Direction))
def test_one_job_does_not_wait_for_all_jobs_of_another_tenant(
    short_dir: Path, gate: Gate, direction: Direction
) -> None:
    """One copy is held until all jobs are queued behind it. The third one behind it is held, too."""
    hit = 2 if direction is Direction.LOAD else 3  # behind the two of the self-test, and the store of a
    rules = f"{direction}.in_flight@{hit}={gate};{direction}.in_flight@{hit + 3}={gate}"
    with DaemonProcess(short_dir, "--pool-size", "4MiB", KVSIDECAR_FAILPOINTS=rules) as daemon:
        greedy, other = Rank(daemon.wait_ready(), instance="greedy"), Rank(daemon, instance="other")
        greedy.store("a", at=[0])

        def submit(rank: Rank, name: object) -> int:
            if direction is Direction.LOAD:
                return rank.client.load([Blocks(0, hashes("a"), [1])])
            return rank.client.store([Blocks(0, hashes(name), [1])])

        jobs = [submit(greedy, number) for number in range(MANY)]
        job = submit(other, "b")
        queued = f'kvsidecar_jobs_queued{{direction="{direction}"}}'
        eventually(lambda: daemon.metric(queued) == MANY, "all jobs but the one that runs are queued")
        gate.let_pass()
        done(other.finish(job))
        assert len(greedy.client.wait(jobs, 0.0)) < 3
        gate.let_pass()
        assert len(greedy.client.wait(jobs, SECONDS)) > MANY - 3
        greedy.close()
        other.close()
