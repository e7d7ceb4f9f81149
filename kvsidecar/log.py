"""Structured logs: text for a person at a terminal, one JSON object a line for everything else."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(*, log_format: str, level: str) -> None:
    """Set up logging once, for this process.

    Args:
        log_format: ``text``, ``json``, or ``auto``: text if standard error is a terminal.
        level: ``debug``, ``info``, ``warning`` or ``error``.
    """
    text = sys.stderr.isatty() if log_format == "auto" else log_format == "text"
    render: structlog.typing.Processor
    if text:
        render = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=32)
    else:
        render = structlog.processors.JSONRenderer()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if text else "iso", utc=not text),
    ]
    if not text:
        shared.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    # Libraries (grpc, aiohttp) log through the standard module: let their warnings come out in the same form.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render]
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger; its events carry ``part=name``."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=name)
    return logger
