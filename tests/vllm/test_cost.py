"""What the connector takes of the engine's thread; `benchmarks.vllm.step_cost` shows the whole of it."""

from __future__ import annotations

from benchmarks.vllm.step_cost import measure
from tests.harness import DaemonProcess


def test_a_step_costs_100_us_with_nothing_to_do_and_300_with_a_store_and_a_load(daemon: DaemonProcess) -> None:
    """The best of many: the machine has others to serve, and they are no work of the connector."""
    seconds = measure(daemon.socket, rounds=50, blocks=512, requests=256).seconds
    best = {name: min(taken) for name, taken in seconds.items()}
    assert best["a step with nothing to do, no request"] < 20e-6
    assert best["a step with nothing to do, 256 requests"] < 100e-6
    assert best["a step with one store and one load of 512 blocks"] < 300e-6
