"""Beside another connector, under vLLM's MultiConnector: here two of this project's, each with a daemon."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvsidecar.integrations.vllm import register
from tests.harness import DaemonProcess
from tests.vllm.conftest import POOL, Truth
from tests.vllm.engine import join, kvsidecar, prompt, running

LONG = prompt("long", 700)


@pytest.fixture(autouse=True)
def _by_name() -> None:
    """MultiConnector looks connectors up by name; an installed kvsidecar is registered by its entry point."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()
    if "SecondConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("SecondConnector", "tests.vllm.second", "SecondConnector")


def test_all_children_store_and_the_first_with_a_hit_loads(model: str, daemon: DaemonProcess, truth: Truth) -> None:
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory, DaemonProcess(Path(directory), *POOL) as second:
        second.wait_ready()
        other = {"kv_connector": "SecondConnector", "kv_connector_module_path": "tests.vllm.second"}
        children = [kvsidecar(daemon.socket), {**kvsidecar(second.socket), **other}]
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
        with running(model, transfer) as engine:
            join(engine, daemon)
            join(engine, second)
            engine.generate(LONG)
            engine.drain()
            for loads in ((1, 0), (1, 1)):
                assert engine.reset()
                (hit,) = engine.generate(LONG)
                assert hit.cached == 672
                assert [hit.tokens] == truth(LONG)
                engine.drain()
                done = [each.get("/status")[1] for each in (daemon, second)]
                assert tuple(each["jobs"]["loads_done"] for each in done) == loads
                assert all(each["pool"]["leases"] == 0 for each in done)
                with daemon.client() as operator:
                    operator.clear()
