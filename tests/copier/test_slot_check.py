"""Checksums of slots, slice by slice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvsidecar.copier.messages import CHECK
from kvsidecar.copier.slot_check import SLICE_BYTES, SlotCheck

NBYTES = 4000
SLOTS = [8192, 0, 4096]


def checked(
    pool: npt.NDArray[np.uint8], expected: list[int] | None = None, slice_bytes: int = SLICE_BYTES
) -> SlotCheck:
    rows = zip(SLOTS, [NBYTES] * 3, expected or [0] * 3, strict=True)
    check = SlotCheck(pool, np.array(list(rows), CHECK))
    while check.step(slice_bytes):
        pass
    return check


@pytest.fixture
def pool() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, 4 * 4096, np.uint8)


@pytest.mark.parametrize("slice_bytes", [1, 1000, NBYTES, NBYTES + 1, 1 << 20])
def test_the_values_do_not_depend_on_the_slices(pool: npt.NDArray[np.uint8], slice_bytes: int) -> None:
    values = [xxhash.xxh3_64_intdigest(pool[slot : slot + NBYTES].tobytes()) for slot in SLOTS]
    assert checked(pool, slice_bytes=slice_bytes).values == values
    assert checked(pool, values, slice_bytes).wrong == []


def test_a_slice_is_bounded(pool: npt.NDArray[np.uint8]) -> None:
    check = SlotCheck(pool, np.array([(slot, NBYTES, 0) for slot in SLOTS], CHECK))
    steps = 1
    while check.step(1000):
        steps += 1
    assert steps == len(SLOTS) * NBYTES / 1000


def test_a_flipped_bit_is_found_and_an_untouched_slot_is_not(pool: npt.NDArray[np.uint8]) -> None:
    values = checked(pool).values
    pool[SLOTS[1] + NBYTES - 1] ^= 1
    assert checked(pool, values).wrong == [1]


def test_bytes_behind_the_shard_do_not_count(pool: npt.NDArray[np.uint8]) -> None:
    values = checked(pool).values
    pool[SLOTS[1] + NBYTES] ^= 1
    assert checked(pool, values).wrong == []
