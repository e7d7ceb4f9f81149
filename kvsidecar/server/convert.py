"""Converts between protobuf messages and the daemon's types, in both directions. Makes no decisions."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from kvsidecar.core.changes import Update
from kvsidecar.core.hashes import PackedHashes
from kvsidecar.core.job import JobBlocks, JobResult
from kvsidecar.core.layout_checks import MAX_REGIONS, STEP
from kvsidecar.core.lookups import Choice
from kvsidecar.core.namespace_options import taken
from kvsidecar.core.registration import (
    MAX_ALLOCATIONS,
    MAX_GROUPS,
    Allocation,
    CudaAllocation,
    FdAllocation,
    RangesAllocation,
    RankRegistration,
)
from kvsidecar.errors import InvalidRequest
from kvsidecar.protocol.wire import (
    MODE_FROM_WIRE,
    OUTCOME_TO_WIRE,
    RESIDENCY_TO_WIRE,
    namespace_from_wire,
    region_from_wire,
)
from kvsidecar.types import MAX_DESCRIPTORS, NO_NEXT_USE, GroupLayout, LookupMode, Priority, Region
from kvsidecar.v1 import sidecar_pb2 as pb

MAX_PARTS = 512
"""Limit of the parts of one job. Each costs some microseconds; an empty part takes two bytes on the wire."""


def registration_from(message: pb.Register) -> Generator[None, None, RankRegistration]:
    """Convert a registration in small steps, see `kvsidecar.support.loop_time.LoopTime.run`.

    Raises:
        InvalidRequest: an allocation has no source, or a limit for one rank is exceeded.
    """
    regions = sum(len(group.regions) for group in message.groups)
    ranges = sum(len(each.ranges.fd_indexes) for each in message.allocations)
    for what, count, limit in (
        ("allocations", len(message.allocations), MAX_ALLOCATIONS),
        ("groups", len(message.groups), MAX_GROUPS),
        ("regions", regions, MAX_REGIONS),
        ("ranges of physical memory", ranges, MAX_DESCRIPTORS),
    ):
        if count > limit:  # before creating an object for each
            raise InvalidRequest(f"a rank with {count} {what} is over the limit of {limit}")
    allocations: list[Allocation] = []
    for index, allocation in enumerate(message.allocations):
        if index % STEP == STEP - 1:
            yield
        match allocation.WhichOneof("source"):
            case "cuda_ipc_handle":
                allocations.append(CudaAllocation(allocation.cuda_ipc_handle, allocation.size))
            case "fd_index":
                allocations.append(FdAllocation(allocation.fd_index, allocation.size))
            case "ranges":
                indexes, sizes = tuple(allocation.ranges.fd_indexes), tuple(allocation.ranges.sizes)
                allocations.append(RangesAllocation(indexes, sizes, allocation.size))
            case "own_fd":
                raise InvalidRequest(
                    f"allocation {index} names own_fd: only a gRPC stream without a token takes it; with a token, send "
                    "the descriptor with the Hello"
                )
            case _:
                raise InvalidRequest(f"allocation {index} names neither a CUDA IPC handle nor a file descriptor")
    groups: list[GroupLayout] = []
    for group in message.groups:
        found: list[Region] = []
        for region in group.regions:
            found.append(region_from_wire(region))
            if len(found) % STEP == 0:
                yield
        slices = tuple(group.slices)
        groups.append(GroupLayout(group.group, group.num_blocks, group.shard, group.num_shards, tuple(found), slices))
        yield
    return RankRegistration(
        token=message.token,
        instance=message.instance,
        namespace=namespace_from_wire(message.namespace),
        rank=message.rank,
        world_size=message.world_size,
        device=message.device,
        allocations=tuple(allocations),
        groups=tuple(groups),
        event_handles=tuple(message.event_handles),
        options=taken((each.name, each.value) for each in message.options),
        served_name=message.served_name,
    )


def ids_from(packed: bytes) -> npt.NDArray[np.int64]:
    """Raises InvalidRequest if these are not 8-byte integers."""
    if len(packed) % 8:
        raise InvalidRequest(f"{len(packed)} bytes of block ids are not a multiple of 8")
    return np.frombuffer(packed, "<i8").astype(np.int64, copy=False)


def blocks_from(messages: Collection[pb.Blocks], width: int) -> list[JobBlocks]:
    """Raises InvalidRequest for hashes of a wrong width, malformed ids, and too many parts."""
    if len(messages) > MAX_PARTS:
        raise InvalidRequest(
            f"a job of {len(messages)} parts is over the limit of {MAX_PARTS}: send one part per group"
        )
    return [
        JobBlocks(message.group, PackedHashes(message.hashes, width), ids_from(message.block_ids), message.slice)
        for message in messages
    ]


def priority_from(priority: int) -> Priority:
    """Raises InvalidRequest if there is no such priority."""
    try:
        return Priority(priority)
    except ValueError:
        raise InvalidRequest(f"priority is {priority}; it must be one of {sorted(Priority)}") from None


def mode_from(mode: int) -> LookupMode:
    """Raises InvalidRequest for an unknown mode."""
    try:
        return MODE_FROM_WIRE[mode]
    except KeyError:
        raise InvalidRequest(f"lookup mode {mode} is unknown: use MODE_PREFIX or MODE_BITMAP") from None


def pause_from(seconds: int) -> float:
    """The pause in a touch: seconds until the next use, infinity if there is none, 0 if it is not known."""
    return inf if seconds == NO_NEXT_USE else float(seconds)


def choice_from(request: pb.LookupRequest, hash_bytes: int) -> Choice:
    """The misses that the caller of a lookup wants fetched.

    Args:
        hash_bytes: width of a block hash. Bits beyond the hashes are not looked at.
    """
    wanted = []
    for group in request.groups:
        bits = np.frombuffer(group.wanted, np.uint8)[: -(-len(group.hashes) // (8 * hash_bytes))]
        wanted.append(np.unpackbits(bits, bitorder="little").tolist())
    return Choice(wanted, request.fetch_tokens)


def bitmap_to(found: Sequence[bool]) -> bytes:
    """One bit per entry, least significant bit first."""
    return np.packbits(np.frombuffer(bytes(found), np.uint8), bitorder="little").tobytes()


def job_done_to(job: int, result: JobResult) -> pb.JobDone:
    return pb.JobDone(
        job=job,
        outcome=OUTCOME_TO_WIRE[result.outcome],
        reason=result.reason.value if result.reason else "",
        error=result.error,
        copied_blocks=result.copied_blocks,
        skipped_blocks=result.skipped_blocks,
        bytes=result.nbytes,
        copy_seconds=result.copy_seconds,
        queue_seconds=result.queue_seconds,
    )


def residency_to(update: Update) -> pb.Residency:
    changes = [
        pb.ResidencyChange(kind=RESIDENCY_TO_WIRE[each.kind], group=each.group, hashes=each.hashes, notes=each.notes)
        for each in update.changes
    ]
    return pb.Residency(sequence=update.sequence, reset=update.reset, complete=update.complete, changes=changes)
