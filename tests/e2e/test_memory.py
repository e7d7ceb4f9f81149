"""The daemon's own memory: what engines and namespaces cost it is back when they have gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvsidecar.client import Blocks
from tests.e2e.leftovers import rss_mib
from tests.harness import NAMESPACE, NUM_BLOCKS, DaemonProcess, Rank, done, eventually, hashes, layout
from tests.marks import lent_daemon

pytestmark = lent_daemon

ALLOWANCE_MIB = 16
"""For what allocators keep for themselves. What these tests were written against took ten times as much of each."""
MANY = 64


def grows_by(daemon: DaemonProcess, one_round: Callable[[], None], rounds: int) -> float:
    """MiB by which the daemon grows in so many rounds, after half as many that let it warm up."""
    for _ in range(rounds // 2):
        one_round()
    before = rss_mib(daemon)
    for _ in range(rounds):
        one_round()
    return rss_mib(daemon) - before


def store_into(daemon: DaemonProcess, numbers: range) -> None:
    """Some blocks in each of these namespaces; nobody is attached afterwards."""
    for number in numbers:
        rank = Rank(daemon, namespace=dataclasses.replace(NAMESPACE, extra=f"{number}"))
        done(rank.store("a", "b"))
        rank.close()
    eventually(lambda: not daemon.metric("kvsidecar_attached_ranks"))


def test_ranks_that_attach_and_store_nothing_leave_nothing(daemon: DaemonProcess) -> None:
    assert grows_by(daemon, lambda: Rank(daemon).close(), 200) < ALLOWANCE_MIB


def test_namespaces_that_are_stored_into_and_cleared_leave_nothing(daemon: DaemonProcess) -> None:
    with daemon.client() as operator:

        def one_round() -> None:
            store_into(daemon, range(MANY // 4))
            operator.clear()
            assert not operator.status().namespaces

        assert grows_by(daemon, one_round, 12) < ALLOWANCE_MIB


def test_namespaces_that_were_never_there_before_leave_nothing_either(daemon: DaemonProcess) -> None:
    """As of engines whose `extra` changes with every start. Nobody clears them: their blocks are evicted."""
    seen = iter(range(1_000_000))

    def one_round() -> None:
        first = next(seen) * MANY
        store_into(daemon, range(first, first + MANY))

    assert grows_by(daemon, one_round, 4) < ALLOWANCE_MIB
    assert daemon.metric("kvsidecar_evicted_blocks_total") > 4 * MANY


def test_a_namespace_costs_little_more_than_its_blocks(daemon: DaemonProcess) -> None:
    store_into(daemon, range(1))
    before = rss_mib(daemon)
    store_into(daemon, range(1, MANY))
    assert rss_mib(daemon) - before < MANY * 64 / 1024  # KiB each
    with daemon.client() as client:
        assert len(client.status().namespaces) > MANY // 2


def test_stores_that_find_no_room_leave_nothing(daemon: DaemonProcess) -> None:
    """Each names more blocks than the pool has room for, in a namespace that has a few."""
    rounds = iter(range(1_000_000))
    many = layout(num_blocks=20_000, layers=1, row_bytes=64)

    def one_round() -> None:
        number = next(rounds)
        rank = Rank(daemon, namespace=dataclasses.replace(NAMESPACE, extra=f"{number}"), groups=many)
        done(rank.store("a"))
        names = hashes(*range(20_000))
        refused = rank.finish(rank.client.store([Blocks(0, names, list(range(20_000)))]))
        assert refused.reason == "pool_full"
        rank.close()

    assert grows_by(daemon, one_round, 2 * NUM_BLOCKS) < ALLOWANCE_MIB
