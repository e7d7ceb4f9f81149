"""The data that the scheduler and the workers exchange once per step, in both directions. Needs no vLLM:
`kvsidecar.integrations.vllm.connector` wraps them in vLLM's classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsidecar.integrations.hashes import split_hashes
from kvsidecar.integrations.vllm.adapters import AdapterLoad
from kvsidecar.integrations.vllm.terms import DEFAULT_TERMS, Terms

ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one KV cache group: their joined hashes, and their ids as packed by `kvsidecar.client.pack_ids`."""

    group: int
    hashes: bytes
    block_ids: bytes
    notes: bytes = b""
    """Stores only: what other engines need to know about each block, joined; see `known_blocks`."""

    def __len__(self) -> int:
        return len(self.block_ids) // ID_BYTES

    def ids(self) -> list[int]:
        return memoryview(self.block_ids).cast("q").tolist()

    def id_array(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.block_ids, np.int64)

    def split(self) -> list[bytes]:
        return split_hashes(self.hashes, len(self))


def joined(parts: Sequence[GroupBlocks]) -> GroupBlocks:
    """Concatenate blocks of one group."""
    if len(parts) == 1:
        return parts[0]
    return GroupBlocks(
        parts[0].group, b"".join([each.hashes for each in parts]), b"".join([each.block_ids for each in parts])
    )


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Full blocks of confirmed tokens. The scheduler side holds a reference on each until every rank has reported the
    job."""

    number: int
    blocks: tuple[GroupBlocks, ...]
    traceparent: str | None = None
    """Of the first of its requests with a sampled trace."""
    terms: Terms = DEFAULT_TERMS
    """Of its blocks."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """The blocks of one request's hit that the GPU lacks. The scheduler side holds a lease on them until every rank has
    reported the job; then vLLM runs the request, unless it does so meanwhile."""

    number: int
    request_id: str
    blocks: tuple[GroupBlocks, ...]
    traceparent: str | None = None
    adapter: int = 0
    """vLLM's id of the adapter with which the request is computed; 0 for none."""
    in_step: bool = False
    """The request is computed in the step that begins the load, and waits for it layer by layer."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every rank does in one step; from the scheduler side."""

    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    idle: bool = False
    """Nothing is scheduled in this step: stores may use the whole PCIe bandwidth."""
    give_up: bool = False
    """The daemon hangs, and the engine needs the blocks that its jobs hold: end them."""
    number: int = 0
    """Identifies a plan with jobs among those of its engine; 0: it has none."""
    lost: tuple[StepPlan, ...] = ()
    """Plans of steps that vLLM has lost. Each rank takes those that it did not get."""
    repeat: bool = False
    """vLLM has lost a step, and maybe its reports: tell again which jobs have ended."""
    adapter_changes: int = 0
    """How many changed adapters the scheduler side knows of. A rank that has seen more stores nothing of this plan."""


NOTHING = StepPlan()
"""The plan of most steps."""
IDLE = StepPlan(idle=True)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What has changed on one rank. `merged` joins the reports of one step."""

    attached: Mapping[int, int] = field(default_factory=dict)
    """By rank: the epoch of the daemon run that it is attached to; 0 for none. Only changes are reported."""
    stored: Mapping[int, int] = field(default_factory=dict)
    """By store job: the ranks on which it has ended, whatever the outcome, as a bit for each. A rank may say so
    twice."""
    not_stored: frozenset[int] = frozenset()
    """Store jobs that some rank did not complete: their blocks may be stored again."""
    loaded: Mapping[int, int] = field(default_factory=dict)
    """By load job: the ranks on which it has ended, as in ``stored``. vLLM is told of their requests separately."""
    not_loaded: frozenset[int] = frozenset()
    nodes: Mapping[int, str] = field(default_factory=dict)
    """By rank: which node it runs on; reported at the engine's start."""
    pool_blocks: int = 0
    """Most blocks that the daemon's pool can hold; reported with the attachment."""
    refused: int = 0
    """Jobs that the daemon refused because of what they ask for: see `kvsidecar.integrations.refused_jobs`."""
    adapters: Mapping[int, tuple[AdapterLoad, ...]] = field(default_factory=dict)
    """By rank: adapters that it has loaded."""
    not_admitted: frozenset[int] = frozenset()
    """Part of ``not_stored``: for some rank the daemon keeps other blocks instead; there is no use in trying again."""
    woken: Mapping[int, bool] = field(default_factory=dict)
    """By rank that has woken from sleep: whether its weights are known to be those of the start."""

    def merged(self, *others: RankReport) -> RankReport:
        """All of them as one: thousands of jobs may end in one step, so none is copied for each of the next."""
        reports = (self, *others)

        def united(ranks: Iterable[Mapping[int, int]]) -> dict[int, int]:
            found: dict[int, int] = {}
            for each in ranks:
                for number, bits in each.items():
                    found[number] = found.get(number, 0) | bits
            return found

        return RankReport(
            {rank: epoch for each in reports for rank, epoch in each.attached.items()},
            united(each.stored for each in reports),
            frozenset().union(*[each.not_stored for each in reports]),
            united(each.loaded for each in reports),
            frozenset().union(*[each.not_loaded for each in reports]),
            {rank: node for each in reports for rank, node in each.nodes.items()},
            max(each.pool_blocks for each in reports),
            sum(each.refused for each in reports),
            {rank: loads for each in reports for rank, loads in each.adapters.items()},
            frozenset().union(*[each.not_admitted for each in reports]),
            {rank: same for each in reports for rank, same in each.woken.items()},
        )


def all_of(ranks: int) -> int:
    """So many ranks, with a bit for each."""
    return (1 << ranks) - 1


def traceparent_of(request: Any) -> str | None:
    """The W3C traceparent that came with a request, if tracing is on."""
    headers = request.trace_headers
    return headers.get("traceparent") if headers else None


def sampled_traceparent_of(request: Any) -> str | None:
    """The same, if its flags, the last digit, say that the trace is sampled."""
    traceparent = traceparent_of(request)
    return traceparent if traceparent and traceparent.endswith(tuple("13579bdf")) else None
