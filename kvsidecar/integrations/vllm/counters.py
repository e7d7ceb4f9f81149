"""What the scheduler's side counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Sums since the start; blocks are those of one group, tokens those of requests, times in seconds."""

    lookups: int = 0
    lookup_seconds: float = 0.0
    unanswered_lookups: int = 0
    offered_tokens: int = 0
    """Of hits that were offered to vLLM, each time."""
    loads: int = 0
    loaded_tokens: int = 0
    """That vLLM took, and asked to be loaded."""
    gone_loads: int = 0
    """Loads whose blocks were evicted between the offer and the allocation; they fail."""
    failed_loads: int = 0
    stores: int = 0
    stored_blocks: int = 0
    """That the ranks were told to store."""
    failed_stores: int = 0
    """Store jobs that some rank did not store whole: declined or failed."""
    held_back: int = 0
    """Times that blocks were not stored because stores that are not over hold too many of the GPU's blocks."""
    resets: int = 0
