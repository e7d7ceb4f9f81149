"""The Status call: many of them, however long, hold up the event loop for one step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator
from typing import Any

from kvsidecar.core.access import Caller, Grant
from kvsidecar.server.handler import Handler
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.steps import Steps
from kvsidecar.v1 import sidecar_pb2 as pb

STEPS = 20


async def test_one_step_of_one_status_in_each_turn_of_the_loop() -> None:
    iteration, steps = 0, Counter[int]()

    def tick() -> None:
        nonlocal iteration
        iteration += 1
        asyncio.get_running_loop().call_soon(tick)

    def status(_caller: Caller, _page: pb.StatusPage | None) -> Generator[None, None, pb.StatusReply]:
        for _ in range(STEPS):
            steps[iteration] += 1
            yield
        return pb.StatusReply(epoch=7)

    nothing: Any = None
    handler = Handler(
        epoch=7,
        instances=nothing,
        runner=nothing,
        lookups=nothing,
        readiness=nothing,
        metrics=nothing,
        tasks=nothing,
        make_status=status,
        watches=nothing,
        steps=Steps(LoopTime(seconds=0.0)),
    )
    tick()
    admin = Caller(None, Grant(("*",), admin=True))
    replies = await asyncio.gather(*(handler.status(pb.StatusRequest(), admin) for _ in range(5)))
    assert [reply.epoch for reply in replies] == [7] * 5
    assert steps.total() == 5 * STEPS
    assert max(steps.values()) == 1, "several steps in one iteration of the loop"
