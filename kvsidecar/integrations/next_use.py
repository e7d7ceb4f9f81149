"""Reads from a request when its prompt will be used next. Pure, and the same for all engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from math import inf
from typing import Any, Protocol

from kvsidecar.integrations.options import read_flag, read_seconds

KEY = "kvsidecar"
"""Key of the hints in the parameters that an engine passes on: ``{"pause": 60, "tool_pause": 5, "over": false}``."""
NEXT_USE = frozenset(("pause", "tool_pause", "over"))


class PauseCounters(Protocol):
    """The engine's counters that are incremented here."""

    pauses: int
    bad_pauses: int


def said_in(params: Any) -> Any:
    """The value of `KEY` in the parameters of a request."""
    return params.get(KEY) if isinstance(params, Mapping) else None


def pause_after(said: Any, answer: Collection[int], counters: PauseCounters, tool_tokens: Set[int]) -> float | None:
    """Seconds until the prompt of a request that has ended is expected to be used again, as the request says; infinity
    if it will not be; None if it does not say.

    Args:
        said: see `said_in`.
        answer: the answer's tokens.
        tool_tokens: an answer with one of these calls a tool.
    """
    if not isinstance(said, Mapping) or not said.keys() & NEXT_USE:
        return None
    counters.pauses += 1
    try:
        over = read_flag(said.get("over", False))
        pause, tool_pause = (
            None if (value := said.get(name)) is None else read_seconds(value) for name in ("pause", "tool_pause")
        )
    except (ValueError, OverflowError):
        counters.bad_pauses += 1
        return None
    if over:
        return inf
    if tool_pause is not None and not tool_tokens.isdisjoint(answer):
        return tool_pause
    return pause
