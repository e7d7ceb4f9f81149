"""State that the parts of the scheduler's side share: facts about their engine, counters, and numbers of jobs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvsidecar.integrations.prompt_gains import PromptGains
from kvsidecar.integrations.stored_filter import StoredFilter
from kvsidecar.integrations.vllm.adapters import Adapters
from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.events import Events
from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.integrations.vllm.recomputing import Recompute
from kvsidecar.integrations.vllm.written import BlockIds, WrittenBlocks


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts that the connector has found out about its engine."""

    hash_bytes: int
    """Size of a block hash."""
    groups: tuple[Group, ...]
    """From `groups_of`, the same as on the workers."""
    world_size: int
    """Number of ranks."""
    step_tokens: int = 8192
    """Most tokens that one step computes (``max_num_batched_tokens``)."""
    longest_blocks: int = 0
    """Most blocks that one request needs."""
    waits: bool = True
    """Whether vLLM waits for blocks that stores release soon, instead of preempting a request."""
    recompute: Recompute | None = None
    """Called after a failed load within a step; None: no step computes a request while its hit is loaded."""
    adapters: Adapters | None = None
    """The adapters that the ranks load; None: the engine has no adapters."""
    block_ids: BlockIds = lambda _: ()


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The state that the parts of one scheduler's side share."""

    options: ConnectorOptions
    engine: EngineFacts
    events: Events | None
    """Collects KV cache events, if vLLM publishes them."""
    clock: Callable[[], float]
    """Returns monotonic seconds."""
    counters: Counters = field(default_factory=Counters)
    stored_filter: StoredFilter = field(default_factory=StoredFilter)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers of the next jobs."""
    gains: PromptGains = field(default_factory=PromptGains)
    written: WrittenBlocks = field(default_factory=WrittenBlocks)
