"""Beside another connector, under vLLM's MultiConnector: vLLM's own, or a second of this project's with a daemon."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.harness import DaemonProcess
from tests.marks import promise
from tests.vllm.conftest import POOL, Truth
from tests.vllm.engine import LONG, Prompt, forget, hits, join, joined, kvsidecar, prompt

pytestmark = pytest.mark.usefixtures("by_name")


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_beside_vllms_own_connector(
    model: str, daemon: DaemonProcess, truth: Truth, tmp_path: Path, first: bool
) -> None:
    """`ExampleConnector` keeps whole prompts in files. Both store. The one that is named first loads what both have."""
    files = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    children = [kvsidecar(daemon.socket), files] if first else [files, kvsidecar(daemon.socket)]
    with joined(daemon, model, multi(*children)) as engine:

        def hit(what: Prompt) -> tuple[int, int]:
            """Tokens that were not computed, and how many loads the daemon has done for it."""
            forget(engine)
            before = daemon.get("/status")[1]["jobs"]["loads_done"]
            (answer,) = engine.generate(what)
            assert [answer.tokens] == truth(what)
            engine.drain()
            return answer.cached, daemon.get("/status")[1]["jobs"]["loads_done"] - before

        engine.generate(LONG)
        assert hit(LONG) == (672, int(first))
        # The files are of whole prompts: only the daemon has the beginning of this one.
        assert hit(prompt("long", 400) + [3] * 40) == (384, 1)
        with daemon.client() as operator:
            operator.clear()
        # Only the files have this one now.
        assert hit(LONG) == (672, 0)
        assert daemon.get("/status")[1]["pool"]["leases"] == 0


@promise("also for a child of a `MultiConnector`")
def test_all_children_store_and_the_first_with_a_hit_loads(model: str, daemon: DaemonProcess, truth: Truth) -> None:
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory, DaemonProcess(Path(directory), *POOL) as second:
        second.wait_ready()
        other = {"kv_connector": "SecondConnector", "kv_connector_module_path": "tests.vllm.second"}
        children = [kvsidecar(daemon.socket), {**kvsidecar(second.socket), **other}]
        with joined(daemon, model, multi(*children)) as engine:
            join(engine, second)
            engine.generate(LONG)
            engine.drain()
            for loads in ((1, 0), (1, 1)):
                assert engine.reset()
                hits(engine, truth, LONG, 672)
                engine.drain()
                done = [each.get("/status")[1] for each in (daemon, second)]
                assert tuple(each["jobs"]["loads_done"] for each in done) == loads
                assert all(each["pool"]["leases"] == 0 for each in done)
                with daemon.client() as operator:
                    operator.clear()
