"""What a page of an integration shows of its options."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any


def shown(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    if isinstance(default, float):
        return f'`"{default:g}s"`' if default >= 1 else f'`"{default * 1e3:g}ms"`'
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def rows_of_page(page: Path) -> list[tuple[str, str, str]]:
    """Of its table of options: name, default, meaning."""
    return re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", page.read_text(), re.MULTILINE)


def rows_of_code(options: Any) -> list[tuple[str, str, str]]:
    """The same, of the dataclass."""
    return [(each.name, shown(each.default), each.metadata["help"]) for each in fields(options)]
