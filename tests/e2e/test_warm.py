"""What the tests fork instead of starting it is what would have been started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.harness import SECONDS, DaemonProcess, environment, eventually
from tests.warm import Forked

COPIER = "kvsidecar.copier.process"
"""Of a copier it is the program, and not imported."""


def imported_by_a_daemon(directory: Path) -> set[str]:
    """By one that is started in the usual way, and its copier, until they are ready."""
    with DaemonProcess(directory, under=["env", "PYTHONPROFILEIMPORTTIME=1"]) as daemon:
        daemon.wait_ready()
        daemon.terminate()
        texts = [line["text"] for line in daemon.read_log() if line["event"] == "stderr"]
    return {text.rpartition("|")[2].strip() for text in texts if text.startswith("import time:")}


def test_what_is_forked_has_imported_what_a_daemon_and_its_copier_import_and_nothing_else(short_dir: Path) -> None:
    script = "import sys; from tests import warm; warm._import(); print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=SECONDS)
    forked = {name for name in said.stdout.split() if name.partition(".")[0] == "kvsidecar"}
    started = {name for name in imported_by_a_daemon(short_dir) if name.partition(".")[0] == "kvsidecar"}
    assert forked == {*started, COPIER}


def test_a_fork_is_found_by_its_command_line_with_its_copier(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as daemon:
        assert isinstance(daemon.process, Forked)
        daemon.wait_ready()
        assert f"--socket\0{daemon.socket}\0" in Path(f"/proc/{daemon.process.pid}/cmdline").read_text()
        assert len(daemon.copiers()) == 1


@pytest.mark.parametrize("variables", [{"PYTHONUTF8": "1"}, {"LC_ALL": "POSIX"}, {"OTEL_SDK_DISABLED": "true"}])
def test_a_daemon_with_other_variables_of_libraries_is_started_in_the_usual_way(
    short_dir: Path, variables: dict[str, str]
) -> None:
    with DaemonProcess(short_dir, **variables) as daemon:
        assert isinstance(daemon.process, subprocess.Popen)


def test_a_fork_has_the_directory_and_the_variables_of_the_test(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(short_dir)
    checked = run("serve", "--check", KVSIDECAR_STORE_CHUNK="no size")
    assert checked.returncode == 78
    assert "KVSIDECAR_STORE_CHUNK" in checked.stderr
    with DaemonProcess(short_dir) as daemon:
        assert Path(f"/proc/{daemon.process.pid}/cwd").resolve() == short_dir.resolve()


def test_how_a_fork_ends_is_seen(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as daemon:
        assert daemon.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.process.wait(0.01)
        assert daemon.terminate() == 0
    with DaemonProcess(short_dir) as daemon:
        daemon.process.send_signal(signal.SIGABRT)
        assert daemon.process.wait(SECONDS) == daemon.process.poll() == -signal.SIGABRT
        daemon.process.send_signal(signal.SIGTERM)  # no effect


def test_forks_end_with_the_tests_however_those_end(short_dir: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from tests.harness import DaemonProcess\n"
        "daemon = DaemonProcess(Path(sys.argv[1])).wait_ready()\n"
        "print(daemon.process.pid, *daemon.copiers(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", script, str(short_dir)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, env=environment())
    pids = said.stdout.split()
    assert len(pids) == 2
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_a_signal_to_a_fork_whose_end_is_not_known_yet_is_lost() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(SECONDS)
    ended, write = os.pipe()
    fork = Forked([], gone.pid, ended)
    fork.kill()
    os.write(write, b"0")
    assert fork.wait(SECONDS) == 0
    os.close(write)
