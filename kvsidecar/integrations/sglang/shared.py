"""What a rank's lookups, loads and stores share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvsidecar.client import Namespace
from kvsidecar.integrations.sglang.counters import Counters
from kvsidecar.integrations.sglang.groups import Groups
from kvsidecar.integrations.stored_filter import StoredFilter
from kvsidecar.integrations.waited_jobs import WaitedJobs

if TYPE_CHECKING:  # it needs torch
    from kvsidecar.integrations.sglang.pools import Order


@dataclass(frozen=True, slots=True)
class Shared:
    """One per rank."""

    jobs: WaitedJobs
    """Of the rank's client."""
    groups: Groups
    namespace: Namespace
    keys: Callable[[bytes], bytes]
    """Converts joined hashes to keys of the current weights."""
    counters: Counters
    clock: Callable[[], float]
    """Monotonic seconds."""
    order: Order | None = None
    """Of copies behind the kernels that may still write the pools; None if kernels are synchronous."""
    known: StoredFilter = field(default_factory=StoredFilter)
