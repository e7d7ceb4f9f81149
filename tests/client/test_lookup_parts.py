"""A lookup in parts has the answer that it would have in one message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.client import LookupMode
from kvsidecar.client.lookup_parts import PART_HASHES, LookupParts
from kvsidecar.client.messages import MAX_REQUEST_BYTES, LookupQuery
from kvsidecar.client.types import GroupHits, LookupResult
from kvsidecar.errors import ClientError
from tests.harness import NAMESPACE

WIDTH = NAMESPACE.hash_bytes


class Daemon:
    """Has some of the blocks, and a slower tier has others."""

    def __init__(self, found: dict[int, list[bool]], held: dict[int, list[bool]]) -> None:
        self.found, self.held = found, held
        self.parts: list[LookupQuery] = []
        self.wanted: set[tuple[int, int]] = set()
        """Group and number of the blocks that were to be fetched."""
        self.tokens = 0

    def answer(self, query: LookupQuery) -> LookupResult:
        self.parts.append(query)
        groups = {}
        for group, hashes in query.groups.items():
            numbers = numbers_of(hashes)
            found = [self.found[group][each] for each in numbers]
            held = [self.held[group][each] and not self.found[group][each] for each in numbers]
            if query.mode is LookupMode.PREFIX:
                groups[group] = GroupHits((*found, False).index(False))
            else:
                groups[group] = GroupHits(sum(found), tuple(found), held=tuple(held) if any(held) else ())
            wanted = (query.wanted or {}).get(group, ())
            self.wanted |= {(group, number) for number, want in zip(numbers, wanted, strict=False) if want}
        self.tokens += query.fetch_tokens
        any_hits = any(each.hits for each in groups.values())
        return LookupResult(True, groups, 7 if any_hits or query.lease else None, 2.0)


def numbers_of(hashes: bytes | object) -> list[int]:
    joined = hashes if isinstance(hashes, bytes) else b"".join(hashes)  # type: ignore[call-overload]
    return [int.from_bytes(joined[i : i + WIDTH], "big") for i in range(0, len(joined), WIDTH)]


def ask(parts: LookupParts, daemon: Daemon) -> LookupResult:
    while (part := parts.next()) is not None:
        parts.take(daemon.answer(part))
    return parts.result()


flags = st.lists(st.booleans(), max_size=3 * 4)


@given(st.lists(st.tuples(flags, flags, flags), min_size=1, max_size=4), st.sampled_from(LookupMode), st.booleans())
def test_it_is_answered_as_a_whole(
    groups: list[tuple[list[bool], list[bool], list[bool]]], mode: LookupMode, joined: bool
) -> None:
    found = {index: each[0] for index, each in enumerate(groups)}
    held = {index: (each[1] + 12 * [False])[: len(each[0])] for index, each in enumerate(groups)}
    wanted = {index: (each[2] + 12 * [False])[: len(each[0])] for index, each in enumerate(groups)}
    asked = {index: [number.to_bytes(WIDTH, "big") for number in range(len(each))] for index, each in found.items()}
    query = LookupQuery(
        NAMESPACE,
        {index: b"".join(each) for index, each in asked.items()} if joined else asked,
        mode,
        lease_seconds=2.0,
        fetch_seconds=1.0,
        wanted=wanted if mode is LookupMode.BITMAP else None,
        fetch_tokens=1000,
    )
    whole = Daemon(found, held)
    expected = whole.answer(query)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsidecar.client.lookup_parts.PART_HASHES", 3)
        parted = Daemon(found, held)
        assert ask(LookupParts(query), parted) == expected
        assert all(part.hashes <= 3 for part in parted.parts)
        assert parted.wanted == whole.wanted
        assert parted.tokens <= 1000, "what is gained is not counted twice"
        hits = [part.lease for part in parted.parts]
        assert sorted(hits) == hits, "once there is a lease, all further hits are added to it"
        assert set(hits) <= {0, 7}


def test_a_prefix_is_not_asked_for_behind_its_end() -> None:
    daemon = Daemon({0: [True] * 2 + [False] + [True] * 97, 1: [True] * 5}, {0: [False] * 100, 1: [False] * 5})
    asked = {0: [number.to_bytes(WIDTH, "big") for number in range(100)], 1: [bytes(WIDTH)] * 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsidecar.client.lookup_parts.PART_HASHES", 10)
        result = ask(LookupParts(LookupQuery(NAMESPACE, asked, LookupMode.PREFIX)), daemon)
    assert [result.groups[group].hits for group in (0, 1)] == [2, 5]
    assert [part.hashes for part in daemon.parts] == [10, 5]


def test_what_follows_a_gap_is_not_fetched_unless_it_is_chosen() -> None:
    daemon = Daemon({0: [True] * 5 + [False] + [True] * 14}, {0: [False] * 20})
    asked = {0: [number.to_bytes(WIDTH, "big") for number in range(20)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsidecar.client.lookup_parts.PART_HASHES", 5)
        ask(LookupParts(LookupQuery(NAMESPACE, asked, LookupMode.BITMAP, fetch_seconds=1.0)), daemon)
    assert [part.fetch_seconds for part in daemon.parts] == [1.0, 1.0, 0.0, 0.0]


def test_a_daemon_that_declines_meanwhile_has_no_hits() -> None:
    asked = {0: bytes(WIDTH) * (PART_HASHES + 1)}
    parts = LookupParts(LookupQuery(NAMESPACE, asked, LookupMode.BITMAP, lease_seconds=2.0))
    first = parts.next()
    assert first is not None
    parts.take(LookupResult(True, {0: GroupHits(PART_HASHES, (True,) * PART_HASHES)}, 7, 2.0))
    assert parts.next() is not None
    parts.take(LookupResult(False, {0: GroupHits(0, (False,))}))
    assert parts.next() is None
    result = parts.result()
    assert (result.ready, result.groups[0].hits, len(result.groups[0].found)) == (False, 0, PART_HASHES + 1)
    assert parts.lease == 7, "it is to be released"


def test_the_largest_part_is_well_below_the_limit_of_a_message() -> None:
    assert PART_HASHES * 64 < MAX_REQUEST_BYTES / 2, "hashes have at most 64 bytes"


def test_a_lookup_with_tails_is_one_message_or_an_error() -> None:
    hashes = bytes(WIDTH * (PART_HASHES - 3))
    fits = LookupQuery(NAMESPACE, {0: hashes, 1: hashes}, LookupMode.BITMAP, tails={1: 2})
    assert LookupParts(fits).next() is fits
    request = fits.request(b"").lookup
    assert [(len(each.hashes), each.tail) for each in request.groups] == [(len(hashes), 0), (0, 2)]
    with pytest.raises(ClientError, match="looks for 8193 hashes"):
        LookupParts(LookupQuery(NAMESPACE, {0: hashes, 1: hashes}, LookupMode.BITMAP, tails={1: 3}))
