"""Reads files that an operator writes, whatever lies at their path: no open waits, and no read is without a bound."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvsidecar.support.units import MiB, format_size

MAX_BYTES: Final = 4 * MiB
"""More than any configuration or bundle of certificates has."""


def read(path: Path, check: Callable[[os.stat_result], None] = lambda found: None) -> bytes:
    """The content of a regular file.

    Args:
        check: called with what the file is, before it is read.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than `MAX_BYTES`; ``strerror`` says which.
    """
    # Without O_NONBLOCK a FIFO that nobody writes to would be waited for, and no later reload would be heard.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is not a regular file")
        check(found)
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(0, f"it has more than {format_size(MAX_BYTES)}")
    return content


MAX_PLACE: Final = 40
"""Characters that an error shows of the line from its place on."""
MAX_LINE: Final = 300
"""Characters of a line that are looked at."""
_UNQUOTED = re.compile(r"\s*([\w-]+)\s*=\s*([^\s\"'\[{#][^\"'#]*?)\s*(?:#.*)?")
_BARE = re.compile(
    r"true|false|[+-]?(?:inf|nan|[\d_]+(?:\.[\d_]+)?(?:e[+-]?\d+)?|0[xob][\da-f_]+)|\d{4}-.*|\d\d:.*", re.IGNORECASE
)
"""What TOML takes without quotes: no size, percentage, word, address or path is among it."""


_AT = re.compile(r" \(at line (\d+), column (\d+)\)")


def toml_problem(text: str, error: ValueError) -> str:
    """``tomllib``'s message about a text, with what is at the place that it names."""
    found = _AT.search(str(error))
    if found is None:
        return str(error).replace(" (at end of document)", " at its end")
    lines, number = text.split("\n"), int(found[1])
    line = lines[number - 1] if number <= len(lines) else ""
    rest = line[int(found[2]) - 1 :][:MAX_PLACE]
    where = f"at {rest!r}" if rest else "at the end"
    return f"{_AT.sub('', str(error))} {where}{f' of line {number}' if len(lines) > 1 else ''}"


def toml_hint(text: str, error: ValueError) -> str:
    """What to change in a text that is no TOML, if it is a key that is there twice or the quotes of a value; or empty.

    Args:
        error: from ``tomllib``; names the line.
    """
    at = re.search(r"at line (\d+)", str(error))
    line = text.splitlines()[int(at[1]) - 1][:MAX_LINE] if at else ""
    if at and str(error).startswith("Illegal character '\\n'"):
        return f"close the quotes in line {at[1]}"
    if at and str(error).startswith("Cannot overwrite a value") and "=" in line:
        return f"{line.partition('=')[0].strip()} is there again in line {at[1]}: remove one of the two"
    found = _UNQUOTED.fullmatch(line)
    if found is None or _BARE.fullmatch(found[2]):
        return ""
    return f'quote the value in line {at[1] if at else 0}: {found[1]} = "{found[2]}"'
