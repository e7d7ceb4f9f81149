"""The facts of the machine that the tests run on, and drivers that misbehave."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvsidecar.cli.doctor import gather as gathering
from kvsidecar.cli.doctor.checks import examine
from kvsidecar.cli.doctor.facts import Host
from kvsidecar.cli.doctor.findings import Verdict
from kvsidecar.cli.doctor.gather import gather
from kvsidecar.device.cuda import calls as driver_calls
from kvsidecar.support.units import MiB
from kvsidecar.types import State
from tests.harness import SECONDS, DaemonProcess, environment
from tests.marks import processes

FLAGS = {"device": "host", "pool_size": "1MiB", "config": None}


def driver_that(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    """Let the probe be this program instead."""
    program = directory / "python"
    # By a shell: the path of an interpreter may have spaces, and then no file can begin with it.
    program.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(script)}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@processes
def test_this_machine_is_looked_at_whatever_it_has(short_dir: Path) -> None:
    facts = gather({**FLAGS, "socket": str(short_dir / "kvs.sock")}, None)
    assert facts.config.pool_bytes == MiB
    assert facts.memory.page_kind
    assert facts.memory.available
    assert facts.kernel.refused == ()
    assert facts.isolation.ipc_namespace == os.stat("/proc/self/ns/ipc").st_ino
    assert facts.daemon.state is None
    assert not facts.socket.exists
    assert examine(facts)


def test_a_running_daemon_and_its_socket_are_seen(daemon: DaemonProcess) -> None:
    facts = gather({**FLAGS, "socket": daemon.socket}, daemon.process.pid)
    assert facts.daemon.state is State.READY
    assert facts.daemon.pid == daemon.process.pid
    assert (facts.socket.exists, facts.socket.mode) == (True, 0o600)
    assert facts.engine is not None
    assert facts.engine.isolation == facts.isolation
    assert facts.engine.uid == os.getuid()


@processes
def test_the_directory_that_keeps_the_pool_is_looked_at_and_not_made(short_dir: Path, pool_dir: Path) -> None:
    flags = {**FLAGS, "socket": str(short_dir / "kvs.sock"), "pool_dir": str(pool_dir)}
    before = gather(flags, None).kept_pool
    assert not pool_dir.exists()
    assert (before.directory, before.problem, before.file_system) == (str(pool_dir), "", "tmpfs")
    assert (before.writable, before.pool_bytes) == (True, None)
    assert (before.room or 1 << 62) > MiB
    with DaemonProcess(short_dir, "--pool-dir", str(pool_dir)) as daemon:
        running = gather({**flags, "socket": daemon.wait_ready().socket}, None)
        assert running.daemon.carrier == "directory"
    after = gather(flags, None).kept_pool
    assert (after.pool_bytes, after.pool_owner, after.owner) == (MiB, before.owner, before.owner)
    none = gather({**flags, "pool_dir": None}, None)
    assert none.kept_pool.directory == ""


@processes
@pytest.mark.parametrize("place", ["/proc", "/proc/new", "/nowhere/at/all"])
def test_a_directory_that_cannot_keep_the_pool_is_a_problem_in_the_daemons_words(short_dir: Path, place: str) -> None:
    facts = gather({**FLAGS, "socket": str(short_dir / "kvs.sock"), "pool_dir": place}, None)
    assert facts.kept_pool.problem.startswith(f"--pool-dir='{place}' ")
    (finding,) = [each for each in examine(facts) if each.check == "kept pool"]
    assert finding.verdict is Verdict.PROBLEM


@processes
def test_a_dead_daemons_socket_is_a_problem(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as dead:
        dead.process.kill()
        dead.process.wait()
        findings = examine(gather({**FLAGS, "socket": dead.socket}, None))
    assert [each.verdict for each in findings if each.check == "daemon"] == [Verdict.PROBLEM]


@processes
def test_an_engines_allocator_variables_are_read(short_dir: Path) -> None:
    sleeper = [sys.executable, "-c", "print(flush=True); input()"]
    variables = environment(PYTORCH_ALLOC_CONF="expandable_segments:True", SECRET="x")
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        facts = gather({**FLAGS, "socket": str(short_dir / "kvs.sock")}, engine.pid)
        engine.communicate(b"\n", SECONDS)
    assert facts.engine is not None
    assert facts.engine.environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # and nothing else of them
    gone = gather({**FLAGS, "socket": str(short_dir / "kvs.sock")}, engine.pid)
    assert gone.engine is not None
    assert not gone.engine.exists


@processes
def test_a_pool_that_does_not_fit_is_refused_in_the_daemons_words(short_dir: Path) -> None:
    facts = gather({**FLAGS, "pool_size": "60TiB", "socket": str(short_dir / "kvs.sock")}, None)
    assert facts.memory.refusal.startswith("the pool needs 60 TiB")


@processes
def test_a_bad_setting_is_a_fact_and_no_crash(short_dir: Path) -> None:
    facts = gather({**FLAGS, "pool_size": "lots", "socket": str(short_dir / "kvs.sock")}, None)
    assert facts.config.problem.startswith("--pool-size='lots'")
    assert facts.config.socket == str(short_dir / "kvs.sock")
    assert examine(facts)


@processes
@pytest.mark.parametrize(
    ("script", "seconds", "said"),
    [
        ("import os; os.abort()", SECONDS, "exited with -6"),
        ("import time; time.sleep(3600)", 0.5, "did not start within"),
        ("print('no JSON')", SECONDS, "exited with 0"),
    ],
)
def test_a_driver_that_crashes_or_hangs_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, short_dir: Path, script: str, seconds: float, said: str
) -> None:
    monkeypatch.setattr(gathering, "PROBE_SECONDS", seconds)
    driver_that(monkeypatch, short_dir, script)
    facts = gather({**FLAGS, "device": "auto", "socket": str(short_dir / "kvs.sock")}, None)
    assert said in facts.driver.problem
    (finding,) = [each for each in examine(facts) if each.check == "driver"]
    assert finding.verdict is Verdict.PROBLEM


@processes
def test_what_a_driver_says_becomes_facts(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> None:
    card = {"uuid": "GPU-1", "name": "X", "bus_id": "0000:ff:1f.7", "memory_bytes": 7, "compute_mode": 0}
    said = {"installed": True, "cuda_version": 13000, "calls": 3, "missing_calls": ["cuX"], "gpus": [card]}
    driver_that(monkeypatch, short_dir, f"print({json.dumps(json.dumps(said))})")
    driver = gather({**FLAGS, "socket": str(short_dir / "kvs.sock")}, None).driver
    assert (driver.cuda_version, driver.missing_calls, driver.problem) == (13000, ("cuX",), "")
    assert [gpu.uuid for gpu in driver.gpus] == ["GPU-1"]


def test_the_list_of_needed_calls_is_what_the_code_calls() -> None:
    device = Path(driver_calls.__file__).parent
    source = "".join(path.read_text() for path in device.glob("*.py"))
    assert set(re.findall(r"\bdriver\.(cu[A-Z]\w*)\(", source)) == driver_calls.NEEDED


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no NVIDIA GPU")
def test_the_gpus_of_the_doctor_are_those_of_the_daemon(short_dir: Path) -> None:
    from kvsidecar.device.cuda.platform import CudaPlatform

    driver = gather({**FLAGS, "socket": str(short_dir / "kvs.sock")}, None).driver
    assert tuple(gpu.uuid for gpu in driver.gpus) == CudaPlatform().device_uuids()
    assert not driver.problem
    assert not driver.missing_calls


@pytest.mark.parametrize(
    ("files", "seen"),
    [
        ({"proc/version": "Linux version 6.8.0"}, Host(cgroup=0)),
        ({"sys/fs/cgroup/cgroup.controllers": "memory"}, Host(cgroup=2)),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "1"}, Host(cgroup=1)),
        ({"proc/version": "Linux version 5.15.167.4-microsoft-standard-WSL2"}, Host(wsl=True, cgroup=0)),
        ({"dev/dxg": ""}, Host(wsl=True, cgroup=0)),
        ({"proc/version": "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"}, Host(gvisor=True, cgroup=0)),
        ({"dev/tdx_guest": ""}, Host(confidential="Intel TDX", cgroup=0)),
        ({"dev/sev-guest": ""}, Host(confidential="AMD SEV", cgroup=0)),
    ],
)
def test_odd_machines_are_known_by_their_files(files: dict[str, str], seen: Host, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert gathering.host(tmp_path) == seen


def test_the_pool_that_is_judged_is_the_running_ones_unless_a_size_is_given(daemon: DaemonProcess) -> None:
    facts = gather({"socket": daemon.socket}, None)
    assert (facts.config.pool_bytes, facts.config.running) == (1 << 20, True)
    facts = gather({"socket": daemon.socket, "pool_size": "2MiB"}, None)
    assert (facts.config.pool_bytes, facts.config.running) == (2 << 20, False)
