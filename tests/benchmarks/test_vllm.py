"""The benchmarks of vLLM: which modes can run, what their engines are given, and PegaFlow's server beside them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm import agentx, engine, peers, runs, throughput
from benchmarks.vllm.sessions import Sessions
from kvsidecar.bench.errors import BenchError

TRACE = Path(__file__).with_name("agentic_excerpt.jsonl")

SERVES = """
import os, pathlib, signal, socket, sys
given = sys.argv[1:]
folder = pathlib.Path(__file__).parent
(folder / "given").write_text(" ".join(given))
(folder / "pid").write_text(str(os.getpid()))
host, port = given[given.index("--addr") + 1].rsplit(":", 1)
listener = socket.create_server((host, int(port)))
signal.pause()
"""
REFUSES = """
import sys
sys.exit("error while loading shared libraries: libpython3.12.so.1.0")
"""


def options(**given: Any) -> argparse.Namespace:
    usual = {"modes": "", "tiny": False, "memory": 0.5, "gpu_tokens": 4096, "model": ""}
    return argparse.Namespace(**{**usual, **given})


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pegaflow", None)


def install(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with this program as its server."""
    package = folder / "pegaflow"
    package.mkdir()
    (package / "__init__.py").touch()
    server = package / "pegaflow-server-py"
    # By a shell: no file can begin with the path of an interpreter that has spaces.
    server.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$0.py" "$@"\n')
    (package / f"{server.name}.py").write_text(program)
    server.chmod(0o755)
    monkeypatch.delitem(sys.modules, "pegaflow", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    return package


def first_blocks(agents: int) -> set[tuple[int, ...]]:
    """Those of all prompts of a replay in which every answer comes at once. What hits, hits the first block."""
    sessions = Sessions(
        str(TRACE),
        concurrency=agents,
        seconds=2000.0,
        warm_seconds=0.0,
        speed=1.0,
        block_tokens=4,
        max_tokens=100_000,
        max_output_tokens=1,
        vocabulary=1024,
    )
    found, now = set(), 0.0
    while not sessions.over(now):
        for name, tokens, _ in sessions.due(now):
            found.add(tuple(tokens[:4]))
            sessions.answered(name, 1, now, True, 0)
        now = max(now, sessions.next_due() or 0.0)
    return found


def test_other_numbers_of_agents_share_no_prefix() -> None:
    few, more = first_blocks(2), first_blocks(3)
    assert len(few) > 1
    assert len(more) > 1
    assert not few & more


def test_the_same_number_of_agents_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["agentx", "--trace", str(TRACE), "--concurrency", "8,16,8"])
    with pytest.raises(SystemExit, match="--concurrency"):
        agentx.main()


def test_a_mode_of_another_benchmark_is_refused() -> None:
    for name in ("resident", "pegaflow", "kvsidecars", "none:lru", "kvsidecar:lru"):
        with pytest.raises(SystemExit, match=f"{name!r} is none of none, empty"):
            runs.modes(options(modes=f"none,{name}"), ())
    given = options(modes="none,kvsidecar:lru,resident")
    assert runs.modes(given, (), runs.WORKLOADS, policies=True) == ["none", "kvsidecar:lru", "resident"]


@pytest.mark.usefixtures("not_installed")
def test_pegaflow_is_refused_before_anything_starts_if_it_is_not_installed() -> None:
    with pytest.raises(SystemExit, match="pip install pegaflow-llm-cu13"):
        runs.modes(options(modes="none,pegaflow"), (), runs.WORKLOADS)


def test_pegaflow_is_refused_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, SERVES, monkeypatch)
    assert runs.modes(options(modes="pegaflow"), (), runs.WORKLOADS) == ["pegaflow"]
    with pytest.raises(SystemExit, match="needs a GPU"):
        runs.modes(options(modes="pegaflow", tiny=True), (), runs.WORKLOADS)


def test_resident_has_all_the_blocks_that_fit() -> None:
    small = runs.llm_options(options(), max_model_len=2048)
    large = runs.llm_options(options(), max_model_len=2048, resident=True)
    assert small.pop("num_gpu_blocks_override") == 4096 // 16
    assert large == small
    assert engine.transfer_config("resident", 1 << 30, None, {}) is None


def test_engines_on_the_same_gpus_have_the_memory_of_their_tokens() -> None:
    given = options(at_once=2, tp=2, resident_tokens=8192)
    small, large = (runs.llm_options(given, max_model_len=2048, resident=each) for each in (False, True))
    assert (small["kv_cache_memory_bytes"], large["kv_cache_memory_bytes"]) == (4096 * 65536, 8192 * 65536)
    assert small["gpu_memory_utilization"] == large["gpu_memory_utilization"] < 0.1
    assert not {"num_gpu_blocks_override"} & {*small, *large}


def test_resident_has_more_room_on_the_cpu_too() -> None:
    small, large = (runs.llm_options(options(tiny=True), max_model_len=2048, resident=each) for each in (False, True))
    assert large["kv_cache_memory_bytes"] > small["kv_cache_memory_bytes"]


