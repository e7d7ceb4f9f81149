"""The loop sleeps lightly for a while after something has happened, and then deeply again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from kvsidecar.light_sleep import NAP_SECONDS, LightSleep

SECONDS = 30.0
LINGER = 0.05


class Counted(LightSleep):
    ticks = 0

    def _tick(self) -> None:
        self.ticks += 1
        super()._tick()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_ticks_while_something_happens_and_a_little_longer(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def check() -> None:
        light = Counted(LINGER)
        assert not light.ticking
        light.stir()
        begun = time.monotonic()
        while light.ticking:
            assert time.monotonic() < begun + SECONDS
            await asyncio.sleep(0.001)
        assert time.monotonic() - begun >= LINGER
        assert light.ticks > 10  # of 500 on an idle machine
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
