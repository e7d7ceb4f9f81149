"""Several KV cache groups: full attention and a sliding window, whose old blocks are null."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.harness import SECONDS, DaemonProcess
from tests.marks import promise
from tests.vllm.conftest import POOL
from tests.vllm.engine import (
    LONG,
    WHOLE,
    Answer,
    ask_again,
    blocks,
    forget,
    joined,
    kvsidecar,
    prompt,
    rejoin,
    running,
)
from tests.vllm.models import BLOCK

PROMPTS = {
    "long": LONG,
    "prefix": prompt("long", 500) + [3] * 150,
    "short": prompt("short", BLOCK + 5),  # less than a window
    "part": prompt("long", 300) + [3] * 10,
    "new": prompt("new", 100),
}


@pytest.fixture(scope="module")
def right(hybrid: str) -> dict[str, tuple[int, ...]]:
    """The tokens without a connector and without a prefix cache."""
    with running(hybrid, enable_prefix_caching=False) as engine:
        assert len(engine.scheduler.kv_cache_config.kv_cache_groups) > 1, "the model has one group only"
        return {name: engine.generate(each)[0].tokens for name, each in PROMPTS.items()}


def tokens(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [each.tokens for each in answers]


@promise("layers that share a block table")
def test_external_hits_of_all_groups_give_the_right_tokens(
    hybrid: str, daemon: DaemonProcess, right: dict[str, tuple[int, ...]]
) -> None:
    with joined(daemon, hybrid) as engine:
        assert tokens(engine.generate(LONG)) == [right["long"]]
        engine.generate(PROMPTS["short"])
        forget(engine)
        answers = [engine.generate(each)[0] for each in PROMPTS.values()]
        # A prefix of what is stored can only be hit if the windows of that place were stored, too: with luck.
        assert [each.cached for each in answers][0::2] == [WHOLE, BLOCK, 0]
        assert tokens(answers) == list(right.values())
        forget(engine)
        assert tokens(engine.generate(*PROMPTS.values())) == list(right.values())
        engine.drain()
        free = engine.free_blocks
        assert engine.reset()
        assert engine.free_blocks == free
        assert daemon.get("/status")[1]["pool"]["leases"] == 0


@promise("a restarted engine finds its blocks again")
def test_a_restarted_engine_hits(hybrid: str, daemon: DaemonProcess, right: dict[str, tuple[int, ...]]) -> None:
    for cached in (0, WHOLE):
        with joined(daemon, hybrid) as engine:
            (answer,) = engine.generate(LONG)
            assert (answer.cached, answer.tokens) == (cached, right["long"])
            engine.drain()


@pytest.mark.parametrize(
    "rule", ["load.before_copy@0=raise(planned)", "load.before_copy@0=kill", "load.in_flight@2=kill"]
)
def test_a_load_that_fails_is_computed_instead(
    hybrid: str, short_dir: Path, right: dict[str, tuple[int, ...]], rule: str
) -> None:
    with DaemonProcess(short_dir, *POOL, KVSIDECAR_FAILPOINTS=rule) as daemon:
        daemon.wait_ready()
        with joined(daemon, hybrid) as engine:
            ask_again(engine)
            assert daemon.process.poll() is None
            answers = engine.generate(LONG, PROMPTS["new"])
            assert tokens(answers) == [right["long"], right["new"]]
            forget(engine)
            if dies := rule == "load.before_copy@0=kill":
                assert daemon.process.wait(SECONDS) == -signal.SIGKILL
            else:
                assert daemon.metric('kvsidecar_jobs_total{direction="load",outcome="failed"}') == 1
            if "kill" in rule and not dies:
                daemon.wait_log("the copier works")
                daemon.wait_log("rank attached")
                rejoin(engine, daemon)
            (again,) = engine.generate(LONG)
            assert (again.cached, again.tokens) == (0 if dies else WHOLE, right["long"])


def test_where_a_failed_load_cannot_be_told_the_engine_serves_without_offload(
    hybrid: str,
    short_dir: Path,
    right: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in vLLM 0.26: what a connector says of failed loads are blocks, which only models with one group have."""
    from vllm.v1.outputs import KVConnectorOutput

    from kvsidecar.integrations.vllm import KVSidecarConnector

    monkeypatch.delitem(KVConnectorOutput.__dataclass_fields__, "failed_recving")
    monkeypatch.delattr(KVSidecarConnector, "get_transfer_results")
    with DaemonProcess(short_dir, *POOL, KVSIDECAR_FAILPOINTS="load.before_copy@0=raise(planned)") as daemon:
        daemon.wait_ready()
        with running(hybrid, kvsidecar(daemon.socket)) as engine:
            for _ in range(2):
                assert tokens(engine.generate(LONG)) == [right["long"]]
                forget(engine)
        assert daemon.get("/status")[1]["ranks"] == []
    assert "one KV cache group, and this one has" in caplog.text


def test_lazy_mode_stores_every_group(hybrid: str, daemon: DaemonProcess) -> None:
    prompts = [prompt(f"lazy {i}", 200) for i in range(8)]
    with running(hybrid, enable_prefix_caching=False) as engine:
        expected = tokens([engine.generate(each)[0] for each in prompts])
    transfer = kvsidecar(daemon.socket, store_mode="lazy")
    with running(hybrid, transfer, num_gpu_blocks_override=48, max_model_len=448) as engine:
        for _ in range(3):
            answers = []
            for each in prompts:
                answers += engine.generate(each)
                engine.drain()
            assert tokens(answers) == expected
        assert blocks(daemon) > 0
        assert engine.counters()["vllm:external_prefix_cache_hits"] > 0
