"""What the daemon gives back is what the engine computed: the tokens are those of a run without the connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsidecar.client import Blocks, Client
from tests.harness import DaemonProcess
from tests.marks import promise
from tests.vllm import models
from tests.vllm.conftest import POOL, Truth
from tests.vllm.engine import LONG, WHOLE, ask_again, blocks, forget, hits, joined, kvsidecar, prompt
from tests.vllm.models import BLOCK

pytestmark = pytest.mark.older


@promise("a restarted engine gets hits at once")
@pytest.mark.parametrize("pool", [POOL, (*POOL, "--local-protocol", "off")], ids=["local", "grpc"])
def test_an_external_hit_gives_the_tokens_of_a_run_without_the_connector(
    model: str, daemon: DaemonProcess, truth: Truth
) -> None:
    with joined(daemon, model) as engine:
        before = daemon.get("/status")[1]["lookups"]["needed_tokens"]
        (cold,) = engine.generate(LONG)
        forget(engine)
        (hit,) = engine.generate(LONG)
        assert (cold.cached, hit.cached) == (0, WHOLE)
        assert [cold.tokens] == [hit.tokens] == truth(LONG)
        # Attention does not see in which order the blocks behind it lie: a part of them shows that each holds its own.
        part = prompt("long", 300) + [3] * 10
        hits(engine, truth, part, 288)
        counters = engine.counters()
        assert counters["vllm:external_prefix_cache_hits"] == WHOLE
        assert counters["vllm:kv_offload_load_bytes"] == daemon.get("/status")[1]["jobs"]["loaded_bytes"] > 0
        assert counters["vllm:kv_offload_store_bytes"] == daemon.get("/status")[1]["jobs"]["stored_bytes"] > 0
        assert counters["vllm:kvsidecar_loaded_tokens"] == counters["vllm:kvsidecar_offered_tokens"] == WHOLE
        assert counters["vllm:kvsidecar_loads"] == 1
        # The GPU has it, and the daemon is asked for all of it when it arrives.
        assert engine.generate(LONG)[0].cached == WHOLE
        engine.generate(prompt("other", 4))
        told = daemon.get("/status")[1]["lookups"]
        assert told["hits"] > 0
        assert (told["loaded_tokens"], told["needed_tokens"] - before) == (WHOLE, 2 * WHOLE), "of the first two prompts"
        assert "vllm:kvsidecar_failed_loads" not in counters, "nothing failed"


@promise("If one of these differs, the engines have different namespaces")
def test_wrong_kv_gives_other_tokens(
    model: str, daemon: DaemonProcess, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this, equal tokens would prove nothing."""
    with joined(daemon, model) as engine:
        layers = engine.runner.kv_caches
        store = Client.store

        def store_zeros(self: Client, groups: list[Blocks], **options: Any) -> int:
            for group in groups:
                for layer in layers:
                    layer[np.frombuffer(group.block_ids, np.int64)] = 0
            return store(self, groups, **options)

        monkeypatch.setattr(Client, "store", store_zeros)
        ask_again(engine)
        (hit,) = engine.generate(LONG)
        assert hit.cached == WHOLE
        assert [hit.tokens] != truth(LONG)


@promise("Eager mode stores every full block when its tokens are confirmed")
def test_a_conversation_hits_what_the_engine_wrote_itself(model: str, daemon: DaemonProcess, truth: Truth) -> None:
    """Decoded tokens are stored as soon as they are confirmed, not only prompts."""
    with joined(daemon, model) as engine:
        first = prompt("turn", 100)
        (answer,) = engine.generate(first, tokens=100)
        forget(engine)
        second = first + answer.tokens + prompt("turn 2", 20).ids
        (hit,) = engine.generate(second)
        # 199 of the 200 tokens have KV: the last one was sampled and never an input.
        assert hit.cached == 6 * BLOCK
        assert [hit.tokens] == truth(second)


@promise("this engine gets no hits on earlier blocks")
def test_after_a_reset_with_the_connector_nothing_of_before_is_hit(
    model: str, daemon: DaemonProcess, truth: Truth
) -> None:
    with joined(daemon, model) as engine:
        engine.generate(LONG)
        engine.drain()
        stored = blocks(daemon)
        assert engine.reset(connector=True)
        assert blocks(daemon) == stored, "other engines may share them"
        (cold,) = engine.generate(LONG)
        assert cold.cached == 0
        forget(engine)
        (hit,) = engine.generate(LONG)  # it stores and hits again after that
        assert hit.cached == WHOLE
        assert [hit.tokens] == truth(LONG)


@promise("KV of other weights is never hit")
def test_an_engine_with_other_weights_hits_nothing(model: str, daemon: DaemonProcess, tmp_path: Path) -> None:
    """Same shape, same prompts, same hashes, other KV: only the namespace keeps them apart."""
    with joined(daemon, model) as engine:
        engine.generate(LONG)
        engine.drain()
    with joined(daemon, models.save("other", tmp_path)) as engine:
        assert engine.generate(LONG)[0].cached == 0


def test_routers_are_told_of_blocks_in_the_daemon_by_their_medium(
    model: str, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import KVEventsConfig

    events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    # What the daemon itself tells is left to test_events.py: here a lookup must notice.
    transfer = kvsidecar(daemon.socket, residency=False)
    with joined(daemon, model, transfer, kv_events_config=events_config) as engine:
        told: list[Any] = []
        monkeypatch.setattr(
            engine.scheduler.kv_event_publisher, "publish", lambda batch: told.extend(batch.events), raising=True
        )
        engine.generate(LONG)
        engine.drain()
        engine.generate(prompt("another step", 40))  # what is stored is told in the step that hears of it
        stored = [each for each in told if type(each).__name__ == "BlockStored"]
        on_gpu = {block for each in stored if each.medium == "GPU" for block in each.block_hashes}
        in_daemon = [block for each in stored if each.medium == "CPU" for block in each.block_hashes]
        whole = WHOLE // BLOCK
        assert len(in_daemon) == len(set(in_daemon)) >= whole
        assert set(in_daemon) <= on_gpu
        first = next(each for each in stored if each.medium == "CPU")
        assert (first.block_size, tuple(first.token_ids)) == (BLOCK, LONG.ids[:BLOCK])

        # The daemon forgets; a lookup notices, and the router is told.
        told.clear()
        engine.drain()
        with Client(daemon.socket) as operator:
            operator.clear()
        assert engine.reset()
        engine.generate(LONG)
        gone = [
            block
            for each in told
            if type(each).__name__ == "BlockRemoved" and each.medium == "CPU"
            for block in each.block_hashes
        ]
        assert set(gone) <= set(in_daemon)
        assert len(gone) >= whole
