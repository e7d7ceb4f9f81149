"""Tenants of one device take turns: who submits much delays the others by little."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvsidecar.client import Blocks
from kvsidecar.types import Direction
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Gate, Rank, done, eventually, hashes
from tests.marks import promise

MANY = 20


@promise("not by its whole queue")
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


def test_a_share_of_more_weight_has_more_turns(short_dir: Path, gate: Gate) -> None:
    """One copy is held until all jobs are queued behind it, and another one when sixteen of them are over."""
    rules = f"load.in_flight@2={gate};load.in_flight@19={gate}"
    share = "[{name='heavy', namespaces=['heavy'], weight=3}]"
    with DaemonProcess(short_dir, "--pool-size", "4MiB", "--share", share, KVSIDECAR_FAILPOINTS=rules) as daemon:
        light = Rank(daemon.wait_ready(), instance="light")
        heavy = Rank(daemon, instance="heavy", namespace=dataclasses.replace(NAMESPACE, model="heavy"))
        jobs: dict[Rank, list[int]] = {light: [], heavy: []}
        for rank, submitted in jobs.items():
            done(rank.store("a", at=[0]))
            submitted += [rank.client.load([Blocks(0, hashes("a"), [1])]) for _ in range(MANY)]
        queued = 'kvsidecar_jobs_queued{direction="load"}'
        eventually(lambda: daemon.metric(queued) == 2 * MANY - 1, "all jobs but the one that runs are queued")
        gate.let_pass()
        eventually(lambda: daemon.metric(queued) == 2 * MANY - 18, "it goes on to the next one that is held")
        ended: dict[Rank, int] = dict.fromkeys(jobs, 0)

        def sixteen() -> bool:
            for rank in jobs:
                ended[rank] += len(rank.client.poll())
            return sum(ended.values()) == 17

        eventually(sixteen)
        assert 12 <= ended[heavy] <= 13
        gate.let_pass()
        for rank, submitted in jobs.items():
            rank.client.wait(submitted, SECONDS)
            rank.close()
