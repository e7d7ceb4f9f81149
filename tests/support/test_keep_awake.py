"""The loop sleeps lightly for a while after something has happened, and then deeply again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import uvloop

from kvsidecar.support.keep_awake import NAP_SECONDS, LightSleep

SECONDS = 30.0
LINGER = 0.05


class Counted(LightSleep):
    ticks = 0

    def _tick(self) -> None:
        self.ticks += 1
        super()._tick()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_ticks_while_something_happens_and_a_little_longer(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("kvsidecar.support.keep_awake.time", clock)

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)

    async def check() -> None:
        light = Counted(LINGER)
        assert not light.ticking
        light.stir()
        await until(lambda: light.ticks > 10)
        clock.now += 0.99 * LINGER
        ticks = light.ticks
        await until(lambda: light.ticks > ticks + 10)
        assert light.ticking
        clock.now += 0.02 * LINGER
        await until(lambda: not light.ticking)
        ticks = light.ticks
        await asyncio.sleep(20 * NAP_SECONDS)
        assert light.ticks == ticks
        light.stir()
        assert light.ticking
        light.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check())


def test_zero_is_never() -> None:
    light = LightSleep(0.0)
    light.stir()
    assert not light.ticking
    light.close()
