"""Sends this package's messages to an engine's log."""

from __future__ import annotations

import logging


def log_through(engine: str) -> None:
    """Log this package's messages through the engine's logger, in its format, from its level on, and once. Not if
    handlers have been set for this package.

    vLLM sets up its own logger alone. Without a handler, Python prints the bare text of warnings, and nothing else.
    """
    own = logging.getLogger("kvsidecar")
    if not own.handlers:
        own.parent = logging.getLogger(engine)
        own.setLevel(own.level)  # loggers remember which levels were enabled below another parent, until a level is set
