"""Retention of a request's blocks in the daemon, from a router's hints and from the request's ``kv_transfer_params``.
Pure; imports no vLLM.

A router's hints arrive with a request (vLLM's ``kv_hints``). The schemas of their payloads are each component's own, so
only the kinds are read here: a hint applies to all blocks of its request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from kvsidecar.integrations.next_use import NEXT_USE, said_in
from kvsidecar.integrations.options import read_seconds
from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.types import MAX_IDLE_SECONDS, Priority

BOUNDS = frozenset(("ttl", "idle_ttl"))
"""Names that may be under `next_use.KEY` besides `NEXT_USE`: ``{"ttl": 600, "idle_ttl": "1min"}``."""
MAX_ACTIONS = 64
"""Most KV hints of one request that are read."""
SHORTEST = 1
"""Seconds in place of a time that cannot be read. The request wants a bound: without one, blocks would be kept that
must not stay, and an error would cost the answer."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long, and with which priority, to keep the blocks of one request. Times are in seconds; the daemon's shares
    may shorten them."""

    priority: Priority = Priority.NORMAL
    ttl: int | None = None
    """Time after the store; None: that of the share."""
    idle_ttl: int | None = None
    """Time after the last use of each block; None: that of the share."""


DEFAULT_RETENTION = Retention()
"""The retention of most requests' blocks."""


def retention_of(request: Any, counters: Counters, options: ConnectorOptions) -> Retention:
    """The retention of a request's blocks."""
    priority = priority_of(request, counters, options)
    times = said_in(getattr(request, "kv_transfer_params", None))
    if times is None or (isinstance(times, Mapping) and times and times.keys() <= NEXT_USE):
        return DEFAULT_RETENTION if priority is Priority.NORMAL else Retention(priority)
    counters.ttl_requests += 1
    if not isinstance(times, Mapping) or not times.keys() <= BOUNDS | NEXT_USE:
        counters.bad_ttls += 1
        return Retention(priority, ttl=SHORTEST)
    idle_ttl = _seconds(times.get("idle_ttl"), counters)
    if idle_ttl is not None:
        idle_ttl = min(idle_ttl, MAX_IDLE_SECONDS)
    return Retention(priority, _seconds(times.get("ttl"), counters), idle_ttl)


def _seconds(value: Any, counters: Counters) -> int | None:
    """Whole seconds, so that requests with about the same times are stored together."""
    try:
        return None if value is None else ceil(read_seconds(value))
    except (ValueError, OverflowError):  # the latter for a number of hundreds of digits
        counters.bad_ttls += 1
        return SHORTEST


def priority_of(request: Any, counters: Counters, options: ConnectorOptions) -> Priority:
    """The priority of a request's blocks in the pool.

    The KV hints decide: retain or pin means `Priority.HIGH`, demote `Priority.LOW`; the former wins. Without hints, the
    request's priority in vLLM's scheduler does, where a lower number comes first and 0 is the default.
    """
    hinted = _hinted(request, counters) if options.kv_hints else None
    if hinted is not None:
        return hinted
    number = getattr(request, "priority", 0) if options.request_priority else 0
    return Priority.HIGH if number < 0 else Priority.LOW if number > 0 else Priority.NORMAL


def _hinted(request: Any, counters: Counters) -> Priority | None:
    envelope = getattr(request, "kv_hints", None)  # since vLLM 0.32
    if envelope is None:
        return None
    found: Priority | None = None
    for action in envelope.actions[:MAX_ACTIONS]:
        kind = str(action.action_type).rpartition(".")[2].lower()
        if kind in ("retain", "pin"):
            found = Priority.HIGH
            counters.pin_hints += kind == "pin"
        elif kind == "demote":
            found = found or Priority.LOW
        elif kind != "prefetch":  # the lookup that every request begins with fetches what a tier has
            counters.unknown_hints += 1
            continue
        counters.hints += 1
    counters.unknown_hints += max(0, len(envelope.actions) - MAX_ACTIONS)
    return found
