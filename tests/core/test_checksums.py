from __future__ import annotations

import numpy as np
import pytest

from kvsidecar.core.checksums import SAMPLE, Checksums
from kvsidecar.types import Verify


def test_a_flipped_bit_is_found_and_an_untouched_slot_is_not() -> None:
    pool = np.random.default_rng(1).integers(0, 256, 4 * 4096, np.uint8)
    checksums = Checksums(Verify.ALWAYS, lambda: pool)
    checksums.take([0, 4096, 8192], 4000)
    assert checksums.wrong([0, 4096, 8192], 4000) == []
    pool[4096 + 3999] ^= 1
    assert checksums.wrong([0, 4096, 8192], 4000) == [4096]


def test_bytes_behind_the_shard_do_not_count() -> None:
    pool = np.zeros(4096, np.uint8)
    checksums = Checksums(Verify.ALWAYS, lambda: pool)
    checksums.take([0], 4000)
    pool[4000] = 1
    assert checksums.wrong([0], 4000) == []


def test_a_slot_that_was_filled_anew_has_the_new_checksum() -> None:
    pool = np.zeros(4096, np.uint8)
    checksums = Checksums(Verify.ALWAYS, lambda: pool)
    checksums.take([0], 4096)
    pool[:] = 7
    checksums.take([0], 4096)
    assert checksums.wrong([0], 4096) == []


@pytest.mark.parametrize(("verify", "share"), [(Verify.OFF, 0.0), (Verify.SAMPLE, 1 / SAMPLE), (Verify.ALWAYS, 1.0)])
def test_the_share_of_blocks_that_is_checked(verify: Verify, share: float) -> None:
    hashes = [bytes([0, byte]) for byte in range(256)]
    checksums = Checksums(verify, lambda: np.zeros(0, np.uint8))
    assert sum(map(checksums.chosen, hashes)) / 256 == share
