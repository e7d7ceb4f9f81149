import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import run
from benchmarks.peers.report import Problem, to_line
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.timing import poll_until
from benchmarks.peers.worker import Settings, arguments_of, settings_from
from tests.benchmarks.alive import is_alive
from tests.benchmarks.workers import ROW

ROOT = Path(__file__).parents[2]


def fake(how, modules=()):
    return run.System("fake", modules, "pip install fake", ["tests.benchmarks.workers", how])


def settings(tmp_path, **changes):
    return replace(Settings(rows=tmp_path / "fake.jsonl", repeat=2, quick=False, shapes=SHAPES[:2]), **changes)


@pytest.mark.parametrize("changes", [{}, {"quick": True}, {"rpc": "127.0.0.1:1", "http": "127.0.0.1:2", "repeat": 5}])
def test_a_worker_gets_the_settings_that_were_meant_for_it(tmp_path, changes):
    meant = settings(tmp_path, **changes)
    assert settings_from(arguments_of(meant)) == meant


def test_what_a_worker_measured_is_read(tmp_path):
    assert run.measure(fake("works"), settings(tmp_path), tmp_path, 60) == [ROW]


def test_rows_of_an_earlier_run_are_not_read_again(tmp_path):
    (tmp_path / "fake.jsonl").write_text(to_line(replace(ROW, gbps=99.0)) + "\n")
    assert run.measure(fake("works"), settings(tmp_path), tmp_path, 60) == [ROW]


def test_a_worker_that_dies_keeps_its_rows_and_says_why(tmp_path):
    row, problem = run.measure(fake("dies"), settings(tmp_path), tmp_path, 60)
    assert row == ROW
    assert isinstance(problem, Problem)
    assert "status 1: the GPU fell off the bus" in problem.reason


def test_a_worker_that_does_not_end_is_ended_and_keeps_its_rows(tmp_path):
    row, problem = run.measure(fake("hangs"), settings(tmp_path), tmp_path, 3)
    assert row == ROW
    assert "not done after 3 s" in problem.reason


def test_what_a_worker_refuses_is_one_line(tmp_path):
    _, problem = run.measure(fake("refuses"), settings(tmp_path), tmp_path, 60)
    assert problem == Problem("fake", "tp8-4k: no such call")


def test_a_system_that_is_not_installed_says_what_to_install(tmp_path):
    (problem,) = run.measure(fake("works", ["no_such_module"]), settings(tmp_path), tmp_path, 60)
    assert "no_such_module" in problem.reason
    assert "pip install fake" in problem.reason


def test_lmcache_without_its_extension_is_invalid(tmp_path, monkeypatch):
    class Server:
        running = True

        def text(self):
            return "WARNING: CudaDeviceOps stays on the torch baseline for all ops."

    class Served:
        def __enter__(self):
            return settings(tmp_path), Server()

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(run, "served", lambda *_: Served())
    (row,) = run.measure(fake("works"), settings(tmp_path), tmp_path, 60)
    assert not row.valid
    assert "torch baseline" in row.note


def test_only_keeps_the_order_and_names_what_is_unknown():
    assert [system.name for system in run.chosen("lmcache,driver")] == ["driver", "lmcache"]
    with pytest.raises(argparse.ArgumentTypeError, match="driver, vllm, pegaflow, lmcache"):
        run.chosen("mooncake")


MAIN = """
import sys
from benchmarks.peers import run
run.SYSTEMS = (run.System("fake", [], "", ["tests.benchmarks.workers", {how!r}]),)
sys.exit(run.main([{arguments}]))
"""


def start(tmp_path, how):
    arguments = f"'--logs', {str(tmp_path)!r}, '--json', {str(tmp_path / 'out.json')!r}"
    command = [sys.executable, "-c", MAIN.format(how=how, arguments=arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_run_prints_the_table_and_writes_the_json(tmp_path):
    process = start(tmp_path, "works")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "| fake" in out
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["gbps"] == 1.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_no_child_behind(tmp_path, number):
    process = start(tmp_path, "hangs")
    log = tmp_path / "fake.log"
    poll_until(lambda: log.exists() and "started" in log.read_text(), 60, "the worker runs", pause=0.05)
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
        workers = [int(pid) for pid in children.read().split()]
    assert workers
    assert all(map(is_alive, workers))
    os.kill(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in out
    assert not any(map(is_alive, workers))
