"""The data that the scheduler and the workers exchange once per step, in both directions.

vLLM wraps both in its own base classes; `kvsidecar.integrations.vllm.connector` does that, so that these need no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one KV cache group: ``hashes`` holds one hash after the other, each for one of ``block_ids``, which are
    packed as well: see `kvsidecar.client.pack_ids`."""

    group: int
    hashes: bytes
    block_ids: bytes

    def __len__(self) -> int:
        """Blocks."""
        return len(self.block_ids) // ID_BYTES

    def ids(self) -> list[int]:
        """The block ids."""
        return memoryview(self.block_ids).cast("q").tolist()

    def split(self) -> list[bytes]:
        """The hashes."""
        width = len(self.hashes) // max(1, len(self))
        return [self.hashes[i : i + width] for i in range(0, len(self.hashes), width)] if width else []


def joined(parts: Sequence[GroupBlocks]) -> GroupBlocks:
    """Blocks of one group, one part behind the other."""
    if len(parts) == 1:
        return parts[0]
    return GroupBlocks(
        parts[0].group, b"".join([each.hashes for each in parts]), b"".join([each.block_ids for each in parts])
    )


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Full blocks whose tokens are confirmed. The scheduler's side holds a reference on each until every rank has
    reported the job."""

    number: int
    blocks: tuple[GroupBlocks, ...]
    traceparent: str | None = None
    """The context of the first of its requests whose trace is sampled."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """The external part of one request's hit. vLLM runs the request when every rank has reported it; until then the
    scheduler's side holds a lease on the blocks."""

    number: int
    request_id: str
    blocks: tuple[GroupBlocks, ...]
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class StepOrders:
    """From the scheduler's side to every rank."""

    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    idle: bool = False
    """Nothing is scheduled in this step: stores may use the whole link."""


NOTHING = StepOrders()
"""The orders of most steps."""
IDLE = StepOrders(idle=True)


@dataclass(frozen=True, slots=True)
class RankReport:
    """From one rank, when it has something to say. `merged` joins those of one step."""

    attached: Mapping[int, int] = field(default_factory=dict)
    """By rank: the epoch of the daemon run it is attached to; 0 for none. Sent when it changes."""
    stored: Mapping[int, int] = field(default_factory=dict)
    """By store job: how many ranks have reported its end since the last report, whatever the outcome."""
    not_stored: frozenset[int] = frozenset()
    """Those that were not stored whole by some rank: their blocks may be stored again."""
    loaded: Mapping[int, int] = field(default_factory=dict)
    """By load job: how many ranks have reported its end. Their requests are reported to vLLM beside this."""
    not_loaded: frozenset[int] = frozenset()

    def merged(self, other: RankReport) -> RankReport:
        def summed(mine: Mapping[int, int], theirs: Mapping[int, int]) -> dict[int, int]:
            return {number: mine.get(number, 0) + theirs.get(number, 0) for number in (*mine, *theirs)}

        return RankReport(
            {**self.attached, **other.attached},
            summed(self.stored, other.stored),
            self.not_stored | other.not_stored,
            summed(self.loaded, other.loaded),
            self.not_loaded | other.not_loaded,
        )


def traceparent_of(request: Any) -> str | None:
    """The W3C traceparent that vLLM was sent with a request, if it is told to trace."""
    headers = request.trace_headers
    return headers.get("traceparent") if headers else None


def sampled_traceparent_of(request: Any) -> str | None:
    """The same, if its last digit, the flags, says that the trace is sampled."""
    traceparent = traceparent_of(request)
    return traceparent if traceparent and traceparent.endswith(tuple("13579bdf")) else None
