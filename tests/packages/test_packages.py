"""The two distributions, as `make package` builds them: what is in them, and that they work without the checkout."""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import shutil
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy.image.lock import FILES, wanted
from hatch_build import compile_kernels
from tests.harness import DaemonProcess
from tests.packages.support import (
    ROOT,
    TAG,
    copy_of_the_checkout,
    git,
    make_package,
    new_environment,
    pip,
    repository,
    run,
)  # fmt: skip

OF_CLIENT = {"grpcio", "kvsidecar-client", "numpy", "protobuf"}
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""The processors that have wheels of their own, as an ELF file names them."""
OUTSIDE = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONPATH": ""}
"""Nothing is imported from where a program was started."""


@pytest.fixture(scope="module")
def wheels(built: dict[str, Path]) -> dict[str, Path]:
    """Those for every platform."""
    return {name.split("-")[0].replace("_", "-"): path for name, path in built.items() if name.endswith("-any.whl")}


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Callable[[str], Path]:
    """The interpreter of a new environment with one of the distributions."""

    def into_a_new_environment(name: str) -> Path:
        python = new_environment(tmp_path_factory.mktemp(name))
        links = wheels[name].parent
        pip(python, "install", "--quiet", "--no-compile", "--find-links", links, f"{name}==9.8.7")
        return python

    return into_a_new_environment


def packages_of(python: Path) -> set[str]:
    shown = pip(python, "list", "--format", "freeze", "--disable-pip-version-check")
    return {line.partition("==")[0].lower() for line in shown.split()} - {
        "pip",
        "setuptools",
        "typing-extensions",
        "typing_extensions",
    }


def test_both_are_built_with_the_version_of_the_tag(built: dict[str, Path]) -> None:
    assert set(built) == {
        f"{name}-9.8.7{end}" for name in ("kvsidecar", "kvsidecar_client") for end in ("-py3-none-any.whl", ".tar.gz")
    } | {f"kvsidecar-9.8.7-cp311-abi3-manylinux2014_{each}.manylinux_2_17_{each}.whl" for each in ELF_MACHINES}


@pytest.mark.parametrize("processor", ELF_MACHINES)
def test_a_wheel_with_compiled_kernels_is_the_one_for_every_platform_and_these(
    built: dict[str, Path], wheels: dict[str, Path], processor: str
) -> None:
    (path,) = [path for name, path in built.items() if name.endswith(f"_{processor}.whl")]
    kernels = "kvsidecar/cache/_kernels.abi3.so"
    compiled, plain = zipfile.ZipFile(path), zipfile.ZipFile(wheels["kvsidecar"])
    of_package = [{each for each in of.namelist() if ".dist-info/" not in each} for of in (compiled, plain)]
    assert of_package[0] == of_package[1] | {kernels}
    program = compiled.read(kernels)
    assert program[:4] == b"\x7fELF"
    assert int.from_bytes(program[18:20], "little") == ELF_MACHINES[processor]
    versions = {tuple(map(int, each.split(b"."))) for each in re.findall(rb"GLIBC_([\d.]+)", program)}
    assert max(versions, default=(0,)) <= (2, 17)


@pytest.mark.parametrize("processor", ELF_MACHINES)
def test_the_kernels_are_compiled_for_each_processor_with_debians_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: str
) -> None:
    """There, pyconfig.h includes that of the processor, which is in a folder of the system's own compiler."""
    here = Path(sysconfig.get_path("include"))
    headers = Path(shutil.copytree(here, tmp_path / here.name))
    own = tmp_path / "an-own-one" / here.name / "pyconfig.h"
    own.parent.mkdir(parents=True)
    (headers / "pyconfig.h").rename(own)
    (headers / "pyconfig.h").write_text(f"#include <an-own-one/{here.name}/pyconfig.h>\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(headers))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: "an-own-one")
    monkeypatch.setenv("KVSIDECAR_CC", f"{sys.executable} -m ziglang cc -target {processor}-linux-gnu.2.17")
    compile_kernels(ROOT, tmp_path / "kernels.so")
    assert int.from_bytes((tmp_path / "kernels.so").read_bytes()[18:20], "little") == ELF_MACHINES[processor]


def test_to_build_them_installs_neither(built: dict[str, Path]) -> None:
    assert "9.8.7" not in {metadata.version(name) for name in ("kvsidecar", "kvsidecar-client")}


def test_each_file_of_the_package_is_in_one_of_the_two(source: Path, wheels: dict[str, Path]) -> None:
    daemon, client = (
        {each for each in zipfile.ZipFile(wheels[name]).namelist() if ".dist-info/" not in each}
        for name in ("kvsidecar", "kvsidecar-client")
    )
    assert not daemon & client
    tracked = set(git(source, "ls-files", "kvsidecar").split())
    assert daemon | client == tracked | {"kvsidecar/_version.py", "kvsidecar/v1/sidecar.proto"}
    assert {"kvsidecar/client/client.py", "kvsidecar/integrations/vllm/connector.py", "kvsidecar/__init__.py"} <= client
    proto = zipfile.ZipFile(wheels["kvsidecar-client"]).read("kvsidecar/v1/sidecar.proto")
    assert proto == (ROOT / "proto/kvsidecar/v1/sidecar.proto").read_bytes()


def test_the_daemon_needs_the_client_of_its_version(wheels: dict[str, Path]) -> None:
    metadata = zipfile.ZipFile(wheels["kvsidecar"]).read("kvsidecar-9.8.7.dist-info/METADATA").decode()
    said = HeaderParser().parsestr(metadata)
    assert "kvsidecar-client==9.8.7" in said.get_all("Requires-Dist", [])
    assert set(said.get_all("Provides-Extra", [])) == {"events", "mooncake", "tracing"}, "what users may want"
    shown = str(said.get_payload())
    assert "/raw/main/docs/images/data-flow.svg" in shown
    assert re.findall(r"\]\((?!https:|#)[^)]*\)", shown) == []


def test_a_source_distribution_has_what_its_wheel_is_built_from(built: dict[str, Path]) -> None:
    """The build makes each wheel from the sdist; so only what a reader of the sources needs is looked at here."""
    for name in ("kvsidecar", "kvsidecar_client"):
        with tarfile.open(built[f"{name}-9.8.7.tar.gz"]) as archive:
            names = {member.name.partition("/")[2] for member in archive.getmembers()}
            assert all(member.isfile() for member in archive.getmembers()), "links lead out of an archive"
        assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_the_same_commit_gives_the_same_bytes(built: dict[str, Path], tmp_path: Path) -> None:
    again = make_package(repository(tmp_path / "elsewhere", TAG))
    digests = [
        {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in each.items()} for each in (built, again)
    ]
    assert digests[0] == digests[1]


def test_daemon_and_client_work_from_wheels_without_the_checkout(
    install: Callable[[str], Path], tmp_path: Path, short_dir: Path
) -> None:
    client, daemon = install("kvsidecar-client"), install("kvsidecar")
    assert packages_of(client) == OF_CLIENT
    assert {"aiohttp", "cuda-python", "uvloop"} <= packages_of(daemon)
    assert run(daemon.parent / "kvsidecar", "--version", cwd=tmp_path).split()[-1] == "9.8.7"
    if platform.machine() in ELF_MACHINES:
        assert run(daemon, "-c", "import kvsidecar.cache.kernels as k; print(k.COMPILED)", **OUTSIDE).strip() == "True"
    says_where = "import kvsidecar, kvsidecar.client; print(kvsidecar.__version__, kvsidecar.client.__file__)"
    version, where = run(client, "-c", says_where, cwd=tmp_path, **OUTSIDE).split()
    assert version == "9.8.7"
    assert Path(where).is_relative_to(client.parents[1])
    engine = (ROOT / "examples" / "engine.py").read_text()
    with DaemonProcess(short_dir, "--pool-size", "4MiB", device="host", python=daemon, **OUTSIDE) as running:
        running.wait_ready()
        said = run(client, "-c", engine, cwd=tmp_path, KVSIDECAR_SOCKET=running.socket, **OUTSIDE)
        assert "3 blocks can be loaded" in said
        assert 'version="9.8.7"' in running.get("/metrics")[1]


def test_wheels_of_a_commit_without_a_tag_are_installed_as_the_page_says(source: Path, tmp_path: Path) -> None:
    """They are pre-releases themselves, and bring none of their dependencies."""
    place = tmp_path / "copy"
    git(tmp_path, "clone", "--quiet", str(source), str(place))
    git(place, "commit", "--quiet", "--allow-empty", "--message", "One more")
    assert all(".dev1+" in name for name in make_package(place))
    page = (ROOT / "docs" / "packages.md").read_text()
    (block,) = [
        each for each in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "make package" in each
    ]
    for line in block.splitlines()[1:]:
        name = re.findall(r"-m venv /tmp/(\w+)", line)[0]
        run("bash", "-ec", line.replace("/tmp/", f"{tmp_path}/"), cwd=place)
        shown = run(tmp_path / name / "bin" / "python", "-m", "pip", "list", "--format", "freeze")
        versions = dict(each.split("==") for each in shown.split())
        assert {"grpcio", "kvsidecar-client", "protobuf"} <= versions.keys()
        assert ("kvsidecar" in versions) is (name == "daemon")
        before = {each for each, version in versions.items() if Version(version).is_prerelease}
        assert before <= {"kvsidecar", "kvsidecar-client"}


@pytest.mark.parametrize(
    ("state", "version"),
    [
        ("a tag", r"9\.8\.7"),
        ("a commit after it", r"9\.8\.8\.dev1\+g\w+"),
        ("no tag", r"\d+\.\d+\.\d+\.dev1\+g\w+"),
        ("a shallow clone", r"\d+\.\d+\.\d+\.dev1\+g\w+"),
        ("no repository", r"\d+\.\d+\.\d+\.dev0"),
    ],
)
def test_the_version_comes_from_the_tag_and_a_checkout_without_one_has_one_too(
    state: str, version: str, source: Path, tmp_path: Path
) -> None:
    place = tmp_path / "copy"
    if state == "no repository":
        copy_of_the_checkout(place)
    elif state in ("no tag", "a shallow clone"):
        git(tmp_path, "clone", "--quiet", "--no-tags", "--depth=1", f"file://{source}", str(place))
        if state == "no tag":
            git(place, "fetch", "--quiet", "--unshallow")
    else:
        git(tmp_path, "clone", "--quiet", str(source), str(place))
        if state == "a commit after it":
            git(place, "commit", "--quiet", "--allow-empty", "--message", "One more")
    seen = {
        directory: run(sys.executable, "-m", "hatchling", "version", cwd=place / directory).strip()
        for directory in (".", "client")
    }
    assert set(seen) == {".", "client"}
    assert len(set(seen.values())) == 1, seen
    assert re.fullmatch(version, seen["."]), seen


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "deploy/kubernetes/vllm.Dockerfile"])
def test_what_an_image_copies_is_enough_to_build_from(dockerfile: str, tmp_path: Path) -> None:
    checkout = copy_of_the_checkout(tmp_path / "checkout")
    ignored = (checkout / ".dockerignore").read_text().split()
    context = tmp_path / "context"
    context.mkdir()
    text = (ROOT / dockerfile).read_text().replace("\\\n", " ")
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *names, _ = line.split()
        for name in names:
            assert f"!{name}" in ignored, f"{name} is not in the context"
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            if (checkout / name).is_dir():
                shutil.copytree(checkout / name, context / name, symlinks=True)
            else:
                shutil.copy2(checkout / name, context / name)
    if "vllm" in dockerfile:
        projects = re.findall(r"/(client)$", re.findall(r"pip [^\n]*install.*", text)[-1])
        assert projects == ["client"]
    else:
        (projects,) = re.findall(r"pip wheel .* \./(client) (\./) ", text)
        for file in FILES:
            named = file if file == "requirements-build.txt" else "requirements${VARIANT}.txt"
            assert f"--requirement deploy/image/{named} " in text
            assert (context / "deploy" / "image" / file).exists()
    for project in projects:
        build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "out", project]
        run(*build, cwd=context, SETUPTOOLS_SCM_PRETEND_VERSION="9.8.7")
    assert len([*(tmp_path / "out").iterdir()]) == len(projects)
    assert "SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION}" in text


