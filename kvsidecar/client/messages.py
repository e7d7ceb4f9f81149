"""Converts between the client's data and protobuf messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count, islice
from typing import TYPE_CHECKING

import grpc

from kvsidecar.client.inbox import Inbox
from kvsidecar.client.ledger import SubmittedJob
from kvsidecar.client.types import GroupHits, JobDone, LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.protocol.wire import (
    MODE_TO_WIRE,
    OUTCOME_FROM_WIRE,
    layout_to_wire,
    namespace_to_wire,
    pack_hashes,
    pack_ids,
)
from kvsidecar.types import PROTOCOL, Direction, GroupLayout, LookupMode, Namespace, Outcome
from kvsidecar.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    from kvsidecar.client.buffers import Descriptor, KVBuffers

FIELDS_BYTES = 64
"""Upper bound of what the integers of a job, or of a group, take in a message."""
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 1024
"""Leaves room for what a transport adds. A larger message would end the stream, with every job on it."""
MAX_TTL_SECONDS = MAX_MILLISECONDS = 2**32 - 1
"""The longest time that a message can hold: 49 days."""


def to_milliseconds(name: str, seconds: float) -> int:
    """Convert a time, at most `MAX_MILLISECONDS`.

    Args:
        name: the argument's name, for the error.

    Raises:
        ValueError: the time is negative or not a number.
    """
    if not seconds >= 0:
        raise ValueError(f"{name} is {seconds}: it must be a number of seconds, 0 or more")
    return int(min(seconds * 1000, MAX_MILLISECONDS))


def whole_seconds(name: str, seconds: float | None, most: int) -> int:
    """Round a time up; None becomes 0. Raises ValueError unless it is positive and at most ``most`` seconds."""
    if seconds is not None and not 0 < seconds <= most:
        raise ValueError(f"{name} is {seconds}; it must be positive, at most {most} seconds, or None")
    return math.ceil(seconds or 0)


class TransportError(Exception):
    """A message was refused or not answered. Every transport raises it with the same codes."""

    def __init__(self, code: grpc.StatusCode, text: str, *, comes_late: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.comes_late = comes_late
        """Whether the call's ``on_late`` will be called."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What one rank registers at Attach, the same with every run of the daemon."""

    instance: str
    namespace: Namespace
    buffers: KVBuffers
    groups: tuple[GroupLayout, ...]
    rank: int
    world_size: int
    event_handles: tuple[bytes, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    served_name: str = ""

    @property
    def fds(self) -> list[Descriptor]:
        """Descriptors to send over the attach socket before the message."""
        return [each for allocation in self.buffers.allocations for each in allocation.descriptors]

    def message(self, token: bytes) -> pb.AttachRequest:
        """The first message of the stream, with the token from the daemon's answer to the Hello."""
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
            options=[pb.Option(name=name, value=value) for name, value in self.options.items()],
            served_name=self.served_name,
        )
        indexes = count()
        for allocation in self.buffers.allocations:
            mine = list(islice(indexes, len(allocation.descriptors)))
            if allocation.ranges:
                ranges = pb.Ranges(fd_indexes=mine, sizes=[each.size for each in allocation.ranges])
                register.allocations.add(ranges=ranges, size=allocation.size)
            elif mine:
                register.allocations.add(fd_index=mine[0], size=allocation.size)
            else:
                register.allocations.add(cuda_ipc_handle=allocation.cuda_ipc_handle, size=allocation.size)
        return pb.AttachRequest(register=register)


@dataclass(frozen=True, slots=True)
class Watching:
    """What a watcher sends at Attach, the same with every run of the daemon."""

    namespace: Namespace
    inbox: Inbox
    fds: tuple[int, ...] = ()
    event_handles: tuple[bytes, ...] = ()

    def message(self, token: bytes) -> pb.AttachRequest:
        watch = pb.Watch(protocol=PROTOCOL, token=token, namespace=namespace_to_wire(self.namespace))
        return pb.AttachRequest(watch=watch)


def fill_job(job: SubmittedJob, message: pb.AttachRequest, now: float) -> int:
    """Write a job into a message. Returns an upper bound of its bytes: ByteSize() takes as long as to serialize it.

    Args:
        now: monotonic seconds, before the job's deadline.

    Raises:
        TypeError, ValueError, OverflowError: the blocks have invalid hashes or ids.
    """
    request: pb.Store | pb.Load
    if job.direction is Direction.STORE:
        request = message.store
        request.event = job.event
        request.ttl_seconds = job.ttl_seconds
        request.idle_ttl_seconds = job.idle_ttl_seconds
        request.priority = job.priority  # type: ignore[assignment]  # they have the same numbers
    else:
        request = message.load
        request.lease = job.lease
    request.job = job.number
    if job.deadline is not None:
        # 0 on the wire means no deadline.
        request.deadline_ms = max(1, to_milliseconds("timeout", job.deadline - now))
    nbytes = FIELDS_BYTES
    if job.traceparent:
        request.traceparent = job.traceparent
        nbytes += len(job.traceparent)
    for each in job.blocks:
        hashes, block_ids = pack_hashes(each.hashes), pack_ids(each.block_ids)
        request.blocks.add(group=each.group, hashes=hashes, block_ids=block_ids, notes=each.notes, slice=each.slice)
        nbytes += len(hashes) + len(block_ids) + len(each.notes) + FIELDS_BYTES
    return nbytes


