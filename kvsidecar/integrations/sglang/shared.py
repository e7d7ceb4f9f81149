"""What a rank's lookups, loads and stores share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvsidecar.integrations.sglang.counters import Counters
from kvsidecar.integrations.sglang.groups import Groups
from kvsidecar.integrations.sglang.jobs import Jobs
from kvsidecar.integrations.stored_filter import StoredFilter


@dataclass(frozen=True, slots=True)
class Shared:
    """One per rank."""

    jobs: Jobs
    """Of the rank's client."""
    groups: Groups
    counters: Counters
    clock: Callable[[], float]
    """Monotonic seconds."""
    known: StoredFilter = field(default_factory=StoredFilter)
