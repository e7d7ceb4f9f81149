"""`python -m benchmarks.warm_restart` on the host device: what it shows, what it finds, and that it leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import warm_restart
from benchmarks.warm_restart import COLD, NAME, NOT_KEPT, WARM, Plan, measure, tables
from kvsidecar.bench.errors import BenchError
from kvsidecar.bench.options import Options
from kvsidecar.bench.run import run
from kvsidecar.pool.kept_files import FILES
from kvsidecar.support.units import MiB
from tests.bench import support
from tests.harness import environment

SHM = Path("/dev/shm")
BLOCKS = 700
pytestmark = [
    pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="there is no /dev/shm to write to"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def kept() -> Iterator[Path]:
    """Where the pools are kept: empty again after every run."""
    with tempfile.TemporaryDirectory(prefix="kvs-", dir=SHM) as directory:
        yield Path(directory)
        assert not list(Path(directory).iterdir()), "a pool is left"


@pytest.fixture
def measured(tmp_path: Path, kept: Path) -> Any:
    """A run with one round and these options of serve: its exit code, and the measurement."""

    def measured(*serve_flags: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "warm.json"
        options = Options(device="host", pool_bytes=6 * MiB, json=str(file), serve_flags=serve_flags)
        code = run(options, {NAME: partial(measure, Plan(kept, 1, BLOCKS))}, {NAME: tables})
        return code, json.loads(file.read_text())["measurements"][NAME]

    return measured


def test_cold_and_warm_starts_stand_side_by_side(measured: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = measured()
    assert (code, found["status"]) == (0, "ok"), found["reason"]
    not_kept, cold, warm = found["rows"]
    assert [row["start"] for row in found["rows"]] == [NOT_KEPT, COLD, WARM]
    assert [row["kept_blocks"] for row in found["rows"]] == [0, 0, BLOCKS]
    assert (warm["hits"], warm["wrong_blocks"], warm["compared_blocks"]) == (BLOCKS, 0, warm_restart.SAMPLE_BLOCKS)
    assert 0 < warm["adoption_seconds"] < warm["ready_seconds"]
    for row in (not_kept, cold, warm):
        assert 0 < row["pin_seconds"] < row["pool_seconds"] < row["ready_seconds"]
        assert row["gone_seconds"] > 0
    said = capsys.readouterr()
    assert "Median, smallest to largest" in said.out
    assert f"round 1: warm: ready after {warm['ready_seconds']:.2f} s, {BLOCKS} blocks kept" in said.err


def test_a_second_start_that_is_cold_is_no_result(measured: Any) -> None:
    code, found = measured("--cold-start", "on")
    assert code == 1
    assert found["reason"] == "a cold start instead of a warm one: --cold-start is set"


def test_other_bytes_after_the_start_are_found(measured: Any, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = warm_restart.kill

    def kill(daemon: Any) -> float:
        took = real(daemon)
        for pool in kept.glob(f"*/pool/{FILES[0]}"):
            pool.write_bytes(bytes(pool.stat().st_size))
        return took

    monkeypatch.setattr(warm_restart, "kill", kill)
    code, found = measured()
    assert code == 1
    assert found["reason"] == "700 of 700 blocks hit after the warm start, and 256 of 256 had other bytes"


@pytest.mark.parametrize("limit", ["1", "1000"], ids=["its limit", "SIGTERM"])
def test_a_run_that_is_ended_shows_what_it_has_and_leaves_nothing(short_dir: Path, kept: Path, limit: str) -> None:
    command = [sys.executable, "-m", "benchmarks.warm_restart", "--device", "host", "--pool-size", "6MiB"]
    options = ["--dir", str(kept), "--rounds", "1000", "--limit", limit]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *options], env=environment(TMPDIR=str(short_dir)), **pipes) as process:
        if limit != "1":
            support.wait_line(process, "round 1: cold: ")
            process.send_signal(signal.SIGTERM)
        done = support.finish(process)
    assert done.returncode == 130, done.stderr
    assert "warm-restart: interrupted" in done.stdout
    assert "A pool of 6 MiB" in done.stdout or limit == "1", "what was measured is shown"
    support.wait_gone(short_dir)


def test_a_directory_without_room_is_named_before_anything_starts() -> None:
    room = os.statvfs(SHM)
    with pytest.raises(BenchError, match=r"/dev/shm has room for .*: name another directory with --dir"):
        warm_restart.check_room(SHM, room.f_blocks * room.f_frsize + 1)