@dataclass(slots=True)
class LookupQuery:
    """The arguments of one lookup. Makes its request, and the result from the reply."""

    namespace: Namespace
    groups: Mapping[int, bytes | Sequence[bytes]]
    """Block hashes by KV cache group, joined or apart."""
    mode: LookupMode
    lease_seconds: float = 0.0
    fetch_seconds: float = 0.0
    prefill_rate: float = 0.0
    wanted: Mapping[int, Sequence[bool]] | None = None
    """One flag per hash, by group: whether to fetch it if it is missing. None: the first misses in a row."""
    fetch_tokens: int = 0
    lease: int = 0
    """The lease of an earlier lookup, to which these hits are added; 0: a new one."""
    lease_last: Mapping[int, int] | None = None
    """How many hits of a group to lease, the last ones; all of a group that is missing here."""
    tails: Mapping[int, int] | None = None
    """How many hashes to look for in groups of which only the end of a prefix is needed."""
    touch: bool = False
    """Whether this only reports that the blocks were used."""
    pause_seconds: int = 0
    """Touches only: time until the next use; 0: not known; `kvsidecar.types.NO_NEXT_USE`: there is none."""

    @property
    def hashes(self) -> int:
        """Number of hashes that are looked for, of all groups together."""
        tails = self.tails or {}
        return sum([looked_for(self.count(group), tails.get(group)) for group in self.groups])

    def request(self, token: bytes) -> pb.LocalRequest:
        """The request, in the message's ``lookup``: nesting it later would copy it, with all hashes.

        Raises:
            ClientError: it is longer than the daemon accepts.
            ValueError: a time is negative or not a number.
        """
        lease_ms = to_milliseconds("lease_seconds", self.lease_seconds)
        start = _request_without_groups(self.namespace, self.mode, lease_ms, token if self.lease_seconds else b"")
        message = pb.LocalRequest.FromString(start)
        if self.fetch_seconds:
            message.lookup.fetch_ms = to_milliseconds("fetch_seconds", self.fetch_seconds)
            message.lookup.prefill_rate = self.prefill_rate
            message.lookup.choose, message.lookup.fetch_tokens = self.wanted is not None, self.fetch_tokens
        if self.lease and self.lease_seconds:
            message.lookup.lease = self.lease
        message.lookup.touch, message.lookup.pause_seconds = self.touch, self.pause_seconds
        wanted, lease_last, tails = self.wanted or {}, self.lease_last or {}, self.tails or {}
        shared = next(iter(self.groups.values()), None) if tails else None
        add, size = message.lookup.groups.add, len(start)  # message.ByteSize() takes as long as to serialize it
        for group, hashes in self.groups.items():
            packed = b"" if group in tails and hashes is shared else pack_hashes(hashes)
            bits = _bitmap(wanted[group]) if group in wanted else b""
            size += FIELDS_BYTES + len(packed) + len(bits)
            add(
                group=group,
                hashes=packed,
                wanted=bits,
                lease_last=lease_last.get(group, 0),
                tail=tails.get(group, 0),
            )
        if size > MAX_REQUEST_BYTES:
            raise ClientError(
                f"the lookup has {size} bytes and at most {MAX_REQUEST_BYTES} are allowed: use a shorter namespace, or "
                "look in fewer groups"
            )
        return message

    def result(self, reply: pb.LookupReply) -> LookupResult:
        def hits(group: pb.GroupHits) -> GroupHits:
            count = group.count if self.tails else self.count(group.group)
            return GroupHits(
                group.hits, _bits(group.bitmap, count), group.coming, _bits(group.held, count), group.first
            )

        return LookupResult(
            ready=reply.ready,
            groups={each.group: hits(each) for each in reply.groups},
            lease=reply.lease or None,
            lease_seconds=reply.lease_ms / 1000,
            asking=reply.asking,
        )

    def no_hits(self, reason: str) -> LookupResult:
        """The result if the daemon did not answer."""
        bitmap = self.mode is LookupMode.BITMAP
        misses = {group: GroupHits(0, (False,) * self.count(group) if bitmap else ()) for group in self.groups}
        return LookupResult(ready=False, groups=misses, reason=reason)

    def count(self, group: int) -> int:
        """Number of a group's hashes."""
        hashes = self.groups[group]
        return len(hashes) // self.namespace.hash_bytes if isinstance(hashes, bytes) else len(hashes)


def looked_for(count: int, tail: int | None) -> int:
    """How many of a group's ``count`` hashes a lookup looks for; see ``tails`` of `Client.lookup`."""
    return count if tail is None else min(count, tail + 1)


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


def method_of(request: pb.LocalRequest) -> str:
    """Name of the call: the field of a request that holds its message, and of the reply."""
    return str(request.WhichOneof("message"))


_BITS = [tuple(bool(byte >> bit & 1) for bit in range(8)) for byte in range(256)]


def _bits(bitmap: bytes, count: int) -> tuple[bool, ...]:
    return tuple(islice(chain.from_iterable(map(_BITS.__getitem__, bitmap)), count)) if bitmap else ()


def _bitmap(flags: Sequence[bool]) -> bytes:
    digits = "".join(["1" if flag else "0" for flag in reversed(flags)])
    return int(digits or "0", 2).to_bytes(-(-len(flags) // 8), "little")


def prompts_report(namespace: Namespace, needed_tokens: int, loaded_tokens: int) -> pb.LocalRequest:
    """See `Client.report_prompts_nowait`."""
    message = pb.LocalRequest.FromString(_request_without_groups(namespace, LookupMode.PREFIX, 0, b""))
    message.lookup.needed_tokens, message.lookup.loaded_tokens = needed_tokens, loaded_tokens
    return message


@lru_cache(maxsize=64)
def _request_without_groups(namespace: Namespace, mode: LookupMode, lease_ms: int, token: bytes) -> bytes:
    """The serialized request: parsing it takes one call, filling it in one for each field."""
    space = namespace_to_wire(namespace)
    request = pb.LookupRequest(namespace=space, mode=MODE_TO_WIRE[mode], lease_ms=lease_ms, token=token)
    return pb.LocalRequest(lookup=request).SerializeToString()
