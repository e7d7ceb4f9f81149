"""The shares of the configuration: what each covers and may have, and what a mistake in one is told."""

from __future__ import annotations

import dataclasses

import pytest

from kvsidecar.cache.shares import Share
from kvsidecar.core import access, shares
from kvsidecar.core.metrics import Gauges, Metrics
from kvsidecar.core.share_metrics import SHARES_SHOWN
from kvsidecar.core.tier_metrics import TierGauges
from kvsidecar.errors import ConfigError
from kvsidecar.tiers.backend import BackendStats, ShareUse, TierShare
from kvsidecar.tiers.tier import TierCounts
from kvsidecar.types import Readiness, State
from tests.cache.support import new_cache
from tests.harness import NAMESPACE

GiB = 1 << 30
CHAT = dataclasses.replace(NAMESPACE, model="chat/llama")
BATCH = dataclasses.replace(NAMESPACE, model="batch/llama", extra="nightly")
POLICY = "[{uids=[1], namespaces=['chat/*']}, {gids=[7], namespaces=['batch/*']}, {certificates=['ops'], admin=true}]"


def limits(
    text: str, pool: int = 100 * GiB, policy: str | None = None
) -> list[tuple[str, int, int | None, list[bool]]]:
    found = shares.resolve(shares.parse(text), access.parse(policy), pool)
    return [(each.name, each.guaranteed, each.most, [each.covers(CHAT), each.covers(BATCH)]) for each in found]


def test_a_share_covers_patterns_and_has_sizes_or_parts_of_the_pool() -> None:
    text = (
        "[{name='chat', namespaces=['chat/*'], guaranteed='60%'},"
        " {name='night', namespaces=['* nightly', 'x'], guaranteed='1GiB', max='30%'}, {name='all', namespaces=['*']}]"
    )
    assert limits(text) == [
        ("chat", 60 * GiB, None, [True, False]),
        ("night", GiB, 30 * GiB, [False, True]),
        ("all", 0, None, [True, True]),
    ]


def test_a_share_has_a_maximum_of_the_disk_in_bytes_or_as_a_part_of_it() -> None:
    rules = shares.parse("[{name='a', namespaces=['a', 'b'], disk_max='25%'}, {name='c', namespaces=['c']}]")
    assert shares.resolve_disk(rules, None, 8 * GiB) == [TierShare("a", ("a", "b"), 2 * GiB)]
    later = shares.parse("[{name='c', namespaces=['c']}, {name='a', namespaces=['*'], disk_max='1GiB'}]")
    assert shares.resolve_disk(later, None, 8 * GiB) == [TierShare("c", ("c",), None), TierShare("a", ("*",), GiB)]
    assert shares.resolve_disk(shares.parse("[{name='c', namespaces=['c']}]"), None, 0) == []
    long = shares.parse(f"[{{name='a', namespaces=['{'x' * 131072}']}}, {{name='b', namespaces=['b'], disk_max=1}}]")
    with pytest.raises(ConfigError, match="the shares up to 'b', which has disk_max, have patterns of 131073 char"):
        shares.resolve_disk(long, None, GiB)
    with pytest.raises(ConfigError, match="share 'a' has disk_max, but there is no disk tier"):
        shares.resolve_disk(rules, None, 0)
    owned = shares.parse("[{name='a', uids=[1], disk_max='1GiB'}]")
    assert shares.resolve_disk(owned, access.parse(POLICY), 8 * GiB) == [TierShare("a", ("chat/*",), GiB)]


def test_a_share_is_guaranteed_bytes_or_a_part_of_the_disk() -> None:
    rules = shares.parse(
        "[{name='a', namespaces=['a'], disk_guaranteed='25%', disk_max='50%'},"
        " {name='b', namespaces=['b'], disk_guaranteed='6GiB'}, {name='c', namespaces=['c'], guaranteed='1GiB'}]"
    )
    assert shares.resolve_disk(rules, None, 8 * GiB) == [
        TierShare("a", ("a",), 4 * GiB, 2 * GiB),
        TierShare("b", ("b",), None, 6 * GiB),
    ]
    with pytest.raises(ConfigError, match=r"^the shares are guaranteed 7\.5 GiB of the disk together; it has 6 GiB$"):
        shares.resolve_disk(rules, None, 6 * GiB)
    with pytest.raises(ConfigError, match=r"^share 'a' has disk_guaranteed, but there is no disk tier"):
        shares.resolve_disk(shares.parse("[{name='a', namespaces=['a'], disk_guaranteed=1}]"), None, 0)
    more = shares.parse("[{name='a', namespaces=['a'], disk_guaranteed='2GiB', disk_max='1GiB'}]")
    with pytest.raises(ConfigError, match=r"'a' is guaranteed 2 GiB of the disk, more than its disk_max \(1 GiB\)$"):
        shares.resolve_disk(more, None, 8 * GiB)


