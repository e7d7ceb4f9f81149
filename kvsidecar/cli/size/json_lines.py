"""Lines of JSON, plain or compressed."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
"""Functions that open compressed files, by suffix."""


class BadFile(Exception):
    """A file cannot be read; the text names the file, the line and what is wrong with it."""


class Line:
    """One object of a file.

    Args:
        number: the line's number, from 1.
    """

    def __init__(self, path: Path, number: int, values: dict[str, Any]) -> None:
        self._path, self._number = path, number
        self.values = values

    def refuse(self, why: str) -> NoReturn:
        raise BadFile(f"{self._path}, line {self._number}: {why}")

    def has(self, name: str) -> bool:
        return name in self.values

    def value(self, name: str) -> Any:
        if name not in self.values:
            self.refuse(f"there is no {name!r}")
        return self.values[name]

    def number(self, name: str) -> float:
        """A number that is not negative."""
        value = self.value(name)
        if not is_number(value):
            self.refuse(f"{name!r} must be a non-negative number, not {shown(value)}")
        return float(value)

    def count(self, name: str) -> int:
        value = self.value(name)
        if not is_count(value):
            self.refuse(f"{name!r} must be a non-negative whole number, not {shown(value)}")
        return int(value)

    def counts(self, name: str) -> list[int]:
        value = self.value(name)
        if not isinstance(value, list) or not all(map(is_count, value)):
            self.refuse(f"{name!r} must be a list of non-negative whole numbers, not {shown(value)}")
        return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class TextLine(NamedTuple):
    number: int
    text: str


def read_text(path: Path) -> Iterator[TextLine]:
    """The lines of a file that are not empty; ``.gz`` and ``.xz`` are decompressed.

    Raises:
        BadFile: it cannot be read, or has no line.
    """
    number, found = 0, False
    try:
        with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text := text.strip():
                    found = True
                    yield TextLine(number, text)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        raise BadFile(f"{path}, after line {number}: {error}") from error
    if not found:
        raise BadFile(f"{path} is empty")


def read_lines(path: Path) -> Iterator[Line]:
    """The objects of a file with one on each line.

    Raises:
        BadFile: it cannot be read, has no line, or one that is no object.
    """
    for line in read_text(path):
        yield parse_line(path, line)


def parse_line(path: Path, line: TextLine) -> Line:
    """The object on a line. Raises BadFile: there is none."""
    try:
        values = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}, line {line.number}: it is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise BadFile(f"{path}, line {line.number}: it is not a JSON object")
    return Line(path, line.number, values)
