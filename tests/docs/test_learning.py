"""The pages from which a newcomer learns: completion, the Python API, the table of options."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("grpc_tools", reason="the group docs is not installed")

import kvsidecar.client
from docs.generate import api
from kvsidecar.daemon.settings import Settings
from tests.docs.pages import ROOT, text

COMMAND = Path(sys.executable).with_name("kvsidecar")


def complete(shell: str, **variables: str) -> str:
    env = {**os.environ, "_KVSIDECAR_COMPLETE": shell, **variables}
    return subprocess.run([COMMAND], env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_pages_commands_print_scripts() -> None:
    named = set(re.findall(r"_KVSIDECAR_COMPLETE=(\w+) kvsidecar", text("docs/completion.md")))
    assert named == {"bash_source", "zsh_source", "fish_source"}
    for shell in named:
        assert "_KVSIDECAR_COMPLETE" in complete(shell)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [("kvsidecar doc", "doctor"), ("kvsidecar serve --pool-s", "--pool-size"), ("kvsidecar t", "top")],
)
def test_tab_completes(line: str, wanted: str) -> None:
    said = complete("bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(shlex.split(line)) - 1))
    assert f"plain,{wanted}" in said.split()


def test_everything_that_the_client_exports_is_on_the_page_and_says_what_it_is() -> None:
    page = api.page()
    for name in kvsidecar.client.__all__:
        section = re.search(rf"^### {name}\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL)
        row = re.search(rf"^\| `{name}` \| (.+) \|$", page, re.MULTILINE)
        assert section or row, name
        assert re.search(r"[A-Z].*\.", (section or row)[1]), name  # type: ignore[index]
    for method in ("attach", "store", "load", "poll", "lookup", "close"):
        assert f"#### Client.{method}\n" in page


def test_arguments_and_errors_are_lists() -> None:
    attach = api.page().partition("#### Client.attach\n")[2].partition("####")[0]
    assert re.search(r"^- `instance`: name of the engine", attach, re.MULTILINE)
    assert re.search(r"^\*\*Raises\*\*\n\n- `\w+`", attach, re.MULTILINE)


def test_the_table_of_options_leads_to_every_section() -> None:
    page = text("docs/configuration.md")
    table = page.partition("## All options")[2].partition("\n## ")[0]
    assert re.findall(r"^\| \[`(\w+)`\]\(#\1\)", table, re.MULTILINE) == list(Settings.model_fields)


def test_forms_of_issues_have_what_the_platform_needs() -> None:
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= set(form)
            assert all(field["type"] == "markdown" or field["id"] for field in form["body"])
