"""State that a rank's lookups, loads and stores share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvsidecar.client import Namespace
from kvsidecar.integrations.prompt_gains import PromptGains
from kvsidecar.integrations.sglang.counters import RankCounters
from kvsidecar.integrations.sglang.groups import Groups
from kvsidecar.integrations.stored_filter import StoredFilter
from kvsidecar.integrations.waited_jobs import WaitedJobs


@dataclass(frozen=True, slots=True)
class RankState:
    """The state that the lookups, loads and stores of one rank share."""

    jobs: WaitedJobs
    """The jobs of the rank's client."""
    groups: Groups
    namespace: Namespace
    keys: Callable[[Sequence[str]], bytes]
    """The daemon's keys of pages with these hashes, joined, for the current weights. Raises ValueError like
    `kvsidecar.integrations.sglang.transfers.hashes_of`."""
    counters: RankCounters
    clock: Callable[[], float]
    """Returns monotonic seconds."""
    gains: PromptGains = field(default_factory=PromptGains)
    """The gains of prompts, in pages, not tokens."""
    known: StoredFilter = field(default_factory=StoredFilter)
