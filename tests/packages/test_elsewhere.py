"""macOS and Windows: the wheels install there what the commands need that reach a daemon over TCP, and these work.

As far as Linux can tell: the dependencies are those of that platform, and what only Linux or Unix has is taken away.
"""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvsidecar.cli import node_commands
from kvsidecar.cli.main import OF_A_NODE
from tests.cli.size.support import LLAMA, alternating
from tests.e2e import remote as remotes
from tests.e2e.remote import Pki, Remote
from tests.harness import NAMESPACE, SECONDS, Rank, done, environment, hashes
from tests.packages import elsewhere
from tests.packages.support import new_environment, pip
from tests.terminal import Terminal

pki, remote = remotes.pki, remotes.remote
"""Fixtures, which pytest looks for in this module."""
PLATFORMS = ("darwin", "win32")
SCRIPT = elsewhere.__file__
OF_A_LAPTOP = {"status", "top", "engines", "clear", "pin", "unpin", "pins", "drain", "size"}


def required(wheels: list[Path], platform: str) -> set[str]:
    """What both wheels require there, without one another."""
    found = set()
    for wheel in wheels:
        archive = zipfile.ZipFile(wheel)
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        for text in HeaderParser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", []):
            each = Requirement(text)
            there = {"sys_platform": platform, "extra": ""}
            if each.name != "kvsidecar-client" and (each.marker is None or each.marker.evaluate(there)):
                found.add(f"{each.name}{each.specifier}")
    return found


@pytest.fixture(scope="module")
def python(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has what both platforms get."""
    wheels = [path for name, path in built.items() if name.endswith("-any.whl")]
    darwin, win32 = (required(wheels, platform) for platform in PLATFORMS)
    assert darwin == win32
    python = new_environment(tmp_path_factory.mktemp("laptop"))
    install = ("install", "--quiet", "--no-compile")
    pip(python, *install, *sorted(darwin))
    pip(python, *install, "--no-deps", *wheels)
    return python


Kvsidecar = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(params=PLATFORMS)
def kvsidecar(request: pytest.FixtureRequest, python: Path, tmp_path: Path) -> Kvsidecar:
    """Runs a command as on that platform, outside the checkout."""

    def ran(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-X", "warn_default_encoding", SCRIPT, request.param, "kvsidecar", *arguments]
        ours = {name: value for name, value in environment(**variables).items() if name != "PYTHONPATH"}
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=ours, cwd=tmp_path)

    return ran


@pytest.fixture
def where(remote: Remote, pki: Pki) -> dict[str, str]:
    """Variables that name the daemon."""
    tls = pki.client("ops.example")
    return {
        "KVSIDECAR_CONNECT": remote.address, "KVSIDECAR_CONNECT_CA": tls.ca,
        "KVSIDECAR_CONNECT_CERTIFICATE": tls.certificate, "KVSIDECAR_CONNECT_KEY": tls.key,
    }  # fmt: skip


def test_only_what_the_commands_need_is_installed(built: dict[str, Path]) -> None:
    wheels = [path for name, path in built.items() if name.endswith("-any.whl")]
    names = {Requirement(each).name for each in required(wheels, "win32")}
    assert names == {"click", "grpcio", "numpy", "protobuf", "rich"}
    assert {"aiohttp", "cuda-python", "uvloop"} <= {Requirement(each).name for each in required(wheels, "linux")}


def test_every_command_that_reaches_a_daemon_works(
    kvsidecar: Kvsidecar, remote: Remote, where: dict[str, str], tmp_path: Path
) -> None:
    def said(*arguments: str) -> str:
        ran = kvsidecar(*arguments, **where, COLUMNS="100")
        assert ran.returncode == 0, (arguments, ran.stdout, ran.stderr)
        assert ran.stderr == ""
        return ran.stdout

    rank = Rank(remote.daemon)
    done(rank.store("a", "b"))
    (tmp_path / "hashes").write_text("".join(f"{each.hex()}\n" for each in hashes("a", "b")))
    assert "kvsidecar ready" in said("status")
    assert json.loads(said("status", "--json"))["pool"]["blocks"] == 2
    assert json.loads(said("engines", "--json"))[0]["namespace"]["model"] == NAMESPACE.model
    assert NAMESPACE.model in said("engines")
    assert "Hits" in said("top", "--once", "--interval", "0.1")
    assert "2 blocks of 2 pinned" in said("pin", "head", "--namespace", NAMESPACE.model, "--hashes", "hashes")
    assert "head" in said("pins")
    assert said("unpin", "head") == ""
    assert f"{NAMESPACE.block_size}" in said("size", "--running", "--host-memory", "64GiB", "--json")
    assert "2 blocks cleared" in said("clear", "--namespace", NAMESPACE.model)
    assert "Drained" in said("drain", "--wait")
    assert "Drain cancelled" in said("drain", "--cancel")
    rank.close()


def test_a_pool_is_sized_without_a_daemon(kvsidecar: Kvsidecar, tmp_path: Path) -> None:
    file = str(alternating(tmp_path / "trace.jsonl"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "bench.json").write_text(json.dumps({"measurements": {"pin": {"rows": [{"ms_per_gib": 30.0}]}}}))
    sized = kvsidecar("size", ".", "--host-memory", "64GiB", "--trace", file, "--bench", "bench.json")
    assert sized.returncode == 0, sized.stderr
    assert "of the prompt tokens with half the pool" in sized.stdout
    refused = kvsidecar("size", "Llama-3.1-8B")
    assert refused.returncode == 2
    assert "name the memory of the daemon's machine with --host-memory" in refused.stderr


def test_the_other_commands_and_a_socket_are_refused_in_a_sentence(kvsidecar: Kvsidecar) -> None:
    helped = kvsidecar("--help").stdout
    listed = {line.split()[0] for line in helped.partition("Commands:\n")[2].splitlines() if line.strip()}
    assert listed == OF_A_LAPTOP
    assert {each.name for each in node_commands.COMMANDS} == set(OF_A_NODE)
    refused = kvsidecar("serve", "--pool-size", "1GiB")
    assert refused.returncode == 2
    assert "Error: serve is for the daemon's machine, which needs Linux: run it there" in refused.stderr
    refused = kvsidecar("status")
    assert refused.returncode == 2
    assert "name it with --connect HOST:PORT" in refused.stderr


@pytest.mark.parametrize("platform", PLATFORMS)
def test_q_ends_top(platform: str, python: Path, where: dict[str, str]) -> None:
    under = [str(python), SCRIPT, platform]
    with Terminal("top", "--interval", "0.1", under=under, **where) as terminal:
        terminal.until("Hits")
        if platform == "darwin":  # on Windows the keyboard of the test types
            terminal.press(b"q")
        assert terminal.end() == 0
