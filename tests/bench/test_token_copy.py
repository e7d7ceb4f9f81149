"""Rates of the traffic beside token copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvsidecar.bench.token_copy import meanwhile
from kvsidecar.types import Direction


class BusyMachine:
    """A rank whose first load ends only after the work."""

    def __init__(self) -> None:
        self._time = 0

    def call(self, do: str, **_: Any) -> dict[str, Any]:
        if do != "count":
            return {}
        self._time += 1
        loaded = 3_000_000 if self._time > 3 else 0
        return {"time": float(self._time), "store": {"bytes": 1_000_000 * self._time}, "load": {"bytes": loaded}}


def test_a_direction_that_moves_has_a_rate_however_short_the_work_was() -> None:
    setting: Any = SimpleNamespace(seconds=lambda _: 0.0)
    rank: Any = BusyMachine()
    result, rates = meanwhile(setting, rank, (Direction.STORE, Direction.LOAD), lambda: "done", idle=True)
    assert result == "done"
    assert rates == {"store_gbps": 0.001, "load_gbps": 0.001}
