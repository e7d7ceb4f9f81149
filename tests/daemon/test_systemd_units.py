"""The files of deploy/systemd, without a systemd that runs them (see e2e/test_systemd.py)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvsidecar.cli.common import EXIT_CONFIG, EXIT_SOCKET
from kvsidecar.daemon.daemon import EXIT_COPIERS_LEFT
from kvsidecar.daemon.reload import RELOADABLE
from kvsidecar.daemon.setting_sources import load_settings
from kvsidecar.daemon.systemd import EXTEND_SECONDS, STOP_MARGIN_SECONDS
from kvsidecar.support.child_process import environment
from tests.marks import processes

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT = (UNITS / "kvsidecar.service").read_text()


def check(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(UNITS / "check"), str(directory)], capture_output=True, text=True, timeout=60)


def variables(text: str, pattern: str) -> dict[str, str]:
    found = dict(re.findall(pattern, text, re.MULTILINE))
    return {name: value for name, value in found.items() if name.startswith("KVSIDECAR_")}


def test_every_variable_of_the_unit_and_of_the_example_is_a_setting_with_a_good_value() -> None:
    in_unit = variables(UNIT, r"^Environment=(\w+)=(.*)$")
    in_example = variables((UNITS / "kvsidecar.env").read_text(), r"^#?(KVSIDECAR_\w+)=(.*)$")
    assert in_unit["KVSIDECAR_SOCKET"] == "/run/kvsidecar/kvsidecar.sock"
    assert len(in_example) > 4
    load_settings({}, {**in_unit, **in_example}, default_file=Path("/nowhere"))


def test_the_times_of_the_unit_fit_the_defaults_and_the_words_that_name_them() -> None:
    defaults = load_settings({}, {}, default_file=Path("/nowhere"))
    times = {name: int(value) for name, value in re.findall(r"^(\w+Sec)=(\d+)s$", UNIT, re.MULTILINE)}
    assert times["TimeoutStopSec"] >= defaults.drain_timeout + STOP_MARGIN_SECONDS
    assert f"drain_timeout ({defaults.drain_timeout:.0f} s)" in UNIT
    readme = (UNITS / "README.md").read_text()
    assert EXTEND_SECONDS == 120
    assert "two minutes" in readme
    assert f"`drain_timeout` + {STOP_MARGIN_SECONDS} s" in readme
    assert f"every {times['WatchdogSec'] / 2:.0f} s" in readme
    for text in (readme, (UNITS / "kvsidecar.env").read_text()):
        assert all(option in text for option in RELOADABLE)


def test_a_daemon_whose_copiers_do_not_end_is_started_again() -> None:
    (prevented,) = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT, re.MULTILINE)
    assert "Restart=on-failure" in UNIT
    assert str(EXIT_COPIERS_LEFT) not in prevented.split()


@processes
def test_a_start_that_no_repetition_helps_is_not_repeated() -> None:
    (prevented,) = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT, re.MULTILINE)
    command = [
        sys.executable,
        "-m",
        "kvsidecar",
        "serve",
        "--socket",
        "none",
        "--http-port",
        "0",
        "--pool-sise",
        "1MiB",
    ]
    mistyped = subprocess.run(command, capture_output=True, timeout=60, env=environment())
    assert {str(mistyped.returncode), str(EXIT_CONFIG), str(EXIT_SOCKET)} == set(prevented.split())


def test_a_reload_checks_the_settings_before_the_daemon_is_told() -> None:
    start = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    reload = re.findall(r"^ExecReload=(.*)$", UNIT, re.MULTILINE)
    assert reload == [f"{start[0]} --check", "/bin/kill -HUP $MAINPID"]


WHY_NOT = (
    "there is no systemd-analyze here"
    if shutil.which("systemd-analyze") is None
    else "there is no /run/systemd here, and this user may not make it for systemd-analyze"
    if not Path("/run/systemd").is_dir() and not os.access("/run", os.W_OK)
    else ""
)
systemd_analyze = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@systemd_analyze
@processes
def test_the_units_pass_the_check() -> None:
    done = check(UNITS)
    assert done.returncode == 0, done.stdout
    assert "not checked" not in done.stdout


@systemd_analyze
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("LockPersonality=yes", "LockPersonalty=yes"),
        ("TimeoutStopSec=60s", "TimeoutStopSec=soon"),
        ("Type=notify", "Type=notify-me"),
        ("ExecStart=/opt/kvsidecar/bin/kvsidecar serve", "ExecStart=/opt/kvsidecar/kvsidecar serve"),
        ("NoNewPrivileges=yes\nCapabilityBoundingSet=\n", ""),
    ],
)
@processes
def test_a_unit_with_a_mistake_fails_the_check(tmp_path: Path, line: str, instead: str) -> None:
    for unit in UNITS.glob("*.service"):
        shutil.copy(unit, tmp_path)
    assert line in UNIT
    (tmp_path / "kvsidecar.service").write_text(UNIT.replace(line, instead))
    done = check(tmp_path)
    assert done.returncode == 1, done.stdout
