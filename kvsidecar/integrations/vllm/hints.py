"""What an engine or a router says of how long a request's blocks are worth keeping. Pure; imports no vLLM.

A router's hints come with a request (vLLM's ``kv_hints``). The schemas of their payloads are each component's own, so
only the kinds are read here: a hint is for all blocks of its request.
"""

from __future__ import annotations

from typing import Any

from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.options import Options
from kvsidecar.types import Priority

MAX_ACTIONS = 64
"""Actions of one request that are read."""


def priority_of(request: Any, counters: Counters, options: Options) -> Priority:
    """The priority of a request's blocks in the pool.

    By its KV hints: to retain or to pin means `Priority.HIGH`, to demote `Priority.LOW`; the former wins. Without one,
    by its priority in vLLM's scheduler, where a lower number comes first and 0 is the default.
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
