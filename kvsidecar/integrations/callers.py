"""Finds objects of an engine that does not hand them to an integration, but constructs it in their methods."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def attribute_of_caller(name: str, fits: Callable[[Any], bool]) -> Any:
    """An attribute that fits, of an object whose method calls this function, directly or not; of the innermost such
    object. None: no caller has one."""
    return getattr(caller_with(name, fits), name, None)


def caller_with(name: str, fits: Callable[[Any], bool]) -> Any:
    """The innermost object with an attribute of this name that fits, whose method calls this function, directly or
    not. None: there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if fits(getattr(owner := frame.f_locals.get("self"), name, None)):
            return owner
        frame = frame.f_back
    return None
