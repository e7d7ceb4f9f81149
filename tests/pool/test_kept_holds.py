"""What the next run finds of the holds of one that ended at any instant, and of damaged ones."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.cache.arrays import Words
from kvsidecar.pool import kept_holds
from kvsidecar.pool.kept_holds import MAX_HOLDS, KeptHold, KeptHolds
from tests.cache.cuts import CutMemory
from tests.cache.support import keys, namespace


def hold(name: str, *names: int, expires_at: float = 7.5) -> KeptHold:
    half = len(names) // 2
    groups = ((0, b"".join(keys(*names[:half]))), (3, b"".join(keys(*names[half:]))))
    return KeptHold(name, "uid 7", namespace("a model"), groups, expires_at)


def found(words: Words) -> dict[str, KeptHold]:
    return {each.name: each for each in KeptHolds(np.array(words, subok=False)).find()}


def words_for(pages: int) -> int:
    return 4608 + pages * 512


def test_the_next_run_finds_the_holds_and_goes_on_with_them() -> None:
    words = np.zeros(words_for(8), np.uint64)
    holds = KeptHolds(words)
    a, b, long = hold("a", 1, 2), hold("b"), hold("long", *range(500))
    assert all(holds.put(each) for each in (a, b, long))
    assert found(words) == {"a": a, "b": b, "long": long}
    assert found(words)["long"].num_blocks == 500
    holds.drop("b")
    holds.drop("b")
    again = KeptHolds(words)
    assert again.find() == [long, a]
    newer = replace(a, owner="uid 8", expires_at=9.0)
    assert again.put(newer)
    assert found(words) == {"a": newer, "long": long}
    again.drop("long")
    assert again.put(hold("c", *range(500)))
    assert set(found(words)) == {"a", "c"}


def test_what_does_not_fit_changes_nothing_and_all_room_comes_back() -> None:
    words = np.zeros(words_for(3), np.uint64)
    holds = KeptHolds(words)
    for _ in range(3):
        for name in ("a", "b", "c"):
            assert holds.put(hold(name, 1))
        before = words.copy()
        assert not holds.put(hold("d", 2)), "there is no page"
        assert not holds.put(hold("a", 2)), "nor for one that takes the place of another"
        assert (words == before).all()
        for name in ("a", "b", "c"):
            holds.drop(name)
        assert found(words) == {}
        holds = KeptHolds(words)
        holds.find()
        assert not holds.put(hold("e", *range(400)))


def test_as_many_holds_fit_as_there_may_be_and_one_of_them_can_be_replaced() -> None:
    words = np.zeros(KeptHolds.file_bytes(1 << 20) // 8, np.uint64)
    holds = KeptHolds(words)
    assert all(holds.put(hold(f"{number}", number)) for number in range(MAX_HOLDS))
    assert holds.put(hold("7", 1, 2, 3))
    assert len(found(words)) == MAX_HOLDS
    assert found(words)["7"].num_blocks == 3


@pytest.mark.parametrize("seed", range(6))
def test_at_every_instant_each_hold_is_there_that_was_and_will_be_and_whole(seed: int) -> None:
    """The run is cut off after every word that it writes."""
    rng = random.Random(seed)
    cuts: list[dict[str, KeptHold]] = []
    words = CutMemory.create(words_for(8), lambda: cuts.append(found(words)), seed)
    holds = KeptHolds(words)
    before: dict[str, KeptHold] = {}
    made = 0
    for serial in range(12):
        after, name = dict(before), rng.choice("abc")
        if rng.random() < 0.3:
            holds.drop(name)
            after.pop(name, None)
        else:
            wanted = hold(name, *range(rng.choice((0, 1, 130))), expires_at=float(serial))
            if holds.put(wanted):
                after[name] = wanted
        assert found(words) == after
        for each in cuts:
            assert before.items() & after.items() <= each.items(), "a hold is lost that nobody has touched"
            assert each.keys() >= before.keys() & after.keys(), "one that takes another's place loses it"
            assert each.items() <= before.items() | after.items(), "half a hold is found"
        made += len(cuts)
        cuts.clear()
        before = after
        if rng.random() < 0.2:
            holds = KeptHolds(words)
            holds.find()
            cuts.clear()
    assert made > 40


@given(st.integers(0, words_for(8) - 1), st.integers(0, 63), st.booleans())
def test_a_flipped_bit_loses_no_more_than_the_hold_that_it_hits(word: int, bit: int, used: bool) -> None:
    words = np.zeros(words_for(8), np.uint64)
    holds = KeptHolds(words)
    there = {each.name: each for each in (hold("a", *range(200)), hold("b", 1), hold("c", 2))}
    for each in there.values():
        holds.put(each)
    if used:  # most words are not
        at = np.flatnonzero(words)
        word = int(at[word % len(at)])
    words[word] ^= np.uint64(1 << bit)
    kept = found(words)
    assert kept.items() <= there.items()
    assert len(kept) >= 2
    again = KeptHolds(words)
    again.find()
    assert again.put(hold("d", 4))
    assert found(words) == {**kept, "d": hold("d", 4)}


@pytest.mark.parametrize("seed", range(5))
def test_garbage_is_no_hold(seed: int) -> None:
    words = np.frombuffer(bytearray(random.Random(seed).randbytes(8 * words_for(2))), np.uint64)
    holds = KeptHolds(words)
    assert holds.find() == []
    assert holds.put(hold("a", 1))
    assert set(found(words)) == {"a"}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"[]\n",
        b"null\n",
        b'["a", "b", {}, [], 1]\n',
        b'["a", "b", {"no_such": 1}, [], 1]\n',
        kept_holds._text_of(hold("a", 1, 2))[:-1],
        kept_holds._text_of(hold("a", 1, 2)) + b"x",
        kept_holds._text_of(hold("a", 1, 2)).replace(b"[0, 32]", b"[0, -32]"),
        kept_holds._text_of(hold("a", 1, 2)).replace(b"7.5", b"NaN"),
        kept_holds._text_of(hold("a", 1, 2)).replace(b'"a"', b"7"),
    ],
)
def test_a_text_that_makes_no_sense_is_no_hold(text: bytes) -> None:
    assert kept_holds._parsed(text) is None
