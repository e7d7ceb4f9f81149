"""Limits of shares."""

from __future__ import annotations

from kvsidecar.cache.shares import ShareLimits
from tests.cache.support import (
    PAGE,
)

Limits = tuple[int, int | None]
"""Pages that are guaranteed, and the most pages."""


def limits(**shares: Limits) -> list[ShareLimits]:
    """One share per model."""
    return [
        ShareLimits(
            name, lambda space, name=name: space.model == name, low * PAGE, None if most is None else most * PAGE
        )  # type: ignore[misc]
        for name, (low, most) in shares.items()
    ]
