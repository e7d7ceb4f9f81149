"""Copies with a pitch that the driver does not take."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def split_wide(copies: npt.NDArray[np.void], max_pitch: int) -> npt.NDArray[np.void]:
    """Each pitched copy with a larger pitch than the driver takes becomes one plain copy a row.

    A pitch is the distance of two layers, and the limit (``CU_DEVICE_ATTRIBUTE_MAX_PITCH``) is 2 GiB less one byte: a
    layer-stacked KV cache of 64 GiB or more over 32 layers is beyond it.

    Args:
        copies: dtype `kvsidecar.device.base.PITCHED_COPY`; not changed.
        max_pitch: bytes.
    """
    wide = (copies["num_rows"] > 1) & (copies["device_pitch"] > max_pitch)
    if not wide.any():
        return copies
    counts = np.where(wide, copies["num_rows"], 1).astype(np.int64)
    result = np.repeat(copies, counts)
    row = (np.arange(len(result)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
    result["device_address"] += row * result["device_pitch"]
    result["host_offset"] += row * result["row_bytes"]
    result["num_rows"][np.repeat(wide, counts)] = 1
    return result
