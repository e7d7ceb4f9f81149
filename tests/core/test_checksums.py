from __future__ import annotations

import numpy as np
import pytest

from kvsidecar.core.checksums import SAMPLE, Checksums
from kvsidecar.types import Verify

HASHES = [bytes([0, byte]) for byte in range(256)]
BIG = (1 << 64) - 1
"""A checksum has 64 bits, and no sign."""


@pytest.mark.parametrize(("verify", "share"), [(Verify.OFF, 0.0), (Verify.SAMPLE, 1 / SAMPLE), (Verify.ALWAYS, 1.0)])
def test_the_share_of_blocks_that_is_checked(verify: Verify, share: float) -> None:
    checksums = Checksums(verify)
    assert sum(map(checksums.chosen, HASHES)) / 256 == share
    checks = checksums.to_take([(HASHES, range(0, 256 * 8, 8), 8)])
    assert (0 if checks is None else len(checks)) / 256 == share
    if checks is None:
        return
    checksums.keep(checks, range(len(checks)))
    expected, _ = checksums.to_compare([(HASHES, range(0, 256 * 8, 8), 8)])
    assert expected is not None
    assert len(expected) / 256 == share


def test_what_was_taken_is_what_is_expected_wherever_it_comes_in_a_load() -> None:
    checksums = Checksums(Verify.ALWAYS)
    taken = checksums.to_take([(HASHES[:2], [0, 4096], 4000), (HASHES[:1], [8192], 100)])
    assert taken is not None
    assert taken[["slot", "nbytes"]].tolist() == [(0, 4000), (4096, 4000), (8192, 100)]
    checksums.keep(taken, [5, BIG, 7])
    unknown = 1 << 20
    expected, places = checksums.to_compare([(HASHES[:1], [8192], 100), (HASHES[:3], [4096, unknown, 0], 4000)])
    assert expected is not None
    assert expected.tolist() == [(8192, 100, 7), (4096, 4000, BIG), (0, 4000, 5)]
    assert places == [(0, 0), (1, 0), (1, 2)]


def test_a_slot_that_was_filled_anew_has_the_new_checksum() -> None:
    checksums = Checksums(Verify.ALWAYS)
    for value in (1, 2):
        checks = checksums.to_take([(HASHES[:1], [0], 4096)])
        assert checks is not None
        checksums.keep(checks, [value])
    expected, _ = checksums.to_compare([(HASHES[:1], [0], 4096)])
    assert expected is not None
    assert np.array_equal(expected["expected"], [2])


def test_blocks_without_checksums_ask_for_nothing() -> None:
    assert Checksums(Verify.ALWAYS).to_compare([(HASHES[:2], [0, 4096], 4000)]) == (None, [])
