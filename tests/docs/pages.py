"""The Markdown of the repository, as its readers and GitHub take it apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "deploy/**/*.md", "benchmarks/**/*.md", "examples/*.md", "client/*.md")
    for path in ROOT.glob(pattern)
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!`)\[[^\[\]]*\]\(([^)\s]+)\)")


@cache
def text(page: str) -> str:
    return (ROOT / page).read_text()


def fences(page: str, *languages: str) -> list[str]:
    """Code blocks of these languages; of all if none is named."""
    return [code for language, code in _FENCE.findall(text(page)) if not languages or language in languages]


def prose(page: str) -> str:
    """Without code blocks."""
    return _FENCE.sub("", text(page))


def spans(page: str) -> list[str]:
    """Code in the running text. It may go over a line end."""
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]


def commands(page: str) -> Iterator[str]:
    """Command lines that begin with ``kvsidecar``, in code blocks and in the running text; without comments."""
    for block in fences(page):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"^\s*(?:\$ )?(?:\S+/)?(?=kvsidecar )", "", line)
            if line.startswith("kvsidecar "):
                yield re.split(r"\s(?:#|&$|\|)", line)[0]
    yield from (span for span in spans(page) if span.startswith("kvsidecar "))


def links(page: str) -> list[str]:
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page)))


@cache
def anchors(page: str) -> frozenset[str]:
    """Of its headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.+?)\s*$", prose(page), re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", ""))
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = found[name] = found.get(name, -1) + 1
        names.add(f"{name}-{count}" if count else name)
    return frozenset(names)
