"""A tier's process with a backend in memory: what it is asked for, what fails, and that its end is known."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsidecar.errors import TierFailed
from kvsidecar.support import failpoints, supervised_child, tasks
from kvsidecar.support.supervised_child import ChildState
from kvsidecar.tiers import tier as tier_module
from kvsidecar.tiers.backend import ReadEnd, TierShare, WriteEnd
from kvsidecar.tiers.policy import GUESSED_RATE
from kvsidecar.tiers.tier import FAILURES, Tier
from tests.harness import NAMESPACE, SECONDS, Gate, eventually_in_loop
from tests.marks import processes
from tests.tiers.bench import NEVER, POOL, SHARD, SPACE, Bench, bench, name

pytestmark = processes


@processes
async def test_shares_hold_in_its_process_in_the_next_one_and_after_a_reload(tmp_path: Path) -> None:
    disk = {"directory": str(tmp_path / "tier"), "capacity_bytes": 64 * SHARD}

    async def stays(tier: Bench, first: int) -> int:
        for number in range(first, first + 20):
            assert await tier.write(number) == [WriteEnd.DONE]
        return sum(await tier.find(*range(first, first + 20)))

    async with bench(backend="disk", **disk) as tier:
        tier.tier.set_shares([TierShare("a", (NAMESPACE.model,), 6 * SHARD)])
        await tier.on()
        assert await stays(tier, 0) == 6
        os.kill(tier.tier.pid, signal.SIGKILL)
        await eventually_in_loop(lambda: tier.tier.deaths)
        await tier.on()
        assert await stays(tier, 20) == 6
        tier.tier.set_shares([TierShare("a", ("another",), 6 * SHARD)])
        assert await stays(tier, 40) == 20


@processes
async def test_what_was_written_is_found_and_read_back() -> None:
    async with bench() as each:
        await each.on()
        for number in (1, 2):
            each.slot(number)[:] = number
        assert await each.write(1, 2) == [WriteEnd.DONE] * 2
        assert await each.write(2) == [WriteEnd.PRESENT]
        each.pool[:] = 0
        assert await each.find(1, 3, 2) == [True, False, True]
        assert await each.read(2, 3, 1) == [ReadEnd.DONE, ReadEnd.MISS, ReadEnd.DONE]
        assert [int(each.slot(number)[0]) for number in (1, 2, 3)] == [1, 2, 0]
        copied = each.tier.counts.copied
        assert (copied["write", "blocks"], copied["read", "blocks"], copied["read", "bytes"]) == (2, 2, 2 * SHARD)


async def test_the_rate_is_guessed_until_something_was_read() -> None:
    async with bench() as each:
        await each.on()
        await each.write(1)
        assert await each.read(2) == [ReadEnd.MISS]
        assert each.tier.read_rate == GUESSED_RATE
        assert await each.read(1) == [ReadEnd.DONE]
        assert each.tier.read_rate != GUESSED_RATE


async def test_a_slot_outside_of_the_pool_is_refused() -> None:
    async with bench() as each:
        await each.on()
        slots = np.array([POOL - SHARD + 1])
        assert await each.asked(lambda end: each.tier.read(SPACE, name(1), slots, end, lambda: None)) == []
        assert await each.find(1) == [False]


async def test_a_tier_that_does_not_open_says_why_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_child, "FIRST_PAUSE_SECONDS", 0.01)
    async with bench(refuses="the disk is on holiday") as each:
        await eventually_in_loop(lambda: each.tier.off == "the disk is on holiday")
        with pytest.raises(TierFailed, match="holiday"):
            each.tier.find(SPACE, name(1), lambda _: None)


async def test_calls_of_a_process_that_dies_end_and_another_one_is_started() -> None:
    async with bench() as each:
        await each.on()
        process = each.tier.pid
        os.kill(process, signal.SIGSTOP)
        ends: list[Any] = []
        each.tier.read(SPACE, name(1), np.array([0]), ends.append, lambda: None)
        each.tier.write(SPACE, name(1), np.array([0]), [None], ends.append)
        each.tier.find(SPACE, name(1), ends.append)
        assert not ends
        os.kill(process, signal.SIGKILL)
        await eventually_in_loop(lambda: len(ends) == 3)
        assert ends == [[], [], []]
        await each.on()
        assert each.tier.pid not in (0, process)
        assert each.changes == ["", "its process has ended (SIGKILL)", ""]
        assert each.tier.deaths == 1


async def test_calls_that_fail_turn_the_tier_off_until_a_probe_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    async with bench(broken=str(broken)) as each:
        await each.on()
        broken.write_text("input/output error")
        for _ in range(FAILURES):
            assert await each.find(1) == []
        assert each.tier.off == "input/output error"
        with pytest.raises(TierFailed, match="input/output"):
            each.tier.find(SPACE, name(1), lambda _: None)
        broken.unlink()

        def probed() -> bool:
            each.tier.check(NEVER)
            return not each.tier.off

        await eventually_in_loop(probed)
        assert await each.find(1) == [False]
        assert each.tier.counts.failures == FAILURES


async def test_a_late_call_is_over_for_its_asker_and_its_slot_is_not_before_it_returns(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, f"tier.before_read={gate}")
    async with bench(deadline=0.05) as each:
        await each.on()
        late: list[bool] = []
        ends: list[Any] = []
        for _ in range(FAILURES):
            each.tier.read(SPACE, name(1), np.array([0]), ends.append, lambda: late.append(True))
        await eventually_in_loop(lambda: len(late) == FAILURES)
        assert not ends
        assert "not answered in 0.05 s" in each.tier.off
        gate.let_pass(FAILURES)
        await eventually_in_loop(lambda: len(ends) == FAILURES)
        assert ends == [[ReadEnd.MISS]] * FAILURES
        assert each.tier.off, "calls that were late are no proof that it works"


async def test_what_fails_unexpectedly_in_the_process_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "tier.before_find@0=raise(planned)")
    async with bench() as each:
        await each.on()
        assert await each.find(1) == []
        assert await each.find(1) == [False]
        assert each.tier.counts.failures == 1


async def test_a_process_that_hangs_is_killed_and_replaced(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, f"tier.before_write@0={gate}")
    async with bench() as each:
        await each.on()
        ends: list[Any] = []
        each.tier.write(SPACE, name(1), np.array([0]), [None], ends.append)
        process = each.tier.pid
        await eventually_in_loop(lambda: gate.holds(process))

        def replaced() -> bool:
            each.tier.check(0.01)
            return each.tier.pid not in (0, process)

        await eventually_in_loop(replaced)
        assert ends == [[]]


async def test_a_process_that_does_not_open_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_child, "FIRST_PAUSE_SECONDS", 0.01)
    async with bench() as each:
        process = await each.stop_while_it_opens()
        each.tier.check(0.0)
        assert not each.tier.off.startswith("its process"), "it has a minute"
        with monkeypatch.context() as patch:
            patch.setattr(supervised_child, "ANSWER_SECONDS", 0.0)
            await eventually_in_loop(lambda: each.tier.check(NEVER) or each.tier._link.state is ChildState.KILLED)
        await each.on()
        assert each.tier.pid not in (0, process)
        assert each.changes[0].startswith("its process has ended (a request has not been answered for ")


async def test_a_start_that_is_cancelled_ends_the_process() -> None:
    async with bench() as each:
        await each.stop_while_it_opens()
        each.running.cancel()
        await asyncio.wait([each.running], timeout=SECONDS)
        assert each.running.cancelled()
        assert each.tier._link is not None
        assert each.tier._link.ended.done()


async def test_a_tier_is_off_until_it_has_forgotten_what_was_cleared() -> None:
    async with bench() as each:
        await each.on()
        await each.write(1)
        os.kill(each.tier.pid, signal.SIGSTOP)
        each.tier.forget(NAMESPACE)
        assert "not yet removed" in each.tier.off
        with pytest.raises(TierFailed):
            each.tier.find(SPACE, name(1), lambda _: None)
        os.kill(each.tier.pid, signal.SIGCONT)
        await each.on()
        assert await each.find(1) == [False]


async def test_many_clears_of_a_tier_that_is_off_are_one_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "MAX_TO_FORGET", 2)
    others = [replace(NAMESPACE, model=f"model {each}") for each in range(3)]
    async with bench() as each:
        for namespace in (*others[:2], *others[:2]):
            each.tier.forget(namespace)
        assert each.tier._to_forget == others[:2]
        each.tier.forget(others[2])
        assert each.tier._to_forget == [None]
        await each.on()


async def test_what_was_cleared_while_it_was_down_is_forgotten_before_it_is_asked() -> None:
    async with bench() as each:
        await each.on()
        await each.write(1)
        each.tier.forget(None)
        each.tier.forget(NAMESPACE)
        await each.on()
        assert await each.find(1) == [False]
        assert await each.write(1) == [WriteEnd.DONE]


async def test_a_tier_whose_supervision_fails_unexpectedly_has_no_process_and_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it is, there are never two processes, and it does not stay off without a word."""
    monkeypatch.setattr(tasks, "AGAIN_SECONDS", 0.0)
    started: list[int] = []

    async with bench() as each:

        def fail_once(tier: Tier) -> None:
            if not tier.down:
                started.append(tier.pid)
                if len(started) == 1:
                    raise ZeroDivisionError("planned")

        each.tier.on_change = fail_once
        await eventually_in_loop(lambda: len(started) == 2)
        await each.on()
        assert each.errors == ["ZeroDivisionError('planned')"]
        assert each.tier.pid == started[1]
        with pytest.raises(ProcessLookupError):
            os.kill(started[0], 0)


async def test_a_call_whose_end_is_not_taken_keeps_no_other_from_its_end() -> None:
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["message"]))
    async with bench() as each:
        await each.on()
        process, ends = each.tier.pid, list[Any]()
        os.kill(process, signal.SIGSTOP)
        each.tier.find(SPACE, name(1), lambda _: 1 // 0)  # type: ignore[arg-type, return-value]
        each.tier.find(SPACE, name(1), ends.append)
        os.kill(process, signal.SIGKILL)
        await eventually_in_loop(lambda: ends)
        assert errors == ["a call to a tier has not ended in order"]
        await each.on()
