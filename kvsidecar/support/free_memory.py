"""Gives memory that is free in the C library's heap back to the system, which glibc does by itself only at its top."""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's; musl has none, and keeps little."""


def give_back() -> None:
    """Takes milliseconds, and waits for no lock of Python."""
    if _trim is not None:
        _trim(0)
