"""What CONTRIBUTING.md says of the commands, the hooks and CI."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT, text

CI = (ROOT / ".ci" / "run").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
HOOKS = {
    hook["id"]: hook
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]
}


def recipe(*targets: str) -> list[str]:
    """The commands that make would run."""
    command = ["make", "--dry-run", "--always-make", "--directory", str(ROOT), *targets]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def only(run: list[str]) -> str:
    """The marker of the tests that this run of pytest is for; empty for all others."""
    options = run[run.index("pytest") + 1 :]
    return options[1] if options[0] == "-m" else ""


def test_ci_runs_the_commands_of_the_readme_and_every_test_once() -> None:
    commands = re.findall(r"^make (.+)$", CI, re.MULTILINE)
    targets = [word for command in commands for word in command.split() if re.fullmatch(r"(?:check|test).*", word)]
    assert targets == ["check", "test", "test-cluster", "test-vllm", "test-sglang"]
    assert all(f"`make {target}`" in text("README.md") for target in targets)
    runs = [shlex.split(line) for line in recipe(*targets) if " -m pytest " in line]
    named = [word for run in runs if not only(run) for word in run if word.startswith("tests/")]
    modules = {path.relative_to(ROOT).parts for path in ROOT.glob("tests/**/test_*.py")}
    assert sorted(named) == sorted({"/".join(parts[:2]) for parts in modules})


def test_what_runs_apart_is_left_out_of_what_runs_side_by_side_and_not_forgotten() -> None:
    targets = "test", "test-cluster", "test-vllm"
    runs = [shlex.split(line) for line in recipe(*targets) if " -m pytest " in line]
    for marker in ("alone", "cluster", "torch"):
        marked = {
            path.relative_to(ROOT).as_posix()
            for path in ROOT.glob("tests/**/test_*.py")
            if re.search(rf"\bpytest\.mark\.{marker}\b", path.read_text())
        }
        assert marked
        assert marked <= {path for run in runs if only(run) == marker for path in run}
    side_by_side = [run for run in runs if not only(run)]
    assert all({"--numprocesses", "not alone and not cluster and not torch"} <= {*run} for run in side_by_side)


def test_what_needs_torch_runs_where_vllm_has_brought_it_and_nowhere_else() -> None:
    runs = [shlex.split(line) for line in recipe("check", "test", "test-vllm") if " -m pytest " in line]
    assert [run[0] for run in runs if only(run) == "torch"] == [".venv-vllm/bin/python"]
    others = [run for run in runs if not only(run)]
    assert all("not torch" in word for run in others for word in run if word.startswith("not "))
    assert all(any(word.startswith("not ") for word in run) for run in others)


def test_the_newest_and_the_older_vllm_are_run() -> None:
    """The older one lies apart, and is found first."""
    commands = recipe("test-vllm")
    (installs,) = [shlex.split(line) for line in commands if line.endswith(" -r tests/vllm/older.txt")]
    older = installs[installs.index("--target") + 1]
    (puts,) = [shlex.split(line) for line in commands if " tests/vllm/newest.py " in line]
    assert puts[-1] == older
    runs = [shlex.split(line) for line in commands if " -m pytest " in line]
    assert [run[0] for run in runs if only(run) == "older"] == [f"PYTHONPATH={ROOT / older}"]
    assert all(run[0] == ".venv-vllm/bin/python" for run in runs if only(run) != "older")
    marked = {path for path in ROOT.glob("tests/**/test_*.py") if re.search(r"\bmark\.older\b", path.read_text())}
    assert {path.relative_to(ROOT).as_posix() for path in marked} == {
        word for run in runs if only(run) == "older" for word in run if word.startswith("tests/")
    }


def test_clean_removes_every_environment_that_a_command_makes() -> None:
    made = {word.partition("/")[0] for line in recipe("venv", "venv-vllm", "venv-sglang") for word in line.split()}
    (removes,) = [line for line in recipe("clean") if line.startswith("rm ")]
    assert {".venv", ".venv-vllm", ".venv-sglang"} <= made
    assert {each for each in made if each.startswith(".venv")} == {
        each for each in removes.split() if each.startswith(".venv")
    }


def test_no_recipe_names_a_variable_that_nobody_sets() -> None:
    targets = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert targets is not None
    wanted = [each for each in targets[1].split() if not each.startswith("$")]
    command = ["make", "--warn-undefined-variables", "--dry-run", "--always-make", "--directory", str(ROOT), *wanted]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "undefined variable" not in ran.stderr


def test_the_workflow_runs_the_oldest_and_the_newest_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = re.findall(r":: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    assert project["requires-python"] == f">={claimed[0]}"
    used = {
        step["with"]["python-version"]
        for job in WORKFLOW["jobs"].values()
        for step in job["steps"]
        if "setup-python" in step.get("uses", "")
    }
    assert used == {claimed[0], claimed[-1]}


@pytest.mark.parametrize(("length", "code"), [(72, 0), (73, 1)])
def test_a_subject_may_have_72_characters(length: int, code: int, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text("x" * length + "\n\n" + "A body may have longer lines. " * 10 + "\n")
    hook = HOOKS["subject"]
    assert hook["stages"] == ["commit-msg"]
    ran = subprocess.run([*shlex.split(hook["entry"]), str(message)], capture_output=True, check=False)
    assert ran.returncode == code


def test_the_hooks_are_the_steps_of_make_check() -> None:
    (steps,) = re.findall(r"^CHECKS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    hooked = [hook["entry"].split()[-1] for name, hook in HOOKS.items() if name != "subject"]
    assert sorted(hooked) == sorted(steps.split())
