"""Between the client's data and the wire's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice

import grpc

from kvsidecar.client.buffers import KVBuffers
from kvsidecar.client.ledger import Job
from kvsidecar.client.results import GroupHits, JobDone, LookupResult, Readiness
from kvsidecar.errors import ClientError
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.protocol.wire import (
    MODE_TO_WIRE,
    OUTCOME_FROM_WIRE,
    STATE_FROM_WIRE,
    layout_to_wire,
    namespace_to_wire,
    pack_hashes,
    pack_ids,
)
from kvsidecar.types import PROTOCOL, Direction, GroupLayout, LookupMode, Namespace, Outcome, State
from kvsidecar.v1 import sidecar_pb2 as pb

FIELDS_BYTES = 64
"""More than the numbers of a job, or the number of a group, take in a message."""
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 1024
"""Without what a carrier adds. A larger message would cost the whole stream, with every job on it."""


MAX_MILLISECONDS = 2**32 - 1
"""The longest time on the wire: 49 days."""


def milliseconds(name: str, seconds: float) -> int:
    """As the wire has it; what is too long for that is as long as that may be.

    Args:
        name: of the argument, for the error.

    Raises:
        ValueError: it is negative, or no number.
    """
    if not seconds >= 0:
        raise ValueError(f"{name} is {seconds}: it must be a number of seconds that is not negative")
    return int(min(seconds * 1000, MAX_MILLISECONDS))


class CarrierError(Exception):
    """A message was refused or not answered; the same whatever carries it."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


UNANSWERED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
"""Codes of a `CarrierError` that the daemon has not said."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What one rank says of itself at Attach, as often as it must: every run of the daemon is told the same."""

    instance: str
    namespace: Namespace
    buffers: KVBuffers
    groups: tuple[GroupLayout, ...]
    rank: int
    world_size: int
    event_handles: tuple[bytes, ...] = ()

    @property
    def fds(self) -> list[int]:
        """Memfds that the attach socket has to carry before the message is understood."""
        return [allocation.fd for allocation in self.buffers.allocations if allocation.fd is not None]

    def message(self, token: bytes) -> pb.Register:
        """The message for the daemon that answered the Hello with this token."""
        register = pb.Register(
            protocol=PROTOCOL,
            token=token,
            instance=self.instance,
            namespace=namespace_to_wire(self.namespace),
            rank=self.rank,
            world_size=self.world_size,
            device=self.buffers.device,
            groups=[layout_to_wire(layout) for layout in self.groups],
            event_handles=self.event_handles,
        )
        fds = self.fds
        for allocation in self.buffers.allocations:
            if allocation.fd is not None:
                register.allocations.add(fd_index=fds.index(allocation.fd), size=allocation.size)
            else:
                register.allocations.add(cuda_ipc_handle=allocation.cuda_ipc_handle, size=allocation.size)
        return register


def fill_job(job: Job, message: pb.AttachRequest, now: float) -> int:
    """Make a job into a message. Returns the most bytes that this can have: to ask it takes as long as to serialize it.

    Args:
        now: monotonic seconds, before the job's deadline.

    Raises:
        TypeError, ValueError, OverflowError: the blocks are not what they should be.
    """
    request: pb.Store | pb.Load
    if job.direction is Direction.STORE:
        request = message.store
        request.event = job.event
    else:
        request = message.load
        request.lease = job.lease
    request.job = job.number
    if job.deadline is not None:
        # 0 on the wire means no deadline.
        request.deadline_ms = max(1, milliseconds("timeout", job.deadline - now))
    nbytes = FIELDS_BYTES
    if job.traceparent:
        request.traceparent = job.traceparent
        nbytes += len(job.traceparent)
    for each in job.blocks:
        hashes, block_ids = pack_hashes(each.hashes), pack_ids(each.block_ids)
        request.blocks.add(group=each.group, hashes=hashes, block_ids=block_ids)
        nbytes += len(hashes) + len(block_ids) + FIELDS_BYTES
    return nbytes