NOT_BY_DIGEST = {"vllm/vllm-openai"}
"""Of the image of vLLM that the tests have, nobody has looked up the digest: its Dockerfile says how to give it."""


def test_images_of_others_are_named_by_exact_tag_and_digest() -> None:
    compose = (ROOT / "examples" / "compose.yaml").read_text()
    images = re.findall(r"^ +image: (\S+)$", compose, re.MULTILINE)
    assert len(images) == 2
    for path in ("Dockerfile", "deploy/kubernetes/vllm.Dockerfile"):
        text = (ROOT / path).read_text()
        defaults = dict(re.findall(r"^ARG (\w+)=(\S*)$", text, re.MULTILINE))
        bases = re.findall(r"^FROM \$\{(\w+)\}", text, re.MULTILINE)
        assert len(bases) == len(re.findall(r"^FROM ", text, re.MULTILINE)), f"{path}: a base is a build argument"
        images += [defaults[name] for name in bases]
    for image in images:
        named, _, digest = image.partition("@")
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", named), image
        if named.partition(":")[0] not in NOT_BY_DIGEST:
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest), image


@pytest.mark.parametrize("file", FILES)
def test_the_image_has_exact_versions_with_hashes_that_both_distributions_take(file: str) -> None:
    """Otherwise: python -m deploy.image.lock."""
    locked = {}
    for line in (ROOT / "deploy" / "image" / file).read_text().replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            exact, *hashes = line.split(" --hash=")
            requirement = Requirement(exact.strip())
            (version,) = requirement.specifier
            assert version.operator == "=="
            assert hashes
            locked[canonicalize_name(requirement.name)] = Version(version.version)
    for each in map(Requirement, wanted(file)):
        assert locked[canonicalize_name(each.name)] in each.specifier, f"{each}: python -m deploy.image.lock"


