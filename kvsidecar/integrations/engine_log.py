"""Where this package's messages go inside an engine."""

from __future__ import annotations

import logging


def log_through(engine: str) -> None:
    """Have what this package says go where the messages of the engine's logger go, in their format, from their level
    on, and once. Not if somebody has set handlers for it.

    vLLM sets up its own logger alone. Without a handler, Python prints the bare text of warnings, and nothing else.
    """
    own = logging.getLogger("kvsidecar")
    if not own.handlers:
        own.parent = logging.getLogger(engine)
        own.setLevel(own.level)  # loggers remember which levels were enabled below another parent, until a level is set
