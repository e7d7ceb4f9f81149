"""Names and runs the tests that a change touches: `make test-for`.

``python -m tests.touched [FILE...]``, of the files that differ from main and of those that are not committed where none
is named. A test file is touched by a module that it imports, by what that module imports, and so on; if it has a
daemon, by all that a daemon imports, too. The nearest are named and run first. What is no module touches the tests that
name it, and those of documents and deployment.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).parent.parent
PACKAGES: Final = ("kvsidecar", "tests", "benchmarks")
HIDDEN: Final = (
    (r"\bDaemonProcess\b|\blent_daemon\b|\bdaemon:", ("kvsidecar.daemon.serve", "kvsidecar.copier.process")),
    (r"\"-m\", \"kvsidecar\"|tests\.cli\.command", ("kvsidecar.__main__",)),
    (r"\bfrom tests\.vllm\.(?:conftest|engine)\b", ("kvsidecar.integrations.vllm",)),
    (r"\bfrom tests\.sglang\.(?:conftest|engine)\b", ("kvsidecar.integrations.sglang",)),
)
"""Pattern of a test's text -> what it runs in another process, or has an engine import: all that these import, and all
modules below them."""
SHARED: Final = ("tests.harness", "tests.warm")
"""Nearly all tests import these, which says nothing of what they run."""
FAR: Final = 99


def module_of(path: str) -> str:
    """The module of a file, named from the repository's root."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_test(module: str) -> bool:
    return module.startswith("tests.") and module.rpartition(".")[2].startswith("test_")


class Imports:
    """Who imports whom in this repository, also inside functions."""

    def __init__(self) -> None:
        self._graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
        for module in SHARED:
            for imported in self._graph.find_modules_directly_imported_by(module):
                if imported.startswith("kvsidecar.daemon") or imported == "tests.warm":
                    self._graph.remove_import(importer=module, imported=imported)
        for module in filter(is_test, self._graph.modules):
            for pattern, runs in HIDDEN:
                if re.search(pattern, self.file_of(module).read_text()):
                    for each in runs:
                        for imported in {each} | self._graph.find_descendants(each):
                            self._graph.add_import(importer=module, imported=imported)

    def file_of(self, module: str) -> Path:
        path = ROOT / module.replace(".", "/")
        return path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"

    def tests_of(self, module: str) -> dict[str, int]:
        """The test modules that import this one, however indirectly, with the number of imports between."""
        if module not in self._graph.modules:
            return {}
        found, level, distance = {module: 0}, {module}, 0
        while level:
            distance += 1
            level = {each for inner in level for each in self._graph.find_modules_that_directly_import(inner)}
            level -= found.keys()
            found.update(dict.fromkeys(level, distance))
        return {each: distance for each, distance in found.items() if is_test(each)}


def touched(changed: Iterable[str], imports: Imports) -> dict[str, int]:
    """The test files that these files touch, as paths from the root, with their distance."""
    found: dict[str, int] = {}
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("tests/**/test_*.py")}
    for name in changed:
        mine: dict[str, int] = {}
        if name.endswith(".py"):
            mine = {
                imports.file_of(module).relative_to(ROOT).as_posix(): distance
                for module, distance in imports.tests_of(module_of(name)).items()
            }
            if name.endswith("conftest.py"):
                mine |= {each: 1 for each in texts if each.startswith(name.removesuffix("conftest.py"))}
        else:
            mine = {each: 1 for each, text in texts.items() if Path(name).name in text}
        directory = "tests/deploy/" if name.startswith("deploy/") else "tests/docs/"
        mine |= {each: mine.get(each, FAR) for each in texts if each.startswith(directory)}
        for each, distance in mine.items():
            found[each] = min(distance, found.get(each, FAR))
    return dict(sorted(found.items(), key=lambda each: (each[1], each[0])))


def target_of(path: str) -> str:
    """The target of make that runs this test file with ``ARGS``."""
    text = (ROOT / path).read_text()
    needs = re.findall(r"^\w*\s*=?\s*pytest\.importorskip\(\"(vllm|torch|sglang)", text, re.MULTILINE)
    if path.startswith("tests/sglang/"):
        return "test-sglang"
    if path.startswith("tests/vllm/") or needs:
        return "test-vllm"
    return "test-cluster" if "mark.cluster" in text else "test"


def changed_files() -> list[str]:
    """What differs from main, or is not committed, or is new."""
    commands = (
        ["git", "diff", "--name-only", "main...HEAD"],
        ["git", "diff", "--name-only", "HEAD"],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    ran = [subprocess.run(each, check=True, capture_output=True, text=True, cwd=ROOT).stdout for each in commands]
    return sorted({name for output in ran for name in output.splitlines()})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.touched", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the tests, and run none")
    parser.add_argument("changed", nargs="*", help="files, from the repository's root")
    options = parser.parse_args(argv)
    changed = [os.path.relpath(each, ROOT) for each in options.changed] or changed_files()
    if missing := [each for each in options.changed if not Path(each).exists()]:
        parser.error(f"there is no {missing[0]}")
    found = touched(changed, Imports())
    suites: dict[str, list[str]] = {}
    for path in found:
        suites.setdefault(target_of(path), []).append(path)
    print(f"{len(changed)} changed files touch {len(found)} test files", *found, sep="\n  ", flush=True)
    if options.list:
        return 0
    failed = []
    for target, paths in suites.items():
        variables = {**os.environ, "KVSIDECAR_TESTS": "all"}
        command = ["make", "--no-print-directory", target, f"ARGS={' '.join(paths)}"]
        print(f"make {target}: {len(paths)} files", flush=True)
        if subprocess.run(command, check=False, cwd=ROOT, env=variables).returncode:
            failed.append(target)
    print(f"failed: {', '.join(failed)}" if failed else "all that the change touches passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
