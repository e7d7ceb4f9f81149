"""Finds objects of an engine that gives an integration no way to them, but constructs it in their methods."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def attribute_of_caller(name: str, fits: Callable[[Any], bool]) -> Any:
    """An attribute that fits, of an object whose method calls this function, directly or not; of the innermost such
    object. None: no caller has one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if fits(found := getattr(frame.f_locals.get("self"), name, None)):
            return found
        frame = frame.f_back
    return None
