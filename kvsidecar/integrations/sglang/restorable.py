"""Which prefixes can be restored, from what the daemon has of each pool. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt


def restorable(
    num_pages: int, prefix: int, windows: Mapping[int, Sequence[Sequence[bool] | npt.NDArray[np.bool_]]]
) -> list[int]:
    """Every prefix length, in pages, at which each pool has what a request needs to go on; ascending.

    Args:
        num_pages: that were looked up.
        prefix: pages from the first that the pool of full attention has.
        windows: by the number of pages at the end of a prefix that a pool needs (1 for a state): which pages it has,
            for each of its groups. A shorter prefix needs all of its pages.
    """
    lengths = np.arange(1, min(prefix, num_pages) + 1)
    good = np.ones(len(lengths), bool)
    for window, groups in windows.items():
        for found in groups:
            has = np.asarray(found[: len(lengths)], bool)
            # Length of the run of pages that ends at each page.
            last_miss = np.maximum.accumulate(np.where(has, 0, lengths))
            good &= lengths - last_miss >= np.minimum(lengths, window)
    return [int(each) for each in lengths[good]]
