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
from kvsidecar.integrations.vllm.retention import DEFAULT_RETENTION, Retention

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
    """The traceparent of the first of its requests with a sampled trace."""
    retention: Retention = DEFAULT_RETENTION
    """The retention of its blocks."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """The blocks of one request's hit that the GPU lacks. The scheduler side holds a lease on them until every rank has
    reported the job. Then vLLM runs the request, unless it does so within the step."""

    number: int
    request_id: str
    blocks: tuple[GroupBlocks, ...]
    traceparent: str | None = None
    adapter: int = 0
    """vLLM's id of the adapter with which the request is computed; 0 for none."""
    in_step: bool = False
    """Whether the request is computed in the step that begins the load, and waits for it layer by layer."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of every rank in one step; from the scheduler side."""

    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    idle: bool = False
    """Whether nothing is scheduled in this step, so that stores may use the whole PCIe bandwidth."""
    give_up: bool = False
    """Whether to end the jobs, because the daemon hangs and the engine needs the blocks that they hold."""
    number: int = 0
    """Number of a plan with jobs, unique in its engine; 0: it has none."""
    lost: tuple[StepPlan, ...] = ()
    """Plans of steps that vLLM has lost. Each rank takes those that it did not get."""
    repeat: bool = False
    """Whether to report again which jobs have ended, because vLLM has lost a step, and maybe its reports."""
    adapter_changes: int = 0
    """How many changed adapters the scheduler side knows of. A rank that has seen more stores nothing of this plan."""


NOTHING = StepPlan()
"""The plan of most steps."""
IDLE = StepPlan(idle=True)


@dataclass(frozen=True, slots=True)
class RankReport:
    """The changes on one rank. `merged` joins the reports of one step."""

    attached: Mapping[int, int] = field(default_factory=dict)
    """The epoch of the daemon run to which each rank is attached; 0 for none. Only changes are reported."""
    stored: Mapping[int, int] = field(default_factory=dict)
    """The ranks on which each store job has ended, whatever the outcome, as a bit for each. A rank may report it
    twice."""
    not_stored: frozenset[int] = frozenset()
    """Store jobs that some rank did not complete: their blocks may be stored again."""
    loaded: Mapping[int, int] = field(default_factory=dict)
    """The ranks on which each load job has ended, as in ``stored``. vLLM receives their requests separately."""
    not_loaded: frozenset[int] = frozenset()
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node on which each rank runs; reported at the engine's start."""
    pool_blocks: int = 0
    """Most blocks that the daemon's pool can hold; reported with the attachment."""
    refused: int = 0
    """Number of jobs that the daemon refused because of their content: see `kvsidecar.integrations.refused_jobs`."""
    adapters: Mapping[int, tuple[AdapterLoad, ...]] = field(default_factory=dict)
    """The adapters that each rank has loaded."""
    not_admitted: frozenset[int] = frozenset()
    """Part of ``not_stored``: for some rank the daemon keeps other blocks instead; trying again is of no use."""
    woken: Mapping[int, bool] = field(default_factory=dict)
    """The ranks that have woken from sleep, and whether the weights of each are known to be those of the start."""

    def merged(self, *others: RankReport) -> RankReport:
        """Join reports at once: thousands of jobs may end in one step, so none is copied for each of the next."""
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
    """The ranks of an engine, as a bit for each."""
    return (1 << ranks) - 1


def traceparent_of(request: Any) -> str | None:
    """The W3C traceparent that came with a request, if tracing is on."""
    headers = request.trace_headers
    return headers.get("traceparent") if headers else None


def sampled_traceparent_of(request: Any) -> str | None:
    """The W3C traceparent of a request, if its flags, the last digit, mark the trace as sampled."""
    traceparent = traceparent_of(request)
    return traceparent if traceparent and traceparent.endswith(tuple("13579bdf")) else None
