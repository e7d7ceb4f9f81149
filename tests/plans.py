"""What a plan copies, all at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvsidecar.device.base import COPY, CopyCall, CopyPlan


def calls_of(plan: CopyPlan, chunk: int | None = None) -> list[CopyCall]:
    """Every call of a plan that nobody has taken from."""
    calls: list[CopyCall] = []
    while slice_ := plan.take(chunk):
        calls += slice_
    return calls


def copies_of(plan: CopyPlan, chunk: int | None = None) -> npt.NDArray[np.void]:
    """Every copy of a plan that nobody has taken from."""
    return np.concatenate([np.zeros(0, COPY), *(call.copies for call in calls_of(plan, chunk))])
