"""Chooses between the two forms of the steps of small jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvsidecar.cache import arrays, block_index, block_table, eviction_lru, slots, space_blocks, victims

MODULES = (arrays, space_blocks, block_index, eviction_lru, slots)


@contextmanager
def loops_up_to(few: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "FEW", few)
        if not few:
            patch.setattr(victims._EvictionPlan, "only_table", lambda _: None)  # a shortcut of another kind
        patch.setattr(block_table, "SPARE_ROWS", 32)  # there is less to compare
        yield
