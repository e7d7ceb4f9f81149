"""What a rank's lookups, loads and stores share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvsidecar.client import Namespace
from kvsidecar.integrations.prompt_gains import PromptGains
from kvsidecar.integrations.sglang.counters import Counters
from kvsidecar.integrations.sglang.groups import Groups
from kvsidecar.integrations.stored_filter import StoredFilter
from kvsidecar.integrations.waited_jobs import WaitedJobs


@dataclass(frozen=True, slots=True)
class Shared:
    """One per rank."""

    jobs: WaitedJobs
    """Of the rank's client."""
    groups: Groups
    namespace: Namespace
    keys: Callable[[Sequence[str]], bytes]
    """The daemon's keys of pages with these hashes, joined, with the current weights. Raises ValueError as
    `kvsidecar.integrations.sglang.transfers.hashes_of` does."""
    counters: Counters
    clock: Callable[[], float]
    """Monotonic seconds."""
    gains: PromptGains = field(default_factory=PromptGains)
    """In pages, not tokens."""
    known: StoredFilter = field(default_factory=StoredFilter)
