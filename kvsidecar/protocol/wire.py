"""Between protobuf messages and the words of `kvsidecar.types`: shared by the daemon and its clients."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvsidecar.types import GroupLayout, LookupMode, Namespace, Outcome, Region, State
from kvsidecar.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

STATE_TO_WIRE = {
    State.STARTING: pb.Readiness.STATE_STARTING,
    State.PINNING: pb.Readiness.STATE_PINNING,
    State.READY: pb.Readiness.STATE_READY,
    State.DRAINING: pb.Readiness.STATE_DRAINING,
    State.FAILED: pb.Readiness.STATE_FAILED,
}
STATE_FROM_WIRE = {wire: state for state, wire in STATE_TO_WIRE.items()}

OUTCOME_TO_WIRE = {
    Outcome.DONE: pb.JobDone.OUTCOME_DONE,
    Outcome.DECLINED: pb.JobDone.OUTCOME_DECLINED,
    Outcome.FAILED: pb.JobDone.OUTCOME_FAILED,
}
OUTCOME_FROM_WIRE = {wire: outcome for outcome, wire in OUTCOME_TO_WIRE.items()}

MODE_TO_WIRE = {
    LookupMode.PREFIX: pb.LookupRequest.MODE_PREFIX,
    LookupMode.BITMAP: pb.LookupRequest.MODE_BITMAP,
}
MODE_FROM_WIRE = {wire: mode for mode, wire in MODE_TO_WIRE.items()}


def namespace_to_wire(namespace: Namespace) -> pb.Namespace:
    return pb.Namespace(
        model=namespace.model,
        dtype=namespace.dtype,
        kv_layout=namespace.kv_layout,
        block_size=namespace.block_size,
        tp_size=namespace.tp_size,
        pp_size=namespace.pp_size,
        hash_algorithm=namespace.hash_algorithm,
        hash_bytes=namespace.hash_bytes,
        extra=namespace.extra,
    )


def namespace_from_wire(message: pb.Namespace) -> Namespace:
    return Namespace(
        model=message.model,
        dtype=message.dtype,
        kv_layout=message.kv_layout,
        block_size=message.block_size,
        tp_size=message.tp_size,
        pp_size=message.pp_size,
        hash_algorithm=message.hash_algorithm,
        hash_bytes=message.hash_bytes,
        extra=message.extra,
    )


def layout_to_wire(layout: GroupLayout) -> pb.Group:
    return pb.Group(
        group=layout.group,
        num_blocks=layout.num_blocks,
        shard=layout.shard,
        num_shards=layout.num_shards,
        regions=[
            pb.Region(
                allocation=region.allocation,
                offset=region.offset,
                row_stride=region.row_stride,
                block_stride=region.block_stride,
                row_bytes=region.row_bytes,
                num_rows=region.num_rows,
            )
            for region in layout.regions
        ],
    )


def region_from_wire(message: pb.Region) -> Region:
    return Region(
        allocation=message.allocation,
        offset=message.offset,
        row_stride=message.row_stride,
        block_stride=message.block_stride,
        row_bytes=message.row_bytes,
        num_rows=message.num_rows,
    )


def pack_hashes(hashes: bytes | Sequence[bytes]) -> bytes:
    """Block hashes as `Blocks.hashes` has them; bytes are taken as packed already."""
    return hashes if isinstance(hashes, bytes) else b"".join(hashes)


def pack_ids(ids: bytes | Sequence[int] | npt.NDArray[np.int64]) -> bytes:
    """Block ids as `Blocks.block_ids` has them: int64, little endian. An int64 array is copied as it is, and bytes are
    taken as packed already.

    Raises:
        TypeError, OverflowError: these are no 64-bit integers.
    """
    if isinstance(ids, bytes):
        return ids
    try:
        view = memoryview(ids)  # type: ignore[arg-type]
    except TypeError:
        return _packed(ids)
    if view.format in ("q", "l") and view.itemsize == 8:
        return view.tobytes()
    return _packed(view.tolist())


def _packed(ids: Sequence[int] | npt.NDArray[np.int64]) -> bytes:
    try:
        return struct.pack(f"<{len(ids)}q", *ids)  # in half the time that an array takes
    except (struct.error, TypeError):
        return array("q", ids).tobytes()  # says what they are instead
