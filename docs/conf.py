"""Sphinx: ``make docs``. Nothing is fetched while it builds, and nothing while somebody reads."""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from kvsidecar import __version__

project = "kvsidecar"
copyright = "the kvsidecar authors"  # noqa: A001 - Sphinx' own name
version = release = __version__

extensions = ["myst_parser"]
exclude_patterns = ["generate"]
myst_heading_anchors = 3
highlight_language = "text"  # of a block that does not say
smartquotes = False  # would make one dash of the two of a flag
html_theme = "furo"
html_title = f"kvsidecar {version.partition('+')[0]}"
html_static_path = ["_static"]
html_css_files = ["kvsidecar.css"]
html_copy_source = html_show_sphinx = False
html_theme_options = {
    "source_repository": "https://github.com/kvsidecar/kvsidecar/",
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": ["view"],
}

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/kvsidecar/kvsidecar/blob/main/"
TAKEN_IN = {
    "systemd": "deploy/systemd/README.md",
    "kubernetes": "deploy/kubernetes/README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
}
"""Pages whose text lies beside what it is about. On GitHub they are one line that leads there, here that text."""

_LINK = re.compile(r"\[([^\[\]]*)\]\(((?!https?:|mailto:|#)[^)\s]+)\)")


def take_in(app: Any, docname: str, source: list[str]) -> None:
    """Replace the one line by the text, and lead links out of docs/ to the repository."""
    path = TAKEN_IN.get(docname, f"docs/{docname}.md")
    if docname in TAKEN_IN:
        app.env.note_dependency(str(ROOT / path))
        source[0] = (ROOT / path).read_text()
    source[0] = _LINK.sub(lambda link: _rewritten(link[1], link[2], os.path.dirname(path)), source[0])


def _rewritten(text: str, link: str, directory: str) -> str:
    """A relative link of a file in this directory, as docs/ must have it. One called as its file gets the title."""
    path, hash_sign, anchor = link.partition("#")
    path = os.path.normpath(os.path.join(directory, path))
    pages = {text: f"docs/{page}.md" for page, text in TAKEN_IN.items()}
    path = pages.get(path, path)
    if not path.startswith("docs/") or path.startswith("docs/generate"):
        return f"[{text}]({SOURCE}{path}{hash_sign}{anchor})"
    if text in (os.path.basename(path), path):
        text = ""
    return f"[{text}]({path.removeprefix('docs/')}{hash_sign}{anchor})"


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", take_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
