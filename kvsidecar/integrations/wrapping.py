"""Puts a call around a function of an engine that tells a connector nothing of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> Callable[[], None]:
    """From now on, ``call(original, ...)`` is called instead of ``owner.name(...)``.

    Returns:
        A function that ends this, unless somebody has wrapped it again.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    def end() -> None:
        if getattr(owner, name) is wrapped:
            setattr(owner, name, original)

    setattr(owner, name, wrapped)
    return end
