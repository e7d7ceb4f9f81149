"""Files that no operator means to write: each is one sentence at the start and at a reload, and the next one counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsidecar.cli.common import EXIT_CONFIG
from kvsidecar.support.config_files import MAX_BYTES
from tests.harness import SECONDS, DaemonProcess, Rank, done, environment
from tests.marks import promise


def text(content: str | bytes) -> Callable[[Path], None]:
    """A file with this content."""

    def write(file: Path) -> None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "nested lists": (text("x = " + "[" * 100_000), "nested too deeply"),
    "nested tables": (text("x = " + "{a=" * 100_000), "nested too deeply"),
    "nested in a text": (text(f"policy = '{'[' * 100_000}'"), "nested too deeply"),
    "a number for a list": (text("devices = 0"), "devices=0 in "),
    "a list of numbers": (text("devices = [0, 1]"), "devices=[0, 1] in "),
    "a number that no timer takes": (text("drain_timeout = 1e300"), "drain_timeout=1e+300 in "),
    "a NUL in a name": (text('http_host = "a\\u0000b"'), "contains a NUL character"),
    "a long value": (text(f'verify = "{"x" * 1_000_000}"'), "verify='xxx"),
    "a long name": (text("x" * 1_000_000 + " = 1"), "is not a setting"),
    "a number of many digits": (text("http_port = " + "9" * 10_000), "is not a TOML file"),
    "no text": (text(b"\xff\xfe"), "is not a TOML file"),
    "too long": (text("#" * (MAX_BYTES + 1)), "it has more than 4 MiB"),
    "a FIFO": (os.mkfifo, "it is not a regular file"),
    "a directory": (os.mkdir, "Is a directory"),
    "a device": (lambda file: file.symlink_to("/dev/zero"), "it is not a regular file"),
}


def remove(file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    else:
        file.unlink()


def test_no_file_ends_the_reloads_and_what_is_revoked_after_them_is_revoked(short_dir: Path) -> None:
    file = short_dir / "kvsidecar.toml"
    allowed = f'[[policy]]\nuids = [{os.getuid()}]\nnamespaces = ["m"]\n'
    file.write_text(allowed)
    with DaemonProcess(short_dir, "--config", str(file)) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        for make, said in BAD.values():
            remove(file)
            make(file)
            daemon.process.send_signal(signal.SIGHUP)
            reason = daemon.wait_log("settings not reloaded")["reason"]
            assert said in reason
            assert len(reason) < 1000
        done(rank.store("b"))
        remove(file)
        file.write_text(allowed.replace('"m"', '"other"'))
        daemon.process.send_signal(signal.SIGHUP)
        assert "policy" in daemon.wait_log("settings reloaded")["changed"]
        assert rank.store("c").reason == "denied"
        rank.close()


@promise("the daemon prints one sentence and exits")
@pytest.mark.parametrize("kind", BAD)
def test_a_start_with_such_a_file_is_one_sentence_and_exit_code_78(short_dir: Path, kind: str) -> None:
    file = short_dir / "kvsidecar.toml"
    make, said = BAD[kind]
    make(file)
    command = [sys.executable, "-m", "kvsidecar", "serve", "--config", str(file), "--socket", str(short_dir / "s")]
    ran = subprocess.run(
        [*command, "--http-port=0"], capture_output=True, text=True, timeout=SECONDS, env=environment()
    )
    assert ran.returncode == EXIT_CONFIG
    assert said in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert len(ran.stderr) < 1000


def test_an_error_that_nobody_has_thought_of_is_heard_and_the_next_file_counts(short_dir: Path) -> None:
    (short_dir / "sitecustomize.py").write_text(
        "import tomllib\n"
        "loads = tomllib.loads\n"
        "tomllib.loads = lambda text: 1 / 0 if 'divide' in text else loads(text)\n"
    )
    file = short_dir / "kvsidecar.toml"
    file.write_text("")
    path = os.pathsep.join([str(short_dir), *filter(None, sys.path)])
    with DaemonProcess(short_dir, "--config", str(file), PYTHONPATH=path) as daemon:
        daemon.wait_ready()
        file.write_text("# divide")
        daemon.process.send_signal(signal.SIGHUP)
        assert "ZeroDivisionError" in daemon.wait_log("settings not reloaded")["reason"]
        file.write_text("stuck_after = 61")
        daemon.process.send_signal(signal.SIGHUP)
        assert daemon.wait_log("settings reloaded")["changed"] == ["stuck_after"]
