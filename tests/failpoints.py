"""Failpoints of this process, for one block of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvsidecar.support import failpoints


@contextmanager
def active(spec: str) -> Iterator[None]:
    """The rules of ``spec`` inside the block, none after it."""
    failpoints.configure(spec)
    try:
        yield
    finally:
        failpoints.configure("")
