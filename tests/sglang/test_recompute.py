"""SGLang with the patch of deploy/sglang: a request whose load fails is computed, where SGLang alone answers 503."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.harness import Gate
from tests.marks import promise
from tests.sglang.conftest import failing
from tests.sglang.engine import ENVIRONMENT, WHOLE, SGLangProcess, forgotten, linker, warm
from tests.vllm.engine import LONG, prompt

PATCH = Path(__file__).parents[2] / "deploy/sglang/recompute-failed-loads.patch"
FIRST_LOAD = "load.before_copy@0=raise(planned)"
CHUNKED = prompt("long", 1400)
"""Begins with `LONG`; what is behind it takes more than one chunk."""


def patched(directory: Path) -> Path:
    """A directory for Python's path: the installed SGLang, patched. Links, but for the files that the patch names."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    shutil.copytree(package, directory / "sglang", copy_function=os.symlink, ignore=shutil.ignore_patterns("*.pyc"))
    for name in re.findall(r"^\+\+\+ b/(\S+)", PATCH.read_text(), re.MULTILINE):
        (directory / name).unlink()
        shutil.copy(package.parent / name, directory / name)
    subprocess.run(["patch", "--quiet", "-p1", "--input", str(PATCH)], cwd=directory, check=True)
    return directory


@pytest.fixture(scope="module", params=[False, True], ids=["steps in turn", "steps overlap"])
def engine(
    request: pytest.FixtureRequest, model: str, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangProcess]:
    directory = tmp_path_factory.mktemp("patched")
    others = ENVIRONMENT.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # on a GPU, the bundle is there
    here = f"{patched(directory)}:{others}"

    class Patched(SGLangProcess):
        environment: ClassVar[dict[str, str]] = {**ENVIRONMENT, "PYTHONPATH": here}

    options = {"disable_overlap_schedule": not request.param}
    with Patched(model, linker(str(home / "kvs.sock")), directory / "log", **options).wait_started() as process:
        assert isinstance(process, SGLangProcess)
        yield process


def test_a_daemon_killed_during_a_load_costs_no_request(engine: SGLangProcess, home: Path, gate: Gate) -> None:
    with failing(home, f"load.in_flight@2={gate}") as daemon:
        cold = warm(engine, daemon, LONG)
        engine.send_generate(LONG)
        daemon.wait_log("failpoint")
        daemon.process.kill()
        (answer,) = engine.answers()
        assert (answer.status, answer.cached, answer.tokens) == (200, 0, cold)
        again = engine.ask(LONG)
        assert (again.status, again.tokens) == (200, cold)
        assert again.cached == WHOLE, "what was computed is not in the engine's own cache"


@promise("or are computed by an SGLang with the patch in `deploy/sglang`")
def test_a_load_that_fails_costs_no_request_and_the_next_ones_hit(engine: SGLangProcess, home: Path) -> None:
    with failing(home, FIRST_LOAD) as daemon:
        cold = warm(engine, daemon, LONG)
        failed = engine.ask(LONG)
        assert (failed.status, failed.cached, failed.tokens) == (200, 0, cold)
        forgotten(engine, daemon, LONG)
        hit = engine.ask(LONG)
        assert (hit.host, hit.tokens) == (WHOLE, cold)
        assert daemon.get("/status")[1]["pool"]["leases"] == 0


def test_others_of_the_same_batch_are_answered(engine: SGLangProcess, home: Path) -> None:
    with failing(home, FIRST_LOAD) as daemon:
        cold = warm(engine, daemon, LONG)
        other = engine.ask(prompt("other", 60))
        engine.forget()
        answers = engine.generate(prompt("other", 60), LONG)
        assert [each.tokens for each in answers] == [other.tokens, cold]


def test_a_load_before_the_first_of_several_chunks_may_fail(engine: SGLangProcess, home: Path) -> None:
    alone = engine.ask(CHUNKED).tokens  # without a daemon, which would have it, and fail the load of `LONG`
    engine.forget()
    with failing(home, FIRST_LOAD) as daemon:
        warm(engine, daemon, LONG)
        failed = engine.ask(CHUNKED)
        daemon.wait_log("failpoint")
        assert (failed.status, failed.cached, failed.tokens) == (200, 0, alone)
