"""What a whole run does not show: what happens when something goes wrong in the middle of one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsidecar.bench import engine as engines
from kvsidecar.bench import run as runs
from kvsidecar.bench import scaling, verify
from kvsidecar.bench.engine import AttachedEngine, attached
from kvsidecar.bench.errors import BenchError
from kvsidecar.bench.layouts import LAYOUTS, TINY
from kvsidecar.bench.memory import Bytes
from kvsidecar.bench.options import BenchOptions
from kvsidecar.bench.processes import BenchChild, RunningDaemon
from kvsidecar.bench.report import Measurement
from kvsidecar.bench.setting import Setting
from kvsidecar.bench.stats import latency
from kvsidecar.client import Blocks
from tests.harness import DaemonProcess, eventually
from tests.marks import lent_daemon

pytestmark = lent_daemon

QUICK = BenchOptions(device="host", quick=True, only=("verify",))


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[AttachedEngine]:
    with attached(daemon.socket, TINY, None, run="test", rng=np.random.default_rng(0)) as engine:
        yield engine


@pytest.fixture
def setting(short_dir: Path) -> Iterator[Setting]:
    setting = Setting(QUICK, short_dir, lambda _: None)
    yield setting
    setting.close()


class Lies:
    """Memory in which one byte of one block is not what the daemon wrote."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def read(self, block: int, into: Bytes) -> None:
        self._memory.read(block, into)
        self._reads += 1
        if self._reads == 3:
            into[-1] ^= 1


def test_one_wrong_byte_is_one_wrong_block(engine: AttachedEngine) -> None:
    rng = np.random.default_rng(0)
    assert verify.round_trip(engine, 10, rng) == 0
    engine.memory = Lies(engine.memory)
    assert verify.round_trip(engine, 10, rng) == 1


def test_a_load_that_does_nothing_is_seen(engine: AttachedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.client, "load", lambda *_, **__: engine.client.store([]))
    assert verify.round_trip(engine, 10, np.random.default_rng(0)) == 10


def test_a_failed_verification_fails_the_run_and_not_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "round_trip", lambda engine, *_: 3 if engine.layout.name == "tp8-4k" else 0)
    file = tmp_path / "result.json"
    options = BenchOptions(device="host", quick=True, only=("verify", "lookup"), json=str(file))
    assert runs.run(options) == 1
    measured = json.loads(file.read_text())["measurements"]
    assert measured["verify"]["status"] == "failed"
    assert measured["verify"]["reason"].endswith("3 of 512 blocks of tp8-4k")
    assert len(measured["verify"]["rows"]) == len(LAYOUTS)
    assert measured["lookup"]["status"] == "ok"
    assert "3 of 512 blocks of tp8-4k" in capsys.readouterr().out


def test_a_measurement_that_raises_anything_keeps_its_rows_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: Setting, out: Measurement) -> None:
        out.add(hashes=1, hits=1, mode="prefix", lease=True, **latency([1.0]))
        raise ZeroDivisionError("a bug")

    monkeypatch.setitem(runs.MEASURE, "lookup", broken)
    file = tmp_path / "result.json"
    assert runs.run(BenchOptions(device="host", quick=True, only=("lookup", "submit"), json=str(file))) == 1
    measured = json.loads(file.read_text())["measurements"]
    assert measured["lookup"]["reason"] == "ZeroDivisionError: a bug"
    assert len(measured["lookup"]["rows"]) == 1
    assert measured["submit"]["status"] == "ok"


def test_a_dead_daemon_is_replaced_for_the_next_measurement(setting: Setting) -> None:
    first = setting.daemon()
    assert setting.daemon() is first
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: setting.daemon() is not first)
    with setting.engine(TINY) as engine:
        engine.finish(engine.client.store(engine.jobs([engine.fresh(3)])[0]))


def test_a_job_that_is_declined_or_skips_blocks_is_no_sample(engine: AttachedEngine) -> None:
    known = engine.fresh(2)
    engine.finish(engine.client.store([Blocks(0, known, [0, 1])]))
    with pytest.raises(BenchError, match="2 blocks were skipped"):
        engine.finish(engine.client.store([Blocks(0, known, [0, 1])]))
    with pytest.raises(BenchError, match="declined: not_found"):
        engine.finish(engine.client.load([Blocks(0, engine.fresh(1), [0])]))


def test_never_more_jobs_are_outstanding_than_in_flight(engine: AttachedEngine) -> None:
    most = 0

    def submits() -> Iterator[Any]:
        for submit in engine.stores(1, 9):

            def counted(submit: Any = submit) -> int:
                nonlocal most
                job: int = submit()
                most = max(most, engine.client.outstanding)
                return job

            yield counted

    finished = engine.run(list(submits()), 3)
    assert len(finished) == 9
    assert 1 <= most <= 3
    assert all(job.nbytes == TINY.block_bytes and job.seconds > 0 for job in finished)


def test_held_blocks_can_be_loaded_until_the_end_of_the_block(engine: AttachedEngine) -> None:
    with engine.held(5, 2) as held:
        assert engine.client.status().pool.leases == 2
        assert all(job.nbytes == 5 * TINY.block_bytes for job in engine.run(engine.loads(held, 4), 2))
    assert engine.client.status().pool.leases == 0


def test_lookups_beside_the_ranks_find_their_blocks_when_earlier_ones_are_gone(
    engine: AttachedEngine, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "HASHES", 16)  # what the pool of a test has room for
    asker = scaling.Asker(engine, RunningDaemon(daemon.socket))
    asker.ask_for(0.01)
    engine.clear()
    asker.ask_for(0.01)
    assert asker.p50_us > 0


def test_throughput_counts_from_the_first_submission_to_the_last_end() -> None:
    jobs = [engines.Finished(1.0, 2.0, 100, 0.5), engines.Finished(1.5, 3.0, 300, 0.5)]
    assert engines.throughput(jobs) == 200.0


def test_a_child_reports_its_own_errors_and_goes_on(setting: Setting) -> None:
    probe = setting.probe()
    with pytest.raises(BenchError, match="the probe process: KeyError: 'nothing'"):
        probe.call("nothing")
    assert len(probe.call("token", samples=3)["seconds"]) == 3


def test_a_child_that_dies_says_what_it_said_last(tmp_path: Path) -> None:
    child = BenchChild("kvsidecar.bench.rank", {"layout": "none"}, tmp_path)
    with pytest.raises(BenchError, match=r"the rank process ended with exit code 1:[^$]*Error"):
        child.answer()
    child.close()


def test_rows_are_scaled_so_that_jobs_in_flight_fit_the_pool(setting: Setting) -> None:
    for layout in setting.layouts():
        assert layout.block_bytes * 4 * 512 <= setting.in_flight_bytes


def test_latencies_are_microseconds() -> None:
    assert latency([0.001] * 50 + [0.002]) == {
        "n": 51, "p50_us": 1000.0, "p99_us": 1500.0, "min_us": 1000.0, "max_us": 2000.0,
    }  # fmt: skip
