"""Capabilities of a terminal: width, colors, characters."""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from typing import Final, Protocol

PLAIN: Final = "kvsidecar.plain"
"""Encoding error handler that replaces a character by the most similar ASCII character, so that bars and tables keep
their width."""

_ASCII_FALLBACKS: Final = dict(zip("█░▁▂▃▄▅▆▇━╸╺─│·•…–—×→µ≤≥✓✗�", "#.__--===----|.*~--x>u<>+x?", strict=True))  # noqa: RUF001


class TextStream(Protocol):
    """The methods of a text file that this module uses."""

    def fileno(self) -> int: ...

    def isatty(self) -> bool: ...


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII_FALLBACKS.get(each, "?") for each in error.object[error.start : error.end]), error.end


codecs.register_error(PLAIN, _plain)


def never_fail_to_encode() -> None:
    """Make this process able to print any text, whatever the encoding of its locale."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)


def width(stream: TextStream) -> int:
    """Columns of the terminal behind a stream; 80 if unknown."""
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
    """Whether this is a terminal on which a line can be redrawn."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def sighup_is_its_end() -> bool:
    """Whether SIGHUP tells this process that its terminal is gone.

    It does if the process reads from a terminal or logs to one, and was not started with the signal ignored, as by
    nohup(1). A controlling terminal alone is no sign: a daemon in the background has one, too.
    """
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and (os.isatty(0) or os.isatty(2))
