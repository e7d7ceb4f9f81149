"""What a person at the command line sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvsidecar.cli.main import NO_TEXTS
from kvsidecar.client import Blocks, ClientError
from kvsidecar.daemon.setting_sources import SECTIONS, flag_of, variable_of
from kvsidecar.daemon.settings import Settings
from tests.cli.command import run
from tests.harness import SECONDS, DaemonProcess, Rank, done, environment, eventually, hashes
from tests.marks import processes

pytestmark = processes


def test_help_shows_every_option_with_its_default_and_variable() -> None:
    text = run("serve", "--help", COLUMNS="200").stdout
    for option in Settings.model_fields:
        assert flag_of(option) in text
        assert variable_of(option) in text.replace("\n", "").replace(" ", "")
    assert text.count("[default:") == len(Settings.model_fields) + 1


def test_the_help_of_serve_is_in_the_sections_of_its_page() -> None:
    text = run("serve", "--help", COLUMNS="200").stdout
    titles = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options", *SECTIONS.values()]
    pool = text.partition("\nPool:\n")[2].partition("\nDisk:\n")[0]
    assert "--pool-size" in pool
    assert "--table-dir" in pool
    assert "--disk-dir" not in pool


@pytest.mark.parametrize("command", [[], ["status"]])
def test_a_python_without_docstrings_says_that_the_texts_of_the_help_are_missing(command: list[str]) -> None:
    def help_by(*how: str) -> str:
        return subprocess.run(
            [sys.executable, *how, "-m", "kvsidecar", *command, "--help"],
            check=True, capture_output=True, text=True, env=environment(),
        ).stdout  # fmt: skip

    said = " ".join(help_by("-OO").split())
    assert NO_TEXTS in said
    assert NO_TEXTS not in " ".join(help_by().split())


@pytest.mark.parametrize("command", ["status", "top", "engines", "drain", "pins", "size"])
def test_every_command_notices_a_mistyped_variable(command: str, short_dir: Path) -> None:
    where = () if command == "size" else ("--socket", str(short_dir / "none.sock"))
    mistyped = run(command, *where, KVSIDECAR_SOKET="/x")
    assert "kvsidecar: warning: KVSIDECAR_SOKET is not a setting: did you mean KVSIDECAR_SOCKET?" in mistyped.stderr
    ours = {"KVSIDECAR_CONNECT_CA": "/x", "KVSIDECAR_POOL_SIZE": "x", "KVSIDECAR_SERVICE_HOST": "10.0.0.1"}
    assert "warning" not in run(command, *where, **ours).stderr


@pytest.mark.parametrize("module", ["torch", "grpc", "aiohttp", "numpy", "cuda", "uvloop", "rich", "matplotlib"])
def test_help_imports_nothing_heavy(module: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "kvsidecar", "serve", "--help"]
    times = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment()).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in times.splitlines()}
    assert "kvsidecar" in imported
    assert module not in imported


def test_no_file_of_the_daemon_pulls_in_torch(short_dir: Path) -> None:
    (short_dir / "torch.py").write_text("raise SystemExit('torch was imported')")
    modules = ("daemon.daemon", "cli.main", "device.host", "cli.demo.run", "bench.run")
    script = "import " + ", ".join(f"kvsidecar.{module}" for module in modules)
    path = os.pathsep.join([str(short_dir), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(PYTHONPATH=path),
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (("--pool-size", "lots"), {}, "--pool-size='lots'"),
        ((), {"KVSIDECAR_POOL_SIZ": "1GiB"}, "KVSIDECAR_POOL_SIZ is not a setting: did you mean KVSIDECAR_POOL_SIZE?"),
        (("--http-port", "99999"), {}, "--http-port='99999'"),
        ((), {"KVSIDECAR_FAILPOINTS": "no.such=kill"}, "no.such"),
        (("--socket-group", "no-such-group", "--socket-mode", "0660"), {}, "no-such-group"),
        (("--devices", "host,,host-1"), {}, "--devices='host,,host-1' has an empty entry"),
        (("--devices", "host,none"), {}, "--devices='host,none': device none is not visible"),
    ],
)
def test_a_bad_setting_stops_the_start_with_one_sentence(
    short_dir: Path, arguments: tuple[str, ...], variables: dict[str, str], sentence: str
) -> None:
    socket = str(short_dir / "kvs.sock")
    flags = ["--device", "host", "--socket", socket]
    if "--pool-size" not in arguments:
        flags += ["--pool-size", "1MiB"]
    if "--http-port" not in arguments:
        flags += ["--http-port", "0"]
    refused = run("serve", *flags, *arguments, **variables)
    assert refused.returncode == 78
    assert sentence in refused.stderr
    said = [line for line in refused.stderr.splitlines() if not line.startswith("{")]
    assert len(said) == 1
    assert said[0].startswith("kvsidecar: ")


def test_a_gpu_that_is_not_there_is_one_sentence(short_dir: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    refused = run("serve", "--device", "cuda", "--socket", str(short_dir / "kvs.sock"), "--http-port", "0")
    assert refused.returncode == 69
    assert refused.stderr.count("\n") == 1
    assert "driver" in refused.stderr


def test_an_http_port_in_use_is_one_sentence(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as daemon:
        port = daemon.http.rpartition(":")[2]
        socket = str(short_dir / "other.sock")
        refused = run(
            "serve", "--device", "host", "--pool-size", "1MiB", "--socket", socket, "--http-port", port
        )  # fmt: skip
    assert refused.returncode == 75, "it may pass: a service manager starts it again"
    said = [line for line in refused.stderr.splitlines() if not line.startswith("{")]
    assert len(said) == 1
    assert f"127.0.0.1:{port} (Address already in use): free it, or set --http-host and --http-port" in said[0]


def test_an_address_that_no_machine_will_have_is_a_wrong_setting(short_dir: Path) -> None:
    flags = ["--device", "host", "--pool-size", "1MiB", "--socket", str(short_dir / "kvs.sock")]
    refused = run("serve", *flags, "--http-port", "0", "--http-host", "no such host")
    assert refused.returncode == 78
    assert "HTTP cannot listen on no such host:0" in refused.stderr
    later = run("serve", *flags, "--http-port", "0", "--http-host", "192.0.2.1")  # of no network; TEST-NET-1
    assert later.returncode == 75
    assert "192.0.2.1:0 (Cannot assign requested address)" in later.stderr


def test_status_without_a_daemon_says_so(short_dir: Path) -> None:
    missing = run("status", "--socket", str(short_dir / "none.sock"))
    assert missing.returncode == 69
    assert "no kvsidecar answers" in missing.stderr
    assert missing.stderr.count("\n") == 1


def test_status_shows_state_pool_namespaces_engines_and_refusals(daemon: DaemonProcess) -> None:
    rank = Rank(daemon, instance="my-engine")
    done(rank.store("a", "b"))
    rank.hits("a", "x")  # what a lookup finds is no hit rate
    assert rank.client.report_prompts_nowait(rank.namespace, 400, 300)
    rank.load("x", at=[1])
    text = run("status", "--socket", daemon.socket, COLUMNS="120").stdout
    for word in ("ready", "on host", "24 KiB of 1 MiB used", "2 blocks", "my-engine", "0/1", "75%", "not_found 1"):
        assert word in text, word

    body = json.loads(run("status", "--socket", daemon.socket, "--json").stdout)
    assert body["readiness"]["state"] == "ready"
    assert body["pool"]["used_bytes"] == 2 * 12288
    assert body["ranks"][0]["instance"] == "my-engine"
    assert body["namespaces"][0]["namespace"]["model"] == "m"
    assert body["refusals"] == {"not_found": 1}
    assert body == {**daemon.get("/status")[1], "uptime_seconds": body["uptime_seconds"], "ranks": body["ranks"]}
    rank.close()


@processes
def test_status_of_a_daemon_that_has_failed_says_so_and_exits_with_1(short_dir: Path) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS="pool.pin_chunk=raise(no memory to lock)") as daemon:
        eventually(lambda: daemon.get("/status")[1]["readiness"]["state"] == "failed", "it has failed")
        for more in ((), ("--json",)):
            shown = run("status", "--socket", daemon.socket, *more)
            assert (shown.returncode, "no memory to lock" in shown.stdout) == (1, True)


@processes
def test_what_is_refused_as_invalid_is_in_the_daemons_log(short_dir: Path) -> None:
    """With a daemon of its own: such lines are limited in time."""
    with DaemonProcess(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        job = rank.client.store([Blocks(0, hashes("a"), [10**6])])
        assert rank.finish(job).reason == "invalid_request"
        daemon.wait_log("a job was refused as invalid")
        with pytest.raises(ClientError):
            rank.client.lookup(rank.namespace, {0: b"not a whole hash"})
        daemon.wait_log("a request was refused as invalid")
        rank.close()


def test_an_installation_without_the_commands_says_which_one_has_them() -> None:
    script = (
        "import runpy, sys; sys.modules['kvsidecar.cli'] = None; runpy.run_module('kvsidecar', run_name='__main__')"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS)
    assert (told.returncode, told.stderr.count("\n")) == (1, 1)
    assert "the distribution kvsidecar, from where this one is, has them" in told.stderr


def test_the_demo_verifies_every_byte() -> None:
    shown = run("demo", "--blocks", "40", "--device", "host", COLUMNS="120")
    assert "GB/s" not in shown.stdout, "of a processor's own memory"
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "verified: engine B loaded what engine A had stored" in shown.stdout
    assert "killed with SIGKILL" in shown.stdout


def test_the_demo_loads_from_disk_through_another_daemon_if_asked() -> None:
    shown = run("demo", "--blocks", "40", "--disk", "--device", "host", COLUMNS="160")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "loaded what engine A had stored from disk, through another daemon" in shown.stdout


def test_the_demo_refuses_nonsense() -> None:
    assert run("demo", "--blocks", "0").returncode == 1


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["engines"], ["top", "--once"], ["--help"]])
def test_output_that_cannot_be_written_is_one_sentence(daemon: DaemonProcess, command: list[str]) -> None:
    socket = () if command == ["--help"] else ("--socket", daemon.socket)
    with open("/dev/full", "w") as full:
        refused = subprocess.run(
            [sys.executable, "-m", "kvsidecar", *command, *socket],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS, env=environment(),
        )  # fmt: skip
    assert refused.stderr == "kvsidecar: the output cannot be written: No space left on device\n"
    assert refused.returncode == 74
