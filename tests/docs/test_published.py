"""Nothing is published yet: no page says that it is, and one section says what has to be. When something is, this test
and that section go."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, fences, text

SECTION = text("docs/packages.md").partition("## What must be published first\n")[2].partition("\n## ")[0]
NOT_YET = re.compile(
    r"pip install [\"']?kvsidecar\b|ghcr\.io/kvsidecar|pypi\.org/project/kvsidecar"
    r"|shields\.io/(?:pypi|github|docker)|badge\.svg"
)
"""What works only when it is published, and badges that cannot be green before."""
REPOSITORY = "github.com/kvsidecar/kvsidecar"
NAMED = {
    r"deploy/prometheus/.*": "`runbook_url`",
    r"deploy/systemd/.*\.service": "`Documentation=`",
    r"deploy/helm/kvsidecar/Chart\.yaml": "chart's `home`",
    r"(client/)?pyproject\.toml|hatch_build\.py|client/README\.md": "metadata and READMEs of both distributions",
    r"Dockerfile": "label of the image",
    r"docs/conf\.py": "the site's links to sources",
    r"\.github/ISSUE_TEMPLATE/.*": "the form for vulnerabilities",
}
"""Files that name the repository -> how the section says so."""


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [name for name in listed.split("\0") if name and not (ROOT / name).is_symlink() and (ROOT / name).is_file()]


@pytest.mark.parametrize("page", PAGES)
def test_no_page_takes_for_published_what_is_not(page: str) -> None:
    assert NOT_YET.findall(text(page).replace(SECTION, "")) == []


@pytest.mark.parametrize(
    "page", ["README.md", "docs/getting-started.md", "docs/index.md", "docs/vllm.md", "docs/sglang.md"]
)
def test_the_way_that_works_stands_first(page: str) -> None:
    (first, *_) = [line for block in fences(page, "sh") for line in block.splitlines() if "pip install" in line]
    assert re.search(r"pip install \./(?:checkout/)?client\b", first)


def test_the_section_says_what_names_the_repository() -> None:
    if not (names := tracked()):
        pytest.skip("not a repository")
    for name in names:
        if name.startswith(("tests/", "docs/packages.md")) or Path(name).suffix in (".png", ".svg", ".json"):
            continue
        if REPOSITORY in (ROOT / name).read_text(errors="replace"):
            said = [words for pattern, words in NAMED.items() if re.fullmatch(pattern, name)]
            assert said, f"{name} names the repository: docs/packages.md has to say what is to be done until it exists"
            assert said[0] in " ".join(SECTION.split())
    for name in (
        "`kvsidecar`",
        "`kvsidecar-client`",
        "`ghcr.io/kvsidecar/kvsidecar`",
        f"`https://{REPOSITORY}`",
        "badges",
    ):
        assert name in SECTION


def test_no_image_of_the_manifests_is_taken_for_published() -> None:
    images = [
        (path.name, image)
        for path in (ROOT / "deploy").rglob("*.yaml")
        for image in re.findall(r"(?:repository|newName): (\S+)", path.read_text())
    ]
    assert len(images) > 3
    assert [each for each in images if not each[1].startswith("registry.example.com/")] == []