def test_what_shares_have_of_a_tier_is_in_the_metrics_and_only_the_largest_by_name() -> None:
    use = [ShareUse(f"s{number}", number, 1, None, 0, 0) for number in range(100)]
    stats = BackendStats(100, 10, 1, 0, 0, {}, quota_blocks=5, shares=use)
    tiers = [TierGauges("disk", "", stats, TierCounts()), TierGauges("cluster", "down", None, TierCounts())]
    metrics = Metrics("host")
    metrics.read_gauges_from(lambda: Gauges(Readiness(State.READY, pool_bytes=0), new_cache(1).stats(), 0, tiers=tiers))
    lines = metrics.render().decode().splitlines()
    assert sum(line.startswith("kvsidecar_tier_share_used_bytes{") for line in lines) == SHARES_SHOWN + 1
    assert metrics.value("kvsidecar_tier_share_used_bytes", tier="disk", share="s99") == 99
    rest = 100 - SHARES_SHOWN
    assert metrics.value("kvsidecar_tier_share_used_bytes", tier="disk", share="other") == sum(range(rest))
    assert metrics.value("kvsidecar_tier_share_guaranteed_bytes", tier="disk", share="other") == rest
    assert metrics.value("kvsidecar_tier_quota_blocks_total", tier="disk") == 5
    assert metrics.value("kvsidecar_tier_quota_blocks_total", tier="cluster") == 0


def test_a_share_has_a_weight() -> None:
    rules = shares.parse("[{name='a', namespaces=['a'], weight=4}, {name='b', namespaces=['b']}]")
    assert [each.weight for each in shares.resolve(rules, None, GiB)] == [4, 1]


def test_a_share_of_an_owner_covers_what_the_policy_gives_it() -> None:
    text = "[{name='a', uids=[1]}, {name='b', gids=[7], namespaces=['x']}]"
    assert limits(text, policy=POLICY) == [("a", 0, None, [True, False]), ("b", 0, None, [False, True])]
    for owner, policy in (("uids=[2]", POLICY), ("certificates=['ops']", POLICY), ("uids=[1]", None)):
        with pytest.raises(ConfigError, match="share 'a' names owners to whom no policy rule grants a namespace"):
            limits(f"[{{name='a', {owner}}}]", policy=policy)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("3", "must be tables"),
        ("[{namespaces=['a']}]", "share 1 whose name is None"),
        ("[{name='unassigned', namespaces=['a']}]", "share 1 whose name is 'unassigned'"),
        ("[{name='other', namespaces=['a']}]", "share 1 whose name is 'other'"),
        ("[{name='a b', namespaces=['a']}]", "share 1 whose name is 'a b'"),
        ("[{name='a'}]", "share 1 that covers nothing"),
        ("[{name='a', namespaces=['a'], weight=0}]", "share 1 whose weight is 0; it must be a whole number, 1 to 100"),
        ("[{name='a', namespaces=['a'], weight=1.5}]", "share 1 whose weight is 1.5"),
        ("[{name='a', namespaces=['a'], most=3}]", "share 1 with 'most'; known are"),
        ("[{name='a', namespaces='a'}]", "share 1 whose namespaces is 'a'"),
        ("[{name='a', namespaces=['a'], max='3 apples'}]", "share 1 whose max '3 apples' is not a size"),
        ("[{name='a', namespaces=['a'], disk_guaranteed=-1}]", "share 1 whose disk_guaranteed -1 is not a size"),
        ("[{name='a', namespaces=['a']}, {name='a', namespaces=['b']}]", "two shares with the name 'a'"),
    ],
)
def test_a_mistake_in_a_share_is_told(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        shares.parse(text)


def test_guarantees_that_the_pool_cannot_keep_are_refused() -> None:
    with pytest.raises(ConfigError, match="guaranteed 101 GiB together; the pool has 100 GiB"):
        limits("[{name='a', namespaces=['a'], guaranteed='60%'}, {name='b', namespaces=['b'], guaranteed='41GiB'}]")
    with pytest.raises(ConfigError, match=r"share 'a' is guaranteed 60 GiB, more than its max \(1 GiB\)"):
        limits("[{name='a', namespaces=['a'], guaranteed='60%', max='1GiB'}]")


def test_only_the_largest_shares_have_a_label_of_their_own() -> None:
    metrics = Metrics("host")
    many = [Share(f"s{number}", guaranteed=1, most=9, used=number, evictable=number) for number in range(1000)]
    gauges = Gauges(Readiness(State.READY, pool_bytes=0), new_cache(1).stats(), 0, shares=[*many, Share()])
    metrics.read_gauges_from(lambda: gauges)
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("kvsidecar_share_used_bytes{")]
    assert len(lines) == SHARES_SHOWN + 1
    assert metrics.value("kvsidecar_share_used_bytes", share="s999") == 999
    rest = 1000 - SHARES_SHOWN
    assert metrics.value("kvsidecar_share_used_bytes", share="other") == rest * (rest - 1) / 2
    assert metrics.value("kvsidecar_share_guaranteed_bytes", share="other") == rest
    assert sum(line.startswith("kvsidecar_share_") for line in metrics.render().decode().splitlines()) < 7 * 34