def test_a_change_of_the_release_is_in_the_changelog() -> None:
    """The newest release of the changelog is before the version that a checkout without tags says that it has."""
    released = re.findall(
        r"^## (\d+)\.(\d+)\.(\d+) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    (fallback,) = {
        re.findall(r'^fallback-version = "(\d+)\.(\d+)\.(\d+)\.dev0"', (ROOT / path).read_text(), re.MULTILINE)[0]
        for path in ("pyproject.toml", "client/pyproject.toml")
    }
    newest = [int(part) for part in released[0]]
    assert [int(part) for part in fallback] == [*newest[:2], newest[2] + 1]


def test_what_is_not_released_yet_is_told_by_its_kind() -> None:
    """All of it in sections, so that who updates finds what changes for them among what is mended."""
    text = (ROOT / "CHANGELOG.md").read_text().partition("## Unreleased\n\n")[2].partition("\n## ")[0]
    before, *sections = re.split(r"^### (\w+)\n\n", text, flags=re.MULTILINE)
    assert before == "", "a line goes under Added, Changed, Fixed or Security"
    kinds = sections[::2]
    assert kinds == [each for each in ("Added", "Changed", "Fixed", "Security") if each in kinds]
    assert all(line.startswith(("- ", "  ")) for lines in sections[1::2] for line in lines.strip().splitlines())


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
IMPORTED = {
    module.split(".")[0]
    for path in (ROOT / "kvsidecar").rglob("*.py")
    for module in re.findall(r"^\s*(?:import|from) ([\w.]+)", path.read_text(), re.MULTILINE)
}
MODULES = {"pyzmq": "zmq", "mooncake-transfer-engine-non-cuda": "mooncake"}
"""Of packages whose module has another name."""


