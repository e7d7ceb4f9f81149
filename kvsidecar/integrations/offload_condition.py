"""Gauges of the integrations that show whether an engine offloads, and if not, why. Engine-independent."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from kvsidecar.support.boot import boot_id

ATTACHED = "attached"
BREAKER_OPEN = "breaker_open"
PENDING_JOBS = "pending_jobs"
NOT_OFFLOADING = "not_offloading"
GAUGES = {
    ATTACHED: "1 while every rank is attached to the daemon.",
    BREAKER_OPEN: "1 while no lookup is sent, because the daemon has not answered the last ones.",
    PENDING_JOBS: "Loads and stores that have not ended on every rank.",
    NOT_OFFLOADING: "1 for the reason why this engine offloads nothing, 0 for all others.",
}
"""Help texts by name. ``not_offloading`` has the label ``reason``."""


class WhyNot(StrEnum):
    """Why an engine offloads nothing. Each is a value of the label ``reason``."""

    UNSUPPORTED = "unsupported"
    """The model, its KV cache, an option or this version of the engine is not supported; the log says which."""
    SEVERAL_NODES = "several_nodes"
    """The ranks run on several nodes, each with a daemon of its own."""
    DIFFERENT_KV = "different_kv"
    """The ranks do not agree on what identifies their KV."""
    NOT_ATTACHED = "not_attached"
    """Some rank is not attached: no daemon answers it, it is refused, or its memory cannot be shared; the log says
    which."""
    SEVERAL_DAEMONS = "several_daemons"
    """The ranks are attached to different daemons, or to different runs of one."""
    RESET_REFUSED = "reset_refused"
    """The weights may have changed, and the engine has not emptied its prefix cache since."""


def node_id() -> str:
    """An id that is equal in all processes of a node, also in containers; empty if the kernel has none."""
    try:
        return boot_id()
    except OSError:
        return ""


def reason_gauges(why_not: WhyNot | None) -> Mapping[str, int]:
    """The value of the gauge for each reason, by name and label."""
    return {f"{NOT_OFFLOADING}|{each.value}": int(each is why_not) for each in WhyNot}