def lookup_request(
    namespace: Namespace,
    groups: Mapping[int, bytes | Sequence[bytes]],
    mode: LookupMode,
    lease_seconds: float,
    token: bytes,
) -> pb.LocalRequest:
    """The message is its ``lookup``: to put a message into another one is to copy it, hashes and all.

    Raises:
        ClientError: it is longer than the daemon takes.
        ValueError: the lease is for no such time.
    """
    start = _without_groups(
        namespace, mode, milliseconds("lease_seconds", lease_seconds), token if lease_seconds else b""
    )
    message = pb.LocalRequest.FromString(start)
    add, size = message.lookup.groups.add, len(start)  # to ask the message itself takes as long as to serialize it
    for group, hashes in groups.items():
        packed = pack_hashes(hashes)
        size += FIELDS_BYTES + len(packed)
        add(group=group, hashes=packed)
    if size > MAX_REQUEST_BYTES:
        raise ClientError(f"a request of {size} bytes is over {MAX_REQUEST_BYTES}: ask for fewer hashes at once")
    return message


def lookup_result(
    reply: pb.LookupReply, namespace: Namespace, groups: Mapping[int, bytes | Sequence[bytes]]
) -> LookupResult:
    return LookupResult(
        ready=reply.ready,
        groups={
            each.group: GroupHits(each.hits, _bits(each.bitmap, _count(groups[each.group], namespace)))
            for each in reply.groups
        },
        lease=reply.lease or None,
        lease_seconds=reply.lease_ms / 1000,
    )


def no_hits(
    namespace: Namespace, groups: Mapping[int, bytes | Sequence[bytes]], mode: LookupMode, reason: str
) -> LookupResult:
    """The answer to a lookup that the daemon did not answer."""
    misses = {
        group: GroupHits(0, (False,) * _count(hashes, namespace) if mode is LookupMode.BITMAP else ())
        for group, hashes in groups.items()
    }
    return LookupResult(ready=False, groups=misses, reason=reason)


def job_done_from(message: pb.JobDone) -> JobDone:
    return JobDone(
        job=message.job,
        outcome=OUTCOME_FROM_WIRE.get(message.outcome, Outcome.FAILED),
        reason=message.reason,
        error=message.error,
        copied_blocks=message.copied_blocks,
        skipped_blocks=message.skipped_blocks,
        nbytes=message.bytes,
        copy_seconds=message.copy_seconds,
        queue_seconds=message.queue_seconds,
    )


def readiness_from(message: pb.Readiness) -> Readiness:
    return Readiness(
        state=STATE_FROM_WIRE.get(message.state, State.STARTING),
        pool_bytes=message.pool_bytes,
        pinned_bytes=message.pinned_bytes,
        pin_bytes_per_second=message.pin_bytes_per_second,
        eta_seconds=message.eta_seconds if message.HasField("eta_seconds") else None,
        reason=message.reason,
    )


def kind_of(request: pb.LocalRequest) -> str:
    """Name of the message that is in it; of the answer, too."""
    return str(request.WhichOneof("message"))


def _count(hashes: bytes | Sequence[bytes], namespace: Namespace) -> int:
    return len(hashes) // namespace.hash_bytes if isinstance(hashes, bytes) else len(hashes)


_BITS = [tuple(bool(byte >> bit & 1) for bit in range(8)) for byte in range(256)]


def _bits(bitmap: bytes, count: int) -> tuple[bool, ...]:
    return tuple(islice(chain.from_iterable(map(_BITS.__getitem__, bitmap)), count)) if bitmap else ()


@lru_cache(maxsize=64)
def _without_groups(namespace: Namespace, mode: LookupMode, lease_ms: int, token: bytes) -> bytes:
    """The serialized request: to parse it is one call, to fill it in is one for each field."""
    space = namespace_to_wire(namespace)
    request = pb.LookupRequest(namespace=space, mode=MODE_TO_WIRE[mode], lease_ms=lease_ms, token=token)
    return pb.LocalRequest(lookup=request).SerializeToString()
