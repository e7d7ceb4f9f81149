"""On which terms the daemon keeps a request's blocks, and when they are used next: what a router hints at, and what
whoever makes the request says in its ``kv_transfer_params``. Pure; imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from kvsidecar.integrations.options import read_flag, read_seconds
from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.hints import priority_of
from kvsidecar.types import MAX_IDLE_SECONDS, Priority

TIMES = "kvsidecar"
"""Key of ``kv_transfer_params``: ``{"ttl": 600, "idle_ttl": "1min", "pause": 60, "tool_pause": 5, "over": false}``."""
BOUNDS = frozenset(("ttl", "idle_ttl"))
NEXT_USE = frozenset(("pause", "tool_pause", "over"))
SHORTEST = 1
"""Seconds in place of a time that cannot be read. The request wants a bound: none at all would keep what must not stay,
and an error would cost the answer."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Of the blocks of one request. Times are in seconds; the daemon's shares may shorten them."""

    priority: Priority = Priority.NORMAL
    ttl: int | None = None
    """After the store; None: as the shares say."""
    idle_ttl: int | None = None
    """After the last use of each block; None: the same."""


DEFAULT_TERMS = Terms()
"""Those of most requests."""


def terms_of(request: Any, counters: Counters, *, hints: bool, request_priority: bool) -> Terms:
    """The terms of a request's blocks.

    Args:
        hints, request_priority: as in `priority_of`.
    """
    priority = priority_of(request, counters, hints=hints, request_priority=request_priority)
    params = getattr(request, "kv_transfer_params", None)
    times = params.get(TIMES) if isinstance(params, Mapping) else None
    if times is None or (isinstance(times, Mapping) and times and times.keys() <= NEXT_USE):
        return DEFAULT_TERMS if priority is Priority.NORMAL else Terms(priority)
    counters.ttl_requests += 1
    if not isinstance(times, Mapping) or not times.keys() <= BOUNDS | NEXT_USE:
        counters.bad_ttls += 1
        return Terms(priority, ttl=SHORTEST)
    idle_ttl = _seconds(times.get("idle_ttl"), counters)
    if idle_ttl is not None:
        idle_ttl = min(idle_ttl, MAX_IDLE_SECONDS)
    return Terms(priority, _seconds(times.get("ttl"), counters), idle_ttl)


def pause_after(request: Any, counters: Counters, tool_tokens: Set[int]) -> float | None:
    """Seconds until the prompt of a request that has ended is expected to be used again, as the request says; infinity
    if it will not be; None if it does not say.

    Args:
        tool_tokens: an answer with one of these calls a tool.
    """
    params = getattr(request, "kv_transfer_params", None)
    said = params.get(TIMES) if isinstance(params, Mapping) else None
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
    if tool_pause is not None and not tool_tokens.isdisjoint(request.output_token_ids):
        return tool_pause
    return pause


def _seconds(value: Any, counters: Counters) -> int | None:
    """Whole seconds, so that requests with about the same times are stored together."""
    try:
        return None if value is None else ceil(read_seconds(value))
    except (ValueError, OverflowError):  # the latter for a number of hundreds of digits
        counters.bad_ttls += 1
        return SHORTEST