@pytest.mark.parametrize("extra", ["events", "mooncake"])
def test_all_that_an_extra_installs_is_imported(extra: str) -> None:
    names = [Requirement(each).name for each in EXTRAS[extra]]
    assert names
    assert [name for name in names if MODULES.get(name, name) not in IMPORTED] == []


OF_MODULES = {
    "cuda": "cuda-python",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
}
"""The packages of modules with another name."""
WITH_ENGINES = {"prometheus-client", "sglang", "structlog", "torch", "triton", "vllm"}
"""What the client uses where an engine, or the daemon, has brought it."""
WITH_EXTRAS = {"mooncake", "msgspec", "opentelemetry", "torch"}
"""What the daemon and its commands use where an extra has brought it, or an engine."""


def needed(of_client: bool) -> set[str]:
    """Packages that the modules of one of the distributions import."""
    client = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["only-include"]
    found = set[str]()
    for path in (ROOT / "kvsidecar").rglob("*.py"):
        parts = {str(each) for each in (path.relative_to(ROOT), *path.relative_to(ROOT).parents)}
        if parts.isdisjoint(client) is of_client:
            continue
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.Import):
                found.update(name.name.partition(".")[0] for name in each.names)
            elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
                found.add(each.module.partition(".")[0])
    return {OF_MODULES.get(each, each) for each in found - sys.stdlib_module_names - {"kvsidecar"}}


def test_each_distribution_requires_itself_what_its_modules_import() -> None:
    """Not through the other one, which may stop to need it."""
    daemon = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    client = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
    # The daemon's log is written by a module of the client's, which does without where there is no daemon.
    required = {Requirement(each).name for each in daemon["dependencies"]} - {"structlog"}
    assert needed(of_client=False) == required | WITH_EXTRAS
    assert needed(of_client=True) == {Requirement(each).name for each in client["dependencies"]} | WITH_ENGINES


OTHERS = {"click", "cuda-python", "numpy", "protobuf", "pydantic", "rich"}
"""Packages of which SGLang and what it imports want a newer one, and one that nothing imports without a GPU."""


def lists() -> list[Requirement]:
    daemon = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    client = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
    return [Requirement(each) for each in (*daemon["dependencies"], *client["dependencies"])]


def test_what_is_installed_for_sglangs_tests_is_the_oldest_that_is_allowed() -> None:
    lines = (ROOT / "tests" / "sglang" / "requirements.txt").read_text().splitlines()
    pins = {each.name: each.specifier for each in map(Requirement, (line for line in lines if line[:1].isalpha()))}
    for each in lists():
        if each.name not in OTHERS:
            (oldest,) = (Version(bound.version) for bound in each.specifier if bound.operator == ">=")
            assert list(pins[each.name].filter([oldest])) == [oldest], f"{each.name}: {pins[each.name]}, not {oldest}"
