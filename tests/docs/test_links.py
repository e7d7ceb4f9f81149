"""Every relative link of every page leads to a file that exists, and to a heading of it."""

from __future__ import annotations

import os.path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in links(page):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if not (ROOT / target).exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_pages_are_found() -> None:
    assert {"README.md", "docs/client.md", "deploy/systemd/README.md", "benchmarks/README.md"} <= set(PAGES)
    assert "docs/concepts.md" in links("README.md")
    assert {"client-guide", "when-a-job-ends"} <= anchors("docs/client.md")
