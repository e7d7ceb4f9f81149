"""The loop sleeps lightly for a while after something has happened, and then deeply again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import uvloop

from kvsidecar.support.cpu_sleep import NAP_SECONDS, SleepGuard
from tests.harness import eventually_in_loop

SECONDS_AWAKE = 0.05


class Counted(SleepGuard):
    ticks = 0

    def _tick(self) -> None:
        self.ticks += 1
        super()._tick()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_ticks_while_something_happens_and_a_little_longer(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("kvsidecar.support.cpu_sleep.time", clock)

    async def check() -> None:
        guard = Counted(SECONDS_AWAKE)
        assert not guard.is_awake
        guard.keep_awake()
        await eventually_in_loop(lambda: guard.ticks > 10)
        clock.now += 0.99 * SECONDS_AWAKE
        ticks = guard.ticks
        await eventually_in_loop(lambda: guard.ticks > ticks + 10)
        assert guard.is_awake
        clock.now += 0.02 * SECONDS_AWAKE
        await eventually_in_loop(lambda: not guard.is_awake)
        ticks = guard.ticks
        await asyncio.sleep(20 * NAP_SECONDS)
        assert guard.ticks == ticks
        guard.keep_awake()
        assert guard.is_awake
        guard.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check())


def test_zero_is_never() -> None:
    guard = SleepGuard(0.0)
    guard.keep_awake()
    assert not guard.is_awake
    guard.close()
