"""KV hints of requests, as a router sends them: what they ask for is what the daemon keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import DaemonProcess
from tests.vllm.conftest import SOON_FULL
from tests.vllm.engine import Answer, Engine, Prompt, input_of, join, joined, kvsidecar, prompt, running, sampling

pytest.importorskip("vllm.v1.kv_hints", reason="this vLLM has no KV hints")

OTHERS = 20
"""Prompts of 18 blocks: three times what the pool holds."""


@pytest.fixture
def pool() -> tuple[str, ...]:
    return SOON_FULL


def ask(engine: Engine, what: Prompt, kind: str | None = None, priority: int = 0) -> Answer:
    """Run one request, with a hint of this kind, until the engine has nothing to do."""
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    hints = None
    if kind is not None:
        hints = KvHintsEnvelope("1.0", "message", [KvHintAction("action", kind, "1.0", {"anything": [1]})])
    name = f"hint {next(engine._names)}"
    engine.engine.add_request(name, input_of(what), sampling(4), kv_hints=hints, priority=priority)
    (answer,) = engine.run().values()
    engine.drain()
    return answer


def test_a_hint_has_a_kind_and_a_payload_whose_content_nobody_specifies() -> None:
    """Why a hint is for all blocks of its request, and for no time: fails when vLLM says more, to be read then."""
    from vllm.v1 import kv_hints
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    assert kv_hints.__all__ == ["KvHintAction", "KvHintsEnvelope"], "no kinds of actions, no payloads"
    assert KvHintsEnvelope.__struct_fields__ == ("protocol_version", "message_id", "actions")
    assert KvHintAction.__struct_fields__ == ("action_id", "action_type", "action_version", "payload")
    assert KvHintAction.__annotations__ == {
        "action_id": str,
        "action_type": str,
        "action_version": str,
        "payload": dict[str, Any],
    }


def cached_after_a_flood(engine: Engine, daemon: DaemonProcess, *firsts: dict[str, Any]) -> Iterator[int]:
    """Tokens of each of these requests' prompts that are still there after others have filled the pool."""
    join(engine, daemon)
    prompts = [prompt(f"hinted {i}", 300) for i in range(len(firsts))]
    before = [ask(engine, each, **first) for each, first in zip(prompts, firsts, strict=True)]
    for i in range(OTHERS):
        ask(engine, prompt(f"other {i}", 600))
    assert daemon.metric("kvsidecar_evicted_blocks_total") > 100
    assert engine.reset()
    for each, answer in zip(prompts, before, strict=True):
        again = ask(engine, each)
        assert again.tokens == answer.tokens
        yield again.cached


def test_the_blocks_of_a_request_with_a_hint_outlive_others(model: str, daemon: DaemonProcess) -> None:
    with running(model, kvsidecar(daemon.socket), enable_prefix_caching=True) as engine:
        kinds = ({"kind": "kv.retain"}, {"kind": "kv.pin"}, {"kind": "kv.fetch"}, {})
        retained, pinned, unknown, plain = cached_after_a_flood(engine, daemon, *kinds)
        assert (retained, pinned) == (288, 288)
        assert (unknown, plain) == (0, 0)
        counters = engine.counters()
        assert counters["vllm:kvsidecar_hints"] == 2
        assert counters["vllm:kvsidecar_pin_hints"] == 1
        assert counters["vllm:kvsidecar_unknown_hints"] == 1


def test_a_demoted_requests_blocks_go_though_they_are_the_newest(model: str, daemon: DaemonProcess) -> None:
    with joined(daemon, model) as engine:
        kept = prompt("kept", 600)
        ask(engine, kept)
        for i in range(OTHERS):
            ask(engine, prompt(f"bulk {i}", 600), "kv.demote")
        assert daemon.metric("kvsidecar_evicted_blocks_total") > 100
        assert engine.reset()
        assert ask(engine, kept).cached == 576


def test_the_priority_of_a_request_counts_where_that_is_wanted(model: str, daemon: DaemonProcess) -> None:
    transfer = kvsidecar(daemon.socket, request_priority=True)
    with running(model, transfer, scheduling_policy="priority") as engine:
        urgent, plain = cached_after_a_flood(engine, daemon, {"priority": -1}, {})
        assert (urgent, plain) == (288, 0)