def test_pegaflows_server_has_the_pool_and_ends_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = install(tmp_path, SERVES, monkeypatch)

    def interrupted() -> None:
        with peers.server("pegaflow", tmp_path, 3 << 30, gpus=2) as server:
            host, _, port = server.socket.rpartition(":")
            socket.create_connection((host, int(port))).close()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    given = (package / "given").read_text()
    assert f"--pool-size {3 << 30} " in given
    assert "--devices 0,1 " in given
    with pytest.raises(ProcessLookupError):
        os.kill(int((package / "pid").read_text()), 0)


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, REFUSES, monkeypatch)
    with pytest.raises(SystemExit, match=r"libpython3\.12\.so"), peers.server("pegaflow", tmp_path, 1 << 30):
        pass


def test_pegaflows_connector_finds_the_server_and_only_its_own_options() -> None:
    extra = {"pegaflow.transfer_backend": "kernel"}
    found = engine.transfer_config("pegaflow", 1 << 30, "127.0.0.1:4321", extra)
    assert found is not None
    assert found["kv_connector_extra_config"] == {
        "pegaflow.host": "http://127.0.0.1",
        "pegaflow.port": 4321,
        "pegaflow.transfer_backend": "kernel",
    }


def test_each_connector_has_the_options_that_are_its_own() -> None:
    given = {"lmcache.mp.save_decode_cache": False, "pegaflow.transfer_backend": "kernel", "lookup_budget": 1}
    for mode, option in (("lmcache", "lmcache.mp.save_decode_cache"), ("pegaflow", "pegaflow.transfer_backend")):
        found = engine.transfer_config(mode, 1 << 30, "127.0.0.1:4321", runs.extra_of(mode, given))
        assert found is not None
        options = found["kv_connector_extra_config"]
        assert options[option] == given[option]
        assert {name.partition(".")[0] for name in options} == {mode}
    assert runs.extra_of("kvsidecar", given) == {"lookup_budget": 1}
    assert runs.extra_of("simple", given) == {}


class Asked:
    """An engine's process that keeps what it was asked, and answers anything."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def ask(self, do: str, **arguments: Any) -> None:
        if do == "converse":
            self.seeds.append(arguments["seed"])

    def answer(self, seconds: float) -> dict[str, Any]:
        return {"reset": True}


def test_throughput_serves_a_model_of_its_reader_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    class Kept(Asked):
        def __init__(self, _module: str, config: dict[str, Any], _directory: Path) -> None:
            started.append(config)

        def close(self) -> None:
            pass

    monkeypatch.setattr(runs, "BenchChild", Kept)
    for model in ("", str(tmp_path)):
        given = options(tiny=True, tp=1, extra="{}", llm="{}", model=model, gpu_tokens=1000)
        config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
        with throughput.started("none", given, tmp_path, 1 << 20):
            pass
    at_random, own = started
    assert own["model"] == str(tmp_path) != at_random["model"]
    assert own["options"]["load_format"] == own["options"]["dtype"] == "auto"
    assert not {"load_format", "dtype"} & at_random["options"].keys()
    assert own["options"]["kv_cache_memory_bytes"] == 1000 * 2 * 3 * 2 * 32 * 2, "K and V of three layers and two heads"


def test_no_conversations_of_throughput_are_those_of_its_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    monkeypatch.setattr(runs, "engine", lambda *_, **__: nullcontext(asked))
    given = {name: tiny for name, (_, tiny) in throughput.SHAPE.items()}
    list(throughput.in_turns(["none"], options(tiny=True, tp=1, full=2, **given), tmp_path, 1 << 20))
    assert len(asked.seeds) == 4
    assert len(set(asked.seeds)) == 4


def test_engines_of_throughput_that_run_at_once_are_all_warm_and_then_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    monkeypatch.setattr(runs, "engine", lambda *_, **__: nullcontext(asked))
    given = options(tiny=True, tp=1, full=1, at_once=2, **{name: tiny for name, (_, tiny) in throughput.SHAPE.items()})
    found = throughput.in_turns(["simple", "none"], given, tmp_path, 1 << 20)
    assert [(mode, phase) for mode, phase, _ in found] == [
        ("simple", "empty"), ("none", "empty"), ("simple", "full"), ("none", "full"), ("simple", "alone"),
    ]  # fmt: skip
    assert asked.seeds == [throughput.WARM_SEED, throughput.WARM_SEED, 0, 0, 1, 1]


def test_an_engine_of_throughput_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dies(Asked):
        def answer(self, seconds: float) -> dict[str, Any]:
            raise BenchError("it has no memory")

    modes = {"simple": Dies(), "none": Asked()}
    monkeypatch.setattr(runs, "engine", lambda _options, _directory, mode, *_, **__: nullcontext(modes[mode]))
    given = options(tiny=True, tp=1, full=0, at_once=2, **{name: tiny for name, (_, tiny) in throughput.SHAPE.items()})
    found = throughput.in_turns(["simple", "none"], given, tmp_path, 1 << 20)
    assert next(found)[:2] == ("none", "empty")
    with pytest.raises(SystemExit, match="simple failed"):
        next(found)
