"""Markdown that GitHub and MyST read alike."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import ModuleType


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table. Cells are Markdown; a pipe in them is escaped here."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`"


_NAME = re.compile(
    r"(?<![\w/.-])(--[a-z][a-z-]*(?:=\w+)?|KVSIDECAR_\w+|/(?:health|ready|metrics|status)\b|[a-z]+(?:_[a-z]+)+)"
)


def prose(text: str) -> str:
    """A docstring, a comment or a help text as Markdown. Line ends of the source become spaces, names become code."""
    text = re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(text))
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]
    return "\n\n".join(_escape(paragraph) for paragraph in paragraphs)


def _escape(text: str) -> str:
    """Asterisks, underscores and angle brackets that mean themselves, outside of code."""
    parts = re.split(r"(`[^`]*`)", _NAME.sub(r"`\1`", text) if "`" not in text else text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<])", r"\\\1", part) for part in parts)


def attribute_docs(module: ModuleType, cls: str | None = None) -> dict[str, str]:
    """The strings behind the attributes of a class, or of the module itself, which exist in the source only.

    A string that several attributes share, because it stands behind the last of them, belongs to the last.
    """
    body = ast.parse(inspect.getsource(module)).body
    if cls is not None:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == cls).body
    found = {}
    for before, node in pairwise(body):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        target = (
            before.targets[0]
            if isinstance(before, ast.Assign)
            else before.target
            if isinstance(before, ast.AnnAssign)
            else None
        )
        if isinstance(target, ast.Name):
            found[target.id] = str(node.value.value)
    return found
