"""What a plan copies, all at once; a plan of given copies."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt

from kvsidecar.copier import copy_plan, recipes
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


def owner_of(constant: str) -> ModuleType:
    """The module of the plans' constant of this name, to patch it there."""
    return recipes if hasattr(recipes, constant) else copy_plan


class CopyList:
    """A plan of given copies. Implements `kvsidecar.device.base.CopyPlan`."""

    def __init__(self, copies: npt.NDArray[np.void], nbytes: int) -> None:
        self.nbytes = nbytes
        self._copies = copies
        self.rewind()

    def rewind(self) -> None:
        some = len(self._copies)
        self._calls = [CopyCall(self._copies, batched=False, nbytes=self.nbytes)] if some else []

    def take(self, chunk: int | None) -> Sequence[CopyCall]:
        calls, self._calls = self._calls, []
        return calls
