"""The arguments of the driver's copy calls, built as numpy structures. Pure: addresses in, arrays out.

Sources: CUDA Driver API, "Memory Management" (cuMemcpyBatchAsync, cuMemcpy3DBatchAsync, cuMemcpy2DAsync); cuda.h for
the layout of the structures, which a test compares with the CUDA bindings'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.shapes import Direction, Shape

Addresses = NDArray[np.uint64]

SOURCE_IN_STREAM_ORDER: Final = 1
SOURCE_IN_ANY_ORDER: Final = 3
"""``CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`` and ``_ANY``: a store reads live KV, a load reads memory that nobody writes."""
_HOST, _DEVICE, _POINTER = 1, 2, 1  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE, CU_MEMCPY_OPERAND_TYPE_POINTER

ATTRIBUTES: Final = np.dtype([("order", "<u4"), ("source_hint", "<u4", 2), ("target_hint", "<u4", 2), ("flags", "<u4")])
"""``CUmemcpyAttributes``"""

COPY_2D: Final = np.dtype(
    [
        ("source_x", "<u8"),
        ("source_y", "<u8"),
        ("source_type", "<u8"),  # an int and its padding
        ("source_host", "<u8"),
        ("source_device", "<u8"),
        ("source_array", "<u8"),
        ("source_pitch", "<u8"),
        ("target_x", "<u8"),
        ("target_y", "<u8"),
        ("target_type", "<u8"),
        ("target_host", "<u8"),
        ("target_device", "<u8"),
        ("target_array", "<u8"),
        ("target_pitch", "<u8"),
        ("width", "<u8"),
        ("height", "<u8"),
    ]
)
"""``CUDA_MEMCPY2D``"""

COPY_3D: Final = np.dtype(
    [
        ("source_kind", "<u8"),  # an enumerator and its padding
        ("source", "<u8"),
        ("source_row", "<u8"),
        ("source_rows", "<u8"),
        ("source_hint", "<u8"),
        ("target_kind", "<u8"),
        ("target", "<u8"),
        ("target_row", "<u8"),
        ("target_rows", "<u8"),
        ("target_hint", "<u8"),
        ("width", "<u8"),
        ("height", "<u8"),
        ("depth", "<u8"),
        ("order", "<u4"),
        ("flags", "<u4"),
    ]
)
"""``CUDA_MEMCPY3D_BATCH_OP`` with operands of pointer type: the length of a row is its pitch in bytes."""


@dataclass(frozen=True)
class Pieces:
    """1D copies; all arrays of one length."""

    device: Addresses
    host: Addresses
    sizes: Addresses


@dataclass(frozen=True)
class Pitched:
    """2D copies of ``width`` bytes by ``height`` rows; all arrays of one length."""

    device: Addresses
    host: Addresses
    device_pitch: Addresses
    host_pitch: Addresses
    width: Addresses
    height: Addresses


def layer_pieces(
    device_rows: Addresses, host_rows: Addresses, row_bytes: int, ids: Addresses, slots: Addresses
) -> Pieces:
    """vLLM's order: layer after layer, the host side per layer too, and neighbours on both sides as one copy.

    Args:
        device_rows: address of block 0 in each row.
        host_rows: the same for slot 0.
        ids: blocks of the job; ``slots``, of equal length, says where they lie on the host.
    """
    starts, lengths = _runs(ids, slots)
    step = np.uint64(row_bytes)
    device = (device_rows[:, None] + ids[starts][None, :] * step).ravel()
    host = (host_rows[:, None] + slots[starts][None, :] * step).ravel()
    return Pieces(device, host, np.tile(lengths * step, len(device_rows)))


def slot_pieces(shape: Shape, device_rows: Addresses, host: int, ids: Addresses, slots: Addresses) -> Pieces:
    """Block after block, row after row, the rows of a slot one behind the other on the host."""
    row, block = np.uint64(shape.row_bytes), np.uint64(shape.block_bytes)
    offsets = np.arange(shape.rows, dtype=np.uint64) * row
    device = (ids[:, None] * row + device_rows[None, :]).ravel()
    hosts = (np.uint64(host) + slots[:, None] * block + offsets[None, :]).ravel()
    return Pieces(device, hosts, np.full(len(device), shape.row_bytes, np.uint64))


def pitched(shape: Shape, device_rows: Addresses, host: int, ids: Addresses, slots: Addresses) -> Pitched:
    """One copy per block where all rows lie in one allocation, else one per row and run of consecutive blocks.

    A copy cannot span two allocations: the driver refuses it.
    """
    row, block = np.uint64(shape.row_bytes), np.uint64(shape.block_bytes)
    if not shape.separate:
        pitch = int(device_rows[1] - device_rows[0]) if shape.rows > 1 else shape.row_bytes
        device = device_rows[0] + ids * row
        hosts = np.uint64(host) + slots * block
        return _pitched(device, hosts, pitch, shape.row_bytes, shape.row_bytes, np.uint64(shape.rows))
    starts, lengths = _runs(ids, slots)
    offsets = np.arange(shape.rows, dtype=np.uint64) * row
    device = (device_rows[:, None] + ids[starts][None, :] * row).ravel()
    hosts = (np.uint64(host) + offsets[:, None] + slots[starts][None, :] * block).ravel()
    heights = np.tile(lengths, shape.rows)
    return _pitched(device, hosts, shape.row_bytes, shape.block_bytes, shape.row_bytes, heights)


def attributes(direction: Direction) -> NDArray[Any]:
    """One ``CUmemcpyAttributes`` for all pieces of a batch."""
    return np.array([(_order(direction), (0, 0), (0, 0), 0)], ATTRIBUTES)


def copies_2d(plan: Pitched, direction: Direction) -> NDArray[Any]:
    """One ``CUDA_MEMCPY2D`` per copy."""
    out = np.zeros(len(plan.device), COPY_2D)
    device, host = ("source", "target") if direction == "store" else ("target", "source")
    out[f"{device}_type"], out[f"{device}_device"], out[f"{device}_pitch"] = _DEVICE, plan.device, plan.device_pitch
    out[f"{host}_type"], out[f"{host}_host"], out[f"{host}_pitch"] = _HOST, plan.host, plan.host_pitch
    out["width"], out["height"] = plan.width, plan.height
    return out


def copies_3d(plan: Pitched, direction: Direction) -> NDArray[Any]:
    """One ``CUDA_MEMCPY3D_BATCH_OP`` per copy."""
    out = np.zeros(len(plan.device), COPY_3D)
    device, host = ("source", "target") if direction == "store" else ("target", "source")
    out["source_kind"] = out["target_kind"] = _POINTER
    out[device], out[f"{device}_row"] = plan.device, plan.device_pitch
    out[host], out[f"{host}_row"] = plan.host, plan.host_pitch
    out["source_rows"] = out["target_rows"] = out["height"] = plan.height
    out["width"], out["depth"], out["order"] = plan.width, 1, _order(direction)
    return out


def _order(direction: Direction) -> int:
    return SOURCE_IN_STREAM_ORDER if direction == "store" else SOURCE_IN_ANY_ORDER


def _runs(ids: Addresses, slots: Addresses) -> tuple[NDArray[np.intp], Addresses]:
    """Where a run of blocks begins that follow each other on both sides, and how many blocks it has."""
    one = np.uint64(1)
    breaks = (ids[1:] != ids[:-1] + one) | (slots[1:] != slots[:-1] + one)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return starts, np.diff(np.append(starts, len(ids))).astype(np.uint64)


def _pitched(
    device: Addresses, host: Addresses, device_pitch: int, host_pitch: int, width: int, heights: Addresses | np.uint64
) -> Pitched:
    def same(value: int) -> Addresses:
        return np.full(len(device), value, np.uint64)

    height = np.broadcast_to(np.asarray(heights, np.uint64), device.shape)
    return Pitched(device, host, same(device_pitch), same(host_pitch), same(width), height)
