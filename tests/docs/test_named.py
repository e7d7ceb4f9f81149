"""What the documents name exists: tests, files, modules, targets of make, calls of the client. What they say of
constants and of what outlives the daemon is so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.profile_daemon import AREAS
from kvsidecar.cli.main import main
from kvsidecar.client import Client
from tests.docs.constants import SAID, constant, said
from tests.docs.named_tests import all_tests, lines, unresolved
from tests.docs.pages import PAGES, ROOT, fences, spans, text

BELOW = ("", "proto", "kvsidecar", "kvsidecar/integrations", "tests", "tests/e2e", "docs", "benchmarks", "deploy")
"""Where a page may mean a path to begin, beside its own directory."""
NOT_HERE = {
    "CHANGELOG.md": {"lookup_turns.py"},
    "benchmarks/README.md": {"more.json", "run.json", "systems.png"},  # that a command writes
    "docs/benchmarks.md": {
        "benchmarks/lookup_turns.py",
        "benchmarks/store_turns.py",
        "cliff.json",
        "cliff.svg",
        "fleet.svg",
        "generated.json",
        "more.json",
        "peers.json",
        "run.json",
    },
    "docs/sglang.md": {"adapter_config.json"},  # of an adapter
    "docs/vllm.md": {"adapter_config.json"},
    "docs/packages.md": {"kvsidecar/kvsidecar"},  # of the platform
    "docs/sizing.md": {
        "config.json",  # of a model
        "vllm/v1/kv_cache_interface.py",
        "vllm/v1/core/kv_cache_utils.py",
        "vllm/model_executor/layers/mamba/mamba_utils.py",
    },
}
"""Page -> paths of others, of what a command writes, or of an earlier commit that the page names."""
_TREES = "kvsidecar|tests|docs|benchmarks|deploy|examples|proto|client"
_PATH = re.compile(
    rf"[\w.*/-]*[\w*-]\.(?:py|md|toml|ya?ml|js|json|proto|service|sh|svg|png)|(?:{_TREES})(?:/[\w.-]+)+/?"
)
_MODULE = re.compile(r"-m ((?:benchmarks|tests|docs|kvsidecar|examples)(?:\.\w+)*)")
_RUN = re.compile(r"\bpython\S* (?:checkout/)?((?:benchmarks|examples|tests|docs)/\S+\.py)")
_TARGET = re.compile(r"(?:^|`)make (?:--?[\w-]+(?: \d+)? )*([a-z][a-z-]*)", re.MULTILINE)
TARGETS = set(
    re.findall(r"[a-z][\w-]*", " ".join(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)))
)


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_a_page_names_exist(page: str) -> None:
    assert [(line[:20], name) for line in lines(page) for name in unresolved(line)] == []


def paths(page: str) -> Iterator[str]:
    for span in spans(page):
        for word in span.split():
            path = word.strip(".,;:()'").partition("::")[0]
            if _PATH.fullmatch(path) and not path.startswith("/") and not re.search(r"\btest_\w+\.py$", path):
                yield path


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    def exists(path: str) -> bool:
        own = Path(page).parent.as_posix()
        return any(next((ROOT / root).glob(path), None) for root in (*BELOW, own)) or (
            "/" not in path and any(next((ROOT / tree).rglob(path), None) for tree in _TREES.split("|"))
        )

    assert {path for path in paths(page) if not exists(path)} - NOT_HERE.get(page, set()) == set()


@pytest.mark.parametrize("page", PAGES)
def test_modules_programs_and_targets_that_a_page_runs_exist(page: str) -> None:
    modules = {ROOT / name.replace(".", "/") for name in _MODULE.findall(text(page))}
    assert {
        each for each in modules if not each.with_suffix(".py").exists() and not (each / "__main__.py").exists()
    } == set()
    assert {each for each in _RUN.findall(text(page)) if not (ROOT / each).exists()} == set()
    ran = {
        target for code in (*fences(page), *(f"`{span}" for span in spans(page))) for target in _TARGET.findall(code)
    }
    assert ran - TARGETS == set()


@pytest.mark.parametrize("page", PAGES)
def test_calls_of_the_client_that_a_page_names_exist(page: str) -> None:
    named = {name for span in spans(page) for name in re.findall(r"\b(?:Client|client)\.([a-z]\w*)\(", span)}
    named |= {name for span in spans(page) for name in re.findall(r"^Client\.([a-z]\w*)$", span)}
    assert {name for name in named if not hasattr(Client, name)} == set()


@pytest.mark.parametrize(("page", "phrase", "name"), SAID)
def test_a_number_that_a_text_says_is_the_constant(page: str, phrase: str, name: str) -> None:
    """If the sentence was rewritten: change its row of tests/docs/constants.py too."""
    assert said(page, phrase) == pytest.approx([constant(name)])


def test_no_two_faults_have_one_number() -> None:
    numbers = re.findall(r"^\| (\d+) \|", (ROOT / "docs/faults.md").read_text(), re.MULTILINE)
    assert len(numbers) > 100
    assert sorted(numbers) == sorted(set(numbers))


def test_what_is_wrong_is_found() -> None:
    there = ["test_the_first", "test_wire.py::test_the_first_message…", "…a_memfd_that…", "cache/test_records.py"]
    assert list(unresolved(f"| 1 | a | {', '.join(f'`{each}`' for each in there)} | P |")) == []
    wrong = ["test_no_such", "e2e/test_wire.py::test_nothing…", "…no_such_test…", "cache/test_wire.py", "test_wires.py"]
    assert list(unresolved(", ".join(f"`{each}`" for each in wrong))) == wrong
    assert len(all_tests()) > 200
    assert said("docs/wire.md", "a stream with {} unread replies") != [1.0]
    assert said("docs/wire.md", "a stream with {} unread answers") == []
    assert "check" in TARGETS
    assert "checks" not in TARGETS


def test_what_outlives_the_daemon_is_said_alike_everywhere() -> None:
    """A kept pool has its blocks and its pins: no text says that they are gone, only where they may be."""
    assert "keeps the pin" in " ".join((main.commands["pin"].help or "").split())
    for page in PAGES:
        if page == "CHANGELOG.md":
            continue
        plain = " ".join(text(page).split())
        assert (
            re.findall(r"[Tt]he (?:old )?cache is gone|: the cache is empty|or the end of the daemon\b", plain) == []
        ), page


def test_the_profile_is_of_the_areas_and_threads_that_there_are() -> None:
    rows = re.findall(
        r"^\| ([a-z -]+) \| ", text("docs/profile.md").partition("## The event loop by area")[2], re.MULTILINE
    )
    assert sorted(rows) == sorted(area for area, _ in AREAS)
    assert "worker" not in text("docs/profile.md"), "threads that copied, of a daemon before there were copiers"
