"""Wraps functions of an engine that gives a connector no hook for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

End = Callable[[], None]
"""Undoes a wrapping, unless the same function has been wrapped again since."""


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> End:
    """Replace ``owner.name``: from now on a call of it becomes ``call(original, ...)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    def end() -> None:
        if getattr(owner, name) is wrapped:
            setattr(owner, name, original)

    setattr(owner, name, wrapped)
    return end
