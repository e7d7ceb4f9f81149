"""The abilities of a terminal: width, colors, characters."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Final, Protocol

PLAIN: Final = "kvsidecar.plain"
"""Error handler of an encoding: replaces a character by the ASCII character that looks most like it, so that bars and
tables keep their width."""

_ASCII_FALLBACKS: Final = dict(zip("█░▁▂▃▄▅▆▇━╸╺─│·•…–—×→µ≤≥✓✗�", "#.__--===----|.*~--x>u<>+x?", strict=True))  # noqa: RUF001


class TextStream(Protocol):
    """The part of a file that is used here."""

    def fileno(self) -> int: ...

    def isatty(self) -> bool: ...


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII_FALLBACKS.get(each, "?") for each in error.object[error.start : error.end]), error.end


codecs.register_error(PLAIN, _plain)


def never_fail_to_encode() -> None:
    """Let this process print any text, whatever the encoding of its locale."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)


def width(stream: TextStream) -> int:
    """Columns of the terminal behind a stream; 80 if it does not say."""
    if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def colors(stream: TextStream) -> bool:
    """Whether to color text on this stream (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and can_redraw(stream)


def can_redraw(stream: TextStream) -> bool:
    """Whether it is a terminal whose lines can be written over."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
