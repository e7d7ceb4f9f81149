"""What was added is never denied; what was not nearly always is."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from kvsidecar.tiers.key_filter import MIN_BITS, KeyFilter, create_filter, filter_bytes, first_words
from tests.tiers.support import key, space

ONE, TWO = space().digest, space("two").digest


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_filter(0)
    yield fd
    os.close(fd)


def test_what_one_process_adds_the_other_sees(fd: int) -> None:
    writer, reader = KeyFilter(fd), KeyFilter(fd)
    names = range(2000)
    assert not any(reader.may_have(ONE, key(name)) for name in names)
    writer.add(ONE, first_words(b"".join(map(key, names)), 32))
    assert all(reader.may_have(ONE, key(name)) for name in names)


def test_many_at_once_are_told_as_one_by_one(fd: int) -> None:
    keys = KeyFilter(fd)
    keys.add(ONE, first_words(random.Random(1).randbytes(32 * MIN_BITS // 16), 32))
    names = [key(name) for name in range(5000)]
    together = keys.may_have_each(ONE, first_words(b"".join(names), 32))
    assert together.tolist() == [keys.may_have(ONE, name) for name in names]
    assert 0 < together.sum() < 5000


def test_few_others_may_be_there(fd: int) -> None:
    keys = KeyFilter(fd)
    keys.add(ONE, first_words(random.Random(1).randbytes(32 * MIN_BITS // 16), 32))
    wrong = sum(keys.may_have(ONE, key(name)) for name in range(5000))
    assert wrong < 5000 * 0.03, "two bits of sixteen a block: about 1.4 %"
    assert sum(keys.may_have(TWO, key(name)) for name in range(5000)) < 5000 * 0.03


def test_hashes_chosen_to_share_a_bit_of_one_filter_do_not_share_one_of_another(fd: int) -> None:
    (own,) = struct.unpack("<Q", ONE[:8])
    inverse = pow(KeyFilter(fd)._drawn[0], -1, 1 << 64)
    chosen = [(product * inverse % (1 << 64) ^ own).to_bytes(8, "little").ljust(32) for product in range(100)]

    def bits(fd: int) -> int:
        keys = KeyFilter(fd)
        keys.add(ONE, first_words(b"".join(chosen), 32))
        return int(np.unpackbits(keys._bytes).sum())

    other = create_filter(0)
    assert 90 < bits(fd) <= 101, "one for all, and one for each"
    assert bits(other) > 190
    os.close(other)


def test_it_begins_anew_with_what_is_there_or_denies_nothing(fd: int) -> None:
    keys = KeyFilter(fd)
    keys.add(ONE, first_words(key(1), 32))
    keys.replace([(TWO, first_words(key(2), 32))])
    assert (keys.may_have(ONE, key(1)), keys.may_have(TWO, key(2))) == (False, True)
    keys.replace(None)
    assert keys.may_have(ONE, key(99))


@pytest.mark.parametrize(("capacity", "nbytes"), [(0, 128 << 10), (1 << 40, 8 << 20), (1 << 60, 128 << 20)])
def test_its_size_follows_the_tier(capacity: int, nbytes: int) -> None:
    assert filter_bytes(capacity) == nbytes
