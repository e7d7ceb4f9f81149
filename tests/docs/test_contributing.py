"""What CONTRIBUTING.md says of the commands, the hooks and CI."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, text
from tests.marks import ENGINES, PROCESSES

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


def runs_of(*targets: str) -> list[list[str]]:
    """The runs of pytest that make would start."""
    return [shlex.split(line) for line in recipe(*targets) if " -m pytest " in line]


def test_ci_runs_the_check_the_test_command_of_the_readme_and_the_smoke_tests_of_both_engines() -> None:
    commands = re.findall(r"^make (.+)$", CI, re.MULTILINE)
    targets = [
        word for command in commands for word in command.split() if re.fullmatch(r"(?:check|test|smoke).*", word)
    ]
    assert targets == ["check", "test", "smoke"]
    assert "test" in commands, "with no option and no variable, as the README has it"
    assert "`make test` installs" in text("README.md")
    assert all(f"`make {target}`" in text("CONTRIBUTING.md") for target in targets)


def test_test_all_runs_every_test() -> None:
    named = [word for run in runs_of("test-all") if not only(run) for word in run if word.startswith("tests/")]
    modules = {path.relative_to(ROOT).parts for path in ROOT.glob("tests/**/test_*.py")}
    assert {"/".join(parts[:2]) for parts in modules} == set(named)
    assert len(named) == len(set(named)), "none is run by two"


def test_make_test_runs_the_quick_tests_of_every_directory_that_has_some() -> None:
    (run,) = runs_of("test")
    assert run[run.index("-m", run.index("pytest")) + 1] == "quick"
    in_process = {path.relative_to(ROOT).parts[1] for path in ROOT.glob("tests/*/**/test_*.py")}
    assert {f"tests/{each}" for each in in_process - {*PROCESSES, *ENGINES}} <= {*run}
    assert set(named_promises("tests/e2e/")) <= {*run}


def test_make_and_the_marks_agree_on_what_may_start_processes() -> None:
    named = re.findall(r"^OF_(?:CHECK|PROCESSES) := (.+)$", MAKEFILE, re.MULTILINE)
    assert sorted(" ".join(named).split()) == [f"tests/{each}" for each in PROCESSES]


def named_promises(directory: str) -> dict[str, list[str]]:
    """Path of a test file -> the words with which its tests are marked as `promise`."""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.glob(f"{directory}**/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "promise":
                        found.setdefault(path.relative_to(ROOT).as_posix(), []).append(ast.literal_eval(mark.args[0]))
    return found


@pytest.mark.parametrize(
    ("directory", "least", "most"), [("tests/e2e/", 60, 90), ("tests/vllm/", 25, 35), ("tests/sglang/", 12, 20)]
)
def test_each_promise_is_on_a_page_word_by_word_and_they_are_few(directory: str, least: int, most: int) -> None:
    pages = [re.sub(r"\s+", " ", text(page)) for page in PAGES]
    words = [each for mine in named_promises(directory).values() for each in mine]
    assert [each for each in words if not any(each in page for page in pages)] == []
    assert least <= len(words) <= most


@pytest.mark.parametrize(("mark", "code"), [("", 1), ("@pytest.mark.processes\n", 0)])
def test_a_test_that_starts_a_process_and_does_not_say_so_fails(mark: str, code: int, tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(f"import subprocess\nimport pytest\n{mark}def test_one():\n    subprocess.run(['true'])\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-c",
        str(ROOT / "pyproject.toml"),
        str(file),
    ]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == code, ran.stdout
    assert ("needs the marker `processes`" in ran.stdout) is bool(code)


def test_what_runs_apart_is_left_out_of_what_runs_side_by_side_and_not_forgotten() -> None:
    runs = runs_of("test-all")
    for marker in ("alone", "cluster", "torch"):
        marked = {
            path.relative_to(ROOT).as_posix()
            for path in ROOT.glob("tests/**/test_*.py")
            if re.search(rf"\bpytest\.mark\.{marker}\b", path.read_text())
        }
        assert marked
        assert marked <= {path for run in runs if only(run) == marker for path in run}
    side_by_side = [run for run in runs_of("coverage", "test-main", "test-vllm") if not only(run)]
    assert all({"--numprocesses", "not alone and not cluster and not torch"} <= {*run} for run in side_by_side)


def test_what_needs_torch_runs_where_vllm_has_brought_it_and_nowhere_else() -> None:
    runs = runs_of("check", "test-main", "test-vllm")
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


def test_make_demo_runs_the_checkout_after_the_wheels_were_installed_beside_it(tmp_path: Path) -> None:
    """As README.md says: into the same environment."""
    info = tmp_path / "lib" / "python3.11" / "site-packages" / "kvsidecar-0.2.0.dist-info"
    info.mkdir(parents=True)
    stamps = [tmp_path / f"{name}.stamp" for name in ("pip", "run", "test", "all", "dev")]
    newest = max((ROOT / name).stat().st_mtime_ns for name in ("pyproject.toml", "client/pyproject.toml"))

    def installs(target: str, installed: int) -> bool:
        """Whether make does, with stamps of after the checkout, and packages that are so many seconds newer."""
        for path in (*stamps, info):
            at = newest + 10**10 + (installed * 10**9 if path == info else 0)
            os.utime(path, ns=(at, at))
        command = ["make", "--dry-run", f"VENV={tmp_path}", "--directory", str(ROOT), target]
        return "--editable" in subprocess.run(command, check=True, capture_output=True, text=True).stdout

    for stamp in stamps:
        stamp.touch()
    for target in ("demo", "test", "coverage", "check-lint"):
        assert not installs(target, -1)
        assert installs(target, +1)


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
