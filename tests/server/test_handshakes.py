"""Which handshakes may be under way: limited by address and in all, for so long, and the oldest give way."""

from __future__ import annotations

import pytest

from kvsidecar.server.handshakes import (
    HANDSHAKE_SECONDS,
    MAX_ALL_HANDSHAKES,
    MAX_HANDSHAKES,
    Handshakes,
    network_of,
)


def test_beyond_the_limit_of_an_address_its_oldest_gives_way() -> None:
    handshakes = Handshakes()
    others, _ = handshakes.begin("10.0.0.2")
    first, second, *rest = [handshakes.begin("10.0.0.1") for _ in range(MAX_HANDSHAKES)]
    assert not any(given_up for _, given_up in (first, second, *rest))
    handshakes.end(first[0])
    assert handshakes.begin("10.0.0.1")[1] is None, "an ended one counts"
    _, given_up = handshakes.begin("10.0.0.1")
    assert given_up is not None
    assert given_up[0] is second[0]
    assert str(given_up[1]).startswith(f"one address may have {MAX_HANDSHAKES} TLS handshakes")
    handshakes.end(second[0])  # as its task does
    assert handshakes.begin("10.0.0.1")[1] is not None, "one place was given back twice"
    assert handshakes.begin("10.0.0.2")[1] is None
    handshakes.end(others)


def test_beyond_the_limit_of_all_the_address_with_most_gives_way() -> None:
    handshakes = Handshakes()
    only, _ = handshakes.begin("10.9.9.9")
    greedy = [handshakes.begin("10.0.0.1")[0] for _ in range(MAX_HANDSHAKES)]
    for number in range(MAX_ALL_HANDSHAKES - MAX_HANDSHAKES - 1):
        assert handshakes.begin(f"10.1.{number}.1")[1] is None
    for number in range(MAX_HANDSHAKES - 1):
        _, given_up = handshakes.begin(f"10.2.{number}.1")
        assert given_up is not None
        assert given_up[0] is greedy[number]
    assert only in [each for each, _ in _late(handshakes)], "it was given up"


def _late(handshakes: Handshakes) -> list[tuple[object, object]]:
    return [each for _ in range(HANDSHAKE_SECONDS + 1) for each in handshakes.second()]


def test_after_ten_seconds_one_is_given_up_once() -> None:
    handshakes = Handshakes()
    one, _ = handshakes.begin("10.0.0.1")
    assert not [late for _ in range(HANDSHAKE_SECONDS) for late in handshakes.second()]
    ((late, why),) = handshakes.second()
    assert late is one
    assert str(why) == "a TLS handshake was not complete within 10 s"
    assert not _late(handshakes)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_what_an_address_counts_for(address: str, network: str) -> None:
    assert network_of(address) == network
