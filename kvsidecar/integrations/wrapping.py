"""Puts a call around a function of an engine that tells a connector nothing of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

End = Callable[[], None]
"""Ends what the function that returns it has begun, unless somebody has wrapped the same again."""


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> End:
    """From now on, ``call(original, ...)`` is called instead of ``owner.name(...)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    def end() -> None:
        if getattr(owner, name) is wrapped:
            setattr(owner, name, original)

    setattr(owner, name, wrapped)
    return end
