"""How long a request's blocks are kept, as its ``kv_transfer_params`` say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvsidecar.integrations.vllm.touches import AFTER_SECONDS
from tests.harness import DaemonProcess, eventually
from tests.vllm.conftest import SOON_FULL
from tests.vllm.engine import Answer, Engine, Prompt, input_of, joined, prompt, sampling


def ask(engine: Engine, what: Prompt, times: dict[str, Any] | None = None) -> Answer:
    """Run one request until the engine has nothing to do."""
    params = sampling(4)
    if times is not None:
        params.extra_args = {"kv_transfer_params": {"kvsidecar": times}}
    engine.engine.add_request(f"terms {next(engine._names)}", input_of(what), params)
    (answer,) = engine.run().values()
    engine.drain()
    return answer


def test_the_blocks_of_a_request_with_a_time_expire_and_others_stay(model: str, daemon: DaemonProcess) -> None:
    with joined(daemon, model) as engine:
        before_all = daemon.metric("kvsidecar_blocks")
        short, idle, wrong, plain = (prompt(name, 300) for name in ("short", "idle", "wrong", "plain"))
        before = ask(engine, plain)
        blocks = daemon.metric("kvsidecar_blocks") - before_all
        assert blocks > 0
        ask(engine, short, {"ttl": 1})
        ask(engine, idle, {"idle_ttl": "1s"})
        ask(engine, wrong, {"ttl": "soon"})
        eventually(lambda: daemon.metric("kvsidecar_expired_blocks_total") == 3 * blocks)
        assert engine.reset()
        assert [ask(engine, each).cached for each in (short, idle, wrong)] == [0, 0, 0]
        again = ask(engine, plain)
        assert (again.cached, again.tokens) == (288, before.tokens)
        counters = engine.counters()
        assert (counters["vllm:kvsidecar_ttl_requests"], counters["vllm:kvsidecar_bad_ttls"]) == (3, 1)


def test_a_request_that_is_over_makes_room_and_one_that_pauses_does_not(model: str, short_dir: Path) -> None:
    with DaemonProcess(short_dir, *SOON_FULL, "--eviction", "rhythm") as daemon:
        daemon.wait_ready()
        with joined(daemon, model) as engine:
            waits, over, bad = (prompt(name, 300) for name in ("waits", "over", "bad"))
            ask(engine, bad, {"pause": "soon"})
            before = ask(engine, waits, {"pause": 5})
            ask(engine, over, {"over": True})
            time.sleep(AFTER_SECONDS)
            ask(engine, prompt("short", 8))  # the daemon is told of one request in each of its steps
            for number in range(1000):
                ask(engine, prompt(f"other {number}", 300))
                if daemon.metric("kvsidecar_evicted_blocks_total"):
                    break
            assert engine.reset()
            again = ask(engine, waits)
            assert (again.cached, again.tokens) == (288, before.tokens)
            assert ask(engine, over).cached < 288
            counters = engine.counters()
            assert (counters["vllm:kvsidecar_pauses"], counters["vllm:kvsidecar_bad_pauses"]) == (3, 1)
            assert counters.get("vllm:kvsidecar_failed_stores", 0) == 0
