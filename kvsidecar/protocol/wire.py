"""Converts between protobuf messages and `kvsidecar.types`, for the daemon and its clients."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import TYPE_CHECKING

from kvsidecar.types import GroupLayout, LookupMode, Namespace, Outcome, Readiness, Region, Residency, State
from kvsidecar.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

STATE_TO_WIRE = {state: getattr(pb.Readiness, f"STATE_{state.name}") for state in State}
STATE_FROM_WIRE = {wire: state for state, wire in STATE_TO_WIRE.items()}
OUTCOME_TO_WIRE = {outcome: getattr(pb.JobDone, f"OUTCOME_{outcome.name}") for outcome in Outcome}
OUTCOME_FROM_WIRE = {wire: outcome for outcome, wire in OUTCOME_TO_WIRE.items()}
MODE_TO_WIRE = {mode: getattr(pb.LookupRequest, f"MODE_{mode.name}") for mode in LookupMode}
RESIDENCY_TO_WIRE = {kind: getattr(pb.ResidencyChange, f"KIND_{kind.name}") for kind in Residency if kind.is_change}
RESIDENCY_FROM_WIRE = {wire: kind for kind, wire in RESIDENCY_TO_WIRE.items()}
MODE_FROM_WIRE = {wire: mode for mode, wire in MODE_TO_WIRE.items()}

# These types and their messages have the same fields.
_NAMESPACE_FIELDS = tuple(field.name for field in fields(Namespace))
_REGION_FIELDS = tuple(field.name for field in fields(Region))
_namespace_values = attrgetter(*_NAMESPACE_FIELDS)
_region_values = attrgetter(*_REGION_FIELDS)


def namespace_to_wire(namespace: Namespace) -> pb.Namespace:
    return pb.Namespace(**dict(zip(_NAMESPACE_FIELDS, _namespace_values(namespace), strict=True)))


def namespace_from_wire(message: pb.Namespace) -> Namespace:
    return Namespace(*_namespace_values(message))


def layout_to_wire(layout: GroupLayout) -> pb.Group:
    regions = [pb.Region(**dict(zip(_REGION_FIELDS, _region_values(each), strict=True))) for each in layout.regions]
    return pb.Group(
        group=layout.group,
        num_blocks=layout.num_blocks,
        shard=layout.shard,
        num_shards=layout.num_shards,
        regions=regions,
        slices=layout.slices,
    )


def region_from_wire(message: pb.Region) -> Region:
    return Region(*_region_values(message))


def readiness_to_wire(readiness: Readiness) -> pb.Readiness:
    return pb.Readiness(**asdict(readiness) | {"state": STATE_TO_WIRE[readiness.state]})


def readiness_from_wire(message: pb.Readiness) -> Readiness:
    return Readiness(
        state=STATE_FROM_WIRE.get(message.state, State.STARTING),
        pool_bytes=message.pool_bytes,
        pinned_bytes=message.pinned_bytes,
        pin_bytes_per_second=message.pin_bytes_per_second,
        eta_seconds=message.eta_seconds if message.HasField("eta_seconds") else None,
        reason=message.reason,
        serves_kept=message.serves_kept,
    )


def pack_hashes(hashes: bytes | Sequence[bytes]) -> bytes:
    """Concatenate block hashes. Bytes are returned unchanged."""
    return hashes if isinstance(hashes, bytes) else b"".join(hashes)


def pack_ids(ids: bytes | Sequence[int] | npt.NDArray[np.int64]) -> bytes:
    """Pack block ids as little-endian int64. Bytes are returned unchanged.

    Raises:
        TypeError, OverflowError: these are not 64-bit integers.
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
        return struct.pack(f"<{len(ids)}q", *ids)  # takes half the time of an array
    except (struct.error, TypeError):
        return array("q", ids).tobytes()  # raises an error that names the wrong type
