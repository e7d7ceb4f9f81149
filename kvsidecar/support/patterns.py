"""Matches namespaces against patterns of the configuration."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from kvsidecar.types import Namespace

EVERYTHING: Final = "*"


def covers(patterns: tuple[str, ...], namespace: Namespace) -> bool:
    """Whether one of these patterns matches the namespace."""
    return EVERYTHING in patterns or _fits(patterns, namespace)


@lru_cache(maxsize=4096)
def _fits(patterns: tuple[str, ...], namespace: Namespace) -> bool:
    full = str(namespace)
    return any(fnmatchcase(namespace.model, each) or fnmatchcase(full, each) for each in patterns)
