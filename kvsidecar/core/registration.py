"""What a rank registers when it attaches, and the checks that need neither a driver nor the cache."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvsidecar.cache.records import MAX_SHARDS
from kvsidecar.core.layout_checks import MAX_ROWS, checking_regions
from kvsidecar.errors import InvalidRequest
from kvsidecar.types import GroupLayout, Namespace, text_problem

MAX_EVENTS = 256
"""Events in one rank's ring: no more stores than this wait for their compute at once."""
MAX_ALLOCATIONS = 4096
"""Allocations that one rank may register. Each costs a driver call."""
MAX_RANGE_BYTES = 1 << 42
"""Bytes of one range of physical memory: more than any GPU has, and so few that sums of them do not overflow."""
MAX_GROUPS = 128
"""Groups that one rank may register. vLLM makes about ten, and at most one per layer."""


@dataclass(frozen=True, slots=True)
class CudaAllocation:
    """An allocation named by its CUDA IPC handle; ``size`` is the client's claim in bytes."""

    handle: bytes
    size: int


@dataclass(frozen=True, slots=True)
class FdAllocation:
    """An allocation named by the index of a memfd sent over the attach socket; ``size`` is the client's claim."""

    fd_index: int
    size: int


@dataclass(frozen=True, slots=True)
class RangesAllocation:
    """An allocation named by the indexes of the descriptors of its physical memory, sent over the attach socket."""

    fd_indexes: tuple[int, ...]
    sizes: tuple[int, ...]
    """Bytes of each descriptor's memory."""
    size: int


Allocation = CudaAllocation | FdAllocation | RangesAllocation


@dataclass(frozen=True, slots=True)
class RankRegistration:
    """The registration of one rank, as it comes with Attach."""

    token: bytes
    instance: str
    namespace: Namespace
    rank: int
    world_size: int
    device: str
    allocations: tuple[Allocation, ...]
    groups: tuple[GroupLayout, ...]
    event_handles: tuple[bytes, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    """What the namespace is made of, according to the client."""
    served_name: str = ""
    """The name that requests give the model."""

    def checking(self) -> Generator[None, None, None]:
        """Refuse what can be refused before a driver or the cache is asked, in small steps.

        Raises:
            InvalidRequest: the text says what to change.
        """
        if problem := self.namespace.problem():
            raise InvalidRequest(problem)
        if not self.instance:
            raise InvalidRequest("instance is empty: name the engine deployment")
        for name, text in (("instance", self.instance), ("device", self.device), ("served_name", self.served_name)):
            if problem := text_problem(name, text):
                raise InvalidRequest(problem)
        if not 0 <= self.rank < self.world_size:
            raise InvalidRequest(f"rank {self.rank} is outside world_size {self.world_size}")
        if not self.groups:
            raise InvalidRequest("no KV cache group is registered: a rank needs at least one")
        if len(self.event_handles) > MAX_EVENTS:
            raise InvalidRequest(f"a ring of {len(self.event_handles)} events is longer than {MAX_EVENTS}")
        named = set[int]()
        for number, allocation in enumerate(self.allocations):
            if isinstance(allocation, RangesAllocation):
                if problem := _ranges_problem(allocation):
                    raise InvalidRequest(f"allocation {number}: {problem}")
                named.update(allocation.fd_indexes)
        if len(named) < sum(len(each.fd_indexes) for each in self.allocations if isinstance(each, RangesAllocation)):
            raise InvalidRequest("one descriptor of physical memory is named twice: it would be mapped at two places")
        yield
        sizes = [allocation.size for allocation in self.allocations]
        seen: set[int] = set()
        rows = 0
        for layout in self.groups:
            if layout.group in seen:
                raise InvalidRequest(f"group {layout.group} is registered twice")
            seen.add(layout.group)
            if layout.num_shards > MAX_SHARDS:
                raise InvalidRequest(f"group {layout.group}: num_shards {layout.num_shards} is more than {MAX_SHARDS}")
            if not 0 <= layout.shard < layout.num_shards:
                raise InvalidRequest(
                    f"group {layout.group}: shard {layout.shard} is outside num_shards {layout.num_shards}"
                )
            yield from checking_regions(layout, sizes)
            rows += sum([region.num_rows for region in layout.regions])
            if rows > MAX_ROWS:
                raise InvalidRequest(f"the regions of all groups have more than {MAX_ROWS} rows together")
            yield


def checking_aliases(registration: RankRegistration, keys: Sequence[bytes]) -> Generator[None, None, None]:
    """Refuse regions of a group that overlap because two allocations are the same memory, in small steps.

    Args:
        keys: each allocation's `Imported.key`.

    Raises:
        InvalidRequest: see `checking_regions`.
    """
    if len(set(keys)) == len(keys):
        return
    first: dict[bytes, int] = {}
    largest: dict[bytes, int] = {}
    for number, (key, allocation) in enumerate(zip(keys, registration.allocations, strict=True)):
        first.setdefault(key, number)
        largest[key] = max(largest.get(key, 0), allocation.size)
    sizes = [largest[key] for key in keys]
    for layout in registration.groups:
        regions = tuple(replace(region, allocation=first[keys[region.allocation]]) for region in layout.regions)
        yield from checking_regions(replace(layout, regions=regions), sizes)
        yield


def _ranges_problem(allocation: RangesAllocation) -> str:
    """Why the ranges cannot be right; empty if they can."""
    if len(allocation.fd_indexes) != len(allocation.sizes):
        return f"{len(allocation.fd_indexes)} descriptors but {len(allocation.sizes)} sizes of ranges"
    if not allocation.sizes or not all(0 < each <= MAX_RANGE_BYTES for each in allocation.sizes):
        return f"it needs at least one range, and each has 1 to {MAX_RANGE_BYTES} bytes"
    return ""
