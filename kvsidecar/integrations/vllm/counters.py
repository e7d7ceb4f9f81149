"""What the scheduler's side counts, each with the words that vLLM's ``/metrics`` serve it with."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any


def _counted(text: str) -> Any:
    return field(default=0, metadata={"help": text})


@dataclass(slots=True)
class Counters:
    """Sums since the start."""

    lookups: int = _counted("Lookups: questions which blocks the daemon has.")
    unanswered_lookups: int = _counted(
        "Lookups that were not answered in time, or not made while the daemon is lost; they miss."
    )
    refused_lookups: int = _counted("Lookups that the daemon refused as wrong; they miss, and the log says why.")
    offered_tokens: int = _counted("Tokens of the hits that vLLM was offered, each time.")
    loads: int = _counted("Loads: hits that vLLM took.")
    loaded_tokens: int = _counted("Tokens of the hits that vLLM took.")
    unleased_loads: int = _counted("Loads without a lease: the daemon gave none, or could not be asked at once.")
    gone_loads: int = _counted("Loads that failed and whose lease had ended before they were allocated.")
    failed_loads: int = _counted("Loads that some rank did not load whole; their requests are computed.")
    stores: int = _counted("Store jobs.")
    stored_blocks: int = _counted("Blocks that the ranks were told to store.")
    failed_stores: int = _counted("Store jobs that some rank did not store whole: declined or failed.")
    held_back_stores: int = _counted(
        "Times that stores waited: those before them hold as many of the GPU's blocks as they may, or run for too long."
    )
    given_up_blocks: int = _counted(
        "Blocks that were due to be stored and never are: the GPU evicted them first, or too many were due."
    )
    resets: int = _counted("Resets of the prefix cache.")
    refused_resets: int = _counted(
        "Resets that vLLM refused, for requests or stores had blocks; nothing is offloaded until one succeeds."
    )
    unnamed_resets: int = _counted(
        "Resets without a new name of the weights; the engine shares its blocks with no other from then on."
    )
    _told: tuple[int, ...] = field(default=(), init=False, repr=False)

    def take(self) -> dict[str, int]:
        """What has been added since the last call, by name; mostly nothing."""
        now = _values(self)
        if now == self._told:
            return {}
        told, self._told = self._told or (0,) * len(now), now
        return {name: value - then for name, value, then in zip(COUNTED, now, told, strict=True) if value != then}


OWN_HASHES = "own_hashes"
GAUGES = {
    OWN_HASHES: "1 if this engine's hashes begin with a random seed: no other engine, and no restart, hits its blocks."
}
"""Help by name."""
COUNTED: dict[str, str] = {each.name: each.metadata["help"] for each in fields(Counters) if each.metadata}
"""Help by name."""
_values = attrgetter(*COUNTED)
