"""Structured logging: text at a terminal, otherwise one JSON object per line.

Logging never blocks and never fails; see `kvsidecar.support.log_writer`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, TextIO, cast

from kvsidecar.support import terminal
from kvsidecar.support.imports import module_hidden
from kvsidecar.support.log_writer import LogStream, LogWriter, Loss

# structlog imports rich for a renderer that is not used here: a tenth of the daemon's start.
with module_hidden("rich"):
    import structlog

FLUSH_SECONDS: Final = 1.0
"""Longest wait for the reader of the log when the process ends."""
LIMITED_SECONDS: Final = 1.0
"""Shortest time between two lines of one kind that clients cause."""
MAX_KINDS: Final = 256
"""Kinds of lines that are distinguished: the code has fewer, and gRPC few."""
_WIDE: Final = 120
"""Columns from which a terminal has room to align the events."""

_COLORS: Final = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "31"}


class Text:
    """Renders an event as text: time, level, event, values; wraps between values at the width of the terminal."""

    def __init__(self, stream: terminal.TextStream) -> None:
        self._stream = stream
        self._colors = terminal.colors(stream)

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
        level, exception = event.pop("level", "info"), event.pop("exception", None)
        time, name = event.pop("timestamp", ""), _printable(event.pop("event", ""), quote=False)
        width = terminal.width(self._stream) if self._stream.isatty() else 0
        padded = name + " " if width and width < _WIDE else f"{name:<32}"
        head = f"{time} [{level:<8}] {padded}"
        text = f"{self._in('2', time)} [{self._in(_COLORS.get(level, '0'), f'{level:<8}')}] {self._in('1', padded)}"
        column = len(head)
        for key in sorted(event):
            value = _printable(event[key])
            length = len(key) + 1 + len(value)
            if width and column + 1 + length > width and column > len(time) + 1:
                text, column = text.rstrip() + "\n" + " " * len(time), len(time)
            text += f" {self._in('36', key)}={self._in('35', value)}"
            column += 1 + length
        return text if exception is None else f"{text}\n{exception}"

    def _in(self, color: str, text: str) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if self._colors and text else text


def _printable(value: object, *, quote: bool = True) -> str:
    """A value on one line, without control characters: clients choose some values and could manipulate the terminal."""
    text = value if isinstance(value, str) else repr(value)
    plain = text.isprintable() and not (quote and isinstance(value, str) and (not text or set(text) & set(" =\"'")))
    return text if plain else repr(text)


def configure(*, log_format: str, level: str) -> None:
    """Set up or change logging for this process. Replaces ``sys.stderr``.

    Args:
        log_format: ``text``, ``json``, or ``auto``: text if standard error is a terminal.
        level: ``debug``, ``info``, ``warning`` or ``error``.
    """
    # gRPC's core writes lines of its own to descriptor 2, for every bad frame of a client for example, and reads this
    # when it is imported. What an operator sets to debug it stays.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    stream = _stream()
    text = stream.isatty() if log_format == "auto" else log_format == "text"
    render: structlog.typing.Processor = Text(stream) if text else structlog.processors.JSONRenderer()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if text else "iso", utc=not text),
        structlog.processors.format_exc_info,
    ]

    def describe(lost: Mapping[Loss, int]) -> str:
        event: Any = {"part": "log", "event": "lines of the log were lost", **{reason: lost[reason] for reason in lost}}
        for process in (*shared, render):
            event = process(None, "error", event)
        return str(event)

    stream.writer.describe = describe
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", stream)),
        cache_logger_on_first_use=False,
    )
    # Libraries (grpc, aiohttp) log through the standard module; their warnings get the same form.
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render]
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


def _stream() -> LogStream:
    if isinstance(sys.stderr, LogStream):
        return sys.stderr
    if sys.stderr is None:
        # Started without standard error. Drivers print to descriptor 2, so nothing else may get that number.
        while (null := os.open(os.devnull, os.O_RDWR)) < 2:
            pass
        sys.stderr = os.fdopen(null, "w", encoding="utf-8")
    stream = LogStream(LogWriter(sys.stderr.fileno(), str), sys.stderr, terminal.PLAIN)
    sys.stderr = stream
    atexit.register(flush)
    return stream


def flush() -> None:
    """Wait until all lines are written, at most `FLUSH_SECONDS`. Called before the process ends."""
    if isinstance(sys.stderr, LogStream):
        sys.stderr.writer.flush(FLUSH_SECONDS)


def lost() -> dict[str, int]:
    """Number of log lines lost so far, by reason."""
    counts = sys.stderr.writer.lost() if isinstance(sys.stderr, LogStream) else dict.fromkeys(Loss, 0)
    return {reason.value: count for reason, count in counts.items()}


def show(status: str) -> None:
    """Show a status line below the log on a terminal until the next call. An empty line removes it."""
    if isinstance(stream := sys.stderr, LogStream):
        stream.writer.show(stream.encode(status))


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger; its events carry ``part=name``."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=name)
    return logger


class Rate:
    """Passes one line of each kind in `LIMITED_SECONDS`."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        """When each kind was passed."""
        self._left_out: dict[str, int] = {}

    def passes(self, kind: str) -> int | None:
        """How many lines were left out since the last one that passed; None if this one is left out, too.

        Args:
            kind: a text without what clients choose. Of more than `MAX_KINDS`, all are new.
        """
        now, last = time.monotonic(), self._last.get(kind)
        if last is not None and now - last < LIMITED_SECONDS:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return None
        if last is None and len(self._last) >= MAX_KINDS:
            self._last.clear()
            self._left_out.clear()
        self._last[kind] = now
        return self._left_out.pop(kind, 0)


class Limited:
    """Logs what clients cause: at most one line of each event in `LIMITED_SECONDS`. Its ``left_out`` is the number left
    out since the one before. Otherwise a client could fill the disk, and hide what others have done."""

    def __init__(self, logger: structlog.typing.FilteringBoundLogger) -> None:
        self._logger, self._rate = logger, Rate()

    def debug(self, event: str, **values: Any) -> None:
        self._log(logging.DEBUG, event, values)

    def info(self, event: str, **values: Any) -> None:
        self._log(logging.INFO, event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._log(logging.WARNING, event, values)

    def error(self, event: str, **values: Any) -> None:
        self._log(logging.ERROR, event, values)

    def _log(self, level: int, event: str, values: dict[str, Any]) -> None:
        if (left_out := self._rate.passes(event)) is not None:
            self._logger.log(level, event, **values, **({"left_out": left_out} if left_out else {}))


def limited(name: str) -> Limited:
    """A logger for events that clients cause; see `get`."""
    return Limited(get(name))
