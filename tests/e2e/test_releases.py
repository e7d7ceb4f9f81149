"""The last release beside this checkout: its engines with this daemon, engines of now with its daemon, and what one of
the two has kept under the other, forth (an upgrade) and back (a rollback). docs/upgrade.md says what this shows."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import SECONDS, DaemonProcess, environment, eventually

ROOT = Path(__file__).parents[2]

UNTAGGED = {"0.2.0": "9db6e43cf874b2e5a75ef11aa778758b32d85d45"}
"""Releases without a tag, by the commit that closed their section of the changelog."""
NOW, LAST = "now", "last"
SPARSE = ("0.2.0",)
"""Releases whose HostBuffer leaves its memory to the first access, which a daemon of now refuses."""
WITHOUT_HOLES = (
    "import os, runpy, sys; os.ftruncate = lambda fd, nbytes: os.posix_fallocate(fd, 0, nbytes); "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)
"""Runs a program of such a release with memory that is there from the start, as a GPU's is."""


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, timeout=SECONDS).stdout


def last_release() -> tuple[str, str]:
    """Its version and its commit: of the newest tag that is an ancestor, or of the last one without a tag."""
    tagged = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--tags", "--abbrev=0", "--match", "v*"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if tagged.returncode == 0:
        return tagged.stdout.strip().removeprefix("v"), tagged.stdout.strip()
    return list(UNTAGGED.items())[-1]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each side its checkout."""
    try:
        version, commit = last_release()
        archive = git("archive", commit, "kvsidecar", "examples")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the last release is not in this copy of the repository")
    directory = tmp_path_factory.mktemp("last")
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        file.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)  # new in Python 3.11.4
        file.extractall(directory)
    (directory / "kvsidecar" / "_version.py").write_text(f'__version__ = version = "{version}"\n')  # the build makes it
    command = [sys.executable, "-c", "import kvsidecar.client; print(kvsidecar.client.__file__)"]
    ran = subprocess.run(command, env=environment(**variables(directory)), capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(str(directory)), "its engines would be those of this checkout"
    return {NOW: ROOT, LAST: directory}


def variables(tree: Path) -> dict[str, str]:
    """Imports come from this checkout, whatever else is installed and where this process runs."""
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


def engine(tree: Path, socket: str) -> str:
    """What its smallest engine says, which compares the bytes that it loads with those that it has stored."""
    sparse = tree is not ROOT and last_release()[0] in SPARSE
    ran = run_engine(tree, socket, *(["-c", WITHOUT_HOLES] if sparse else []))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def run_engine(tree: Path, socket: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, str(tree / "examples" / "engine.py")]
    env = environment(KVSIDECAR_SOCKET=socket, **variables(tree))
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)


def blocks(daemon: DaemonProcess) -> int:
    found: int = daemon.get("/status")[1]["pool"]["blocks"]
    return found


@pytest.fixture
def places(pool_dir: Path, short_dir: Path) -> list[str]:
    """Flags of a pool and of a disk that outlive the daemon."""
    disk = short_dir / "disk"
    return [f"--pool-dir={pool_dir}", f"--disk-dir={disk}", "--disk-size=1MiB", "--disk-admission=all"]


def start(tree: Path, directory: Path, flags: Sequence[str] = ()) -> DaemonProcess:
    return DaemonProcess(directory, *flags, **variables(tree))


@pytest.mark.parametrize(("of_engine", "of_daemon"), [(LAST, NOW), (NOW, LAST)])
def test_engine_and_daemon_may_be_of_different_releases(
    trees: dict[str, Path], short_dir: Path, of_engine: str, of_daemon: str
) -> None:
    version = last_release()[0]
    with start(trees[of_daemon], short_dir) as daemon:
        daemon.wait_ready()
        assert (daemon.get("/status")[1]["version"] == version) == (of_daemon == LAST), "it is another daemon"
        for _ in range(2):
            assert "3 blocks can be loaded" in engine(trees[of_engine], daemon.socket)
        assert blocks(daemon) == 3
        assert daemon.get("/status")[1]["pool"]["leases"] == 0


def test_an_engine_on_the_host_device_whose_release_shares_holes_is_told_to_update(
    trees: dict[str, Path], short_dir: Path
) -> None:
    if last_release()[0] not in SPARSE:
        pytest.skip("the last release allocates what it shares")
    with start(trees[NOW], short_dir) as daemon:
        daemon.wait_ready()
        ran = run_engine(trees[LAST], daemon.socket)
        assert ran.returncode != 0
        assert "a kvsidecar-client newer than 0.2.0 does" in ran.stderr


def test_engines_of_both_share_blocks(trees: dict[str, Path], short_dir: Path) -> None:
    """While engines are updated one after the other."""
    with start(trees[NOW], short_dir) as daemon:
        daemon.wait_ready()
        for side in (LAST, NOW, LAST):
            engine(trees[side], daemon.socket)
            assert blocks(daemon) == 3, "the same blocks, not as many again"
        assert daemon.get("/status")[1]["totals"]["namespaces"] == 1


@pytest.mark.parametrize("path", [(LAST, NOW), (NOW, LAST), (LAST, NOW, LAST, NOW)], ids="-".join)
def test_a_daemon_starts_on_what_another_release_has_left(
    trees: dict[str, Path], short_dir: Path, places: list[str], path: tuple[str, ...]
) -> None:
    """Whatever of it is kept: it is ready, and what it hits is right."""
    for side in path:
        with start(trees[side], short_dir, places) as daemon:
            daemon.wait_ready()
            pool = daemon.get("/status")[1]["pool"]
            assert pool["kept_blocks"] or re.search("no pool of|has format", pool["cold_start_reason"]), "it says why"
            eventually(lambda daemon=daemon: daemon.get("/status")[1]["tiers"][0]["off"] == "")  # type: ignore[misc]
            assert "3 blocks can be loaded" in engine(trees[side], daemon.socket)
            assert daemon.terminate() == 0
