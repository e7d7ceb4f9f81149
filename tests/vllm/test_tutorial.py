"""docs/tutorial.md: its commands run as they stand, beside a copy of the repository, with ports of this run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import eventually
from tests.packages.support import repository
from tests.terminals import Terminals, blocks_of
from tests.vllm.engine import ENVIRONMENT, START

BLOCKS = blocks_of("tutorial.md")
WHOLE = 3584
"""Tokens of the prompt in whole blocks."""

OFFLINE = {"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS"}
OFFLINE |= {"DO_NOT_TRACK", "OMP_NUM_THREADS"}
"""Of the environment of this directory's engines, what the page's keeps: nothing else than this machine is asked."""


@pytest.fixture
def terminals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Terminals]:
    for name in ENVIRONMENT.keys() - OFFLINE:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "checkout").mkdir()
    repository(tmp_path / "checkout")
    with tempfile.TemporaryDirectory(prefix="kvs-") as sockets:
        terminals = Terminals(tmp_path, Path(sockets), ("9464", "8000"), {})
        try:
            yield terminals
        finally:
            terminals.close()
            shutil.rmtree(tmp_path / ".venv", ignore_errors=True)  # 1.7 GB, which pytest would keep


def started(terminals: Terminals) -> subprocess.Popen[bytes]:
    """An engine that answers."""
    (serve,) = BLOCKS["The engine"]
    process = terminals.start(serve)
    eventually(lambda: terminals.answers("8000", "/v1/models"), terminals.logs, pause=0.2, seconds=START)
    return process


def test_every_block_of_the_page_is_run_here_but_that_for_a_gpu() -> None:
    assert {section: len(blocks) for section, blocks in BLOCKS.items() if blocks} == {
        "Install": 1,
        "A model": 1,
        "The daemon": 1,
        "The engine": 1,
        "Cold and warm": 3,
        "Restart the engine": 1,
        "With a GPU": 1,
    }


def test_an_engine_that_is_started_again_hits_at_once(terminals: Terminals) -> None:
    for section in ("Install", "A model"):
        terminals.run(*BLOCKS[section])
    terminals.start(*BLOCKS["The daemon"])
    eventually(lambda: terminals.answers("9464", "/ready"), terminals.logs, pause=0.2)
    engine = started(terminals)
    write, ask, look = BLOCKS["Cold and warm"]
    terminals.run(write)

    def cached() -> int:
        said = terminals.run(ask)
        assert re.search(r"^[0-9.]+ s$", said, re.MULTILINE)
        return int(said.rpartition(":")[2])

    def token() -> str:
        return str(json.loads((terminals.directory / "answer.json").read_text())["choices"][0]["text"])

    assert cached() == 0
    cold = token()
    assert cached() == WHOLE
    eventually(lambda: terminals.answers("9464", "/status")["pool"]["blocks"] == 28, terminals.logs, pause=0.2)
    said = terminals.run(look)
    assert "28 blocks, " in said
    assert "kvsidecar_blocks 28.0" in said
    assert re.search(r"^vllm:kvsidecar_attached\{.*\} 1\.0$", said, re.MULTILINE)
    assert re.search(r"^vllm:kvsidecar_stored_blocks_total\{.*\} 28\.0$", said, re.MULTILINE)
    terminals.interrupt(engine)
    eventually(lambda: not terminals.answers("9464", "/status")["ranks"], terminals.logs, pause=0.2)
    assert "rank attached" in terminals.logs()
    assert "rank detached" in terminals.logs()
    started(terminals)
    assert cached() == WHOLE
    assert token() == cold
    (look,) = BLOCKS["Restart the engine"]
    said = terminals.run(look)
    assert re.search(r"^vllm:prefix_cache_hits_total\{.*\} 0\.0$", said, re.MULTILINE)
    assert re.search(rf"^vllm:external_prefix_cache_hits_total\{{.*\}} {WHOLE}\.0$", said, re.MULTILINE)
    assert 'kvsidecar_jobs_total{direction="load",outcome="done"} 4.0' in said
    chat = "--url http://localhost:8000 --users 2 --turns 2 --words 10 --max-tokens 4"
    assert "4 answers in " in terminals.run(f"python checkout/examples/chat.py {chat}")
