"""Times that are none, or too long for the wire: an error that names the argument, or the longest that there is."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest

from kvsidecar.client import Blocks, Client
from tests.harness import NAMESPACE, DaemonProcess, Rank, done, hashes
from tests.marks import both_protocols, lent_daemon

pytestmark = [both_protocols, lent_daemon]

LEASES: dict[str, Callable[[Client, float], Any]] = {
    "lookup": lambda client, seconds: client.lookup(NAMESPACE, {0: hashes("a")}, lease_seconds=seconds),
    "renew_nowait": lambda client, seconds: client.renew_nowait(1, seconds),
    "renew": lambda client, seconds: client.renew(1, seconds),
}


@pytest.mark.parametrize("call", LEASES.values(), ids=LEASES)
def test_a_lease_for_no_time_is_an_error_in_words_and_an_endless_one_as_long_as_may_be(
    daemon: DaemonProcess, call: Callable[[Client, float], Any]
) -> None:
    with daemon.client() as client:
        assert client.lookup(NAMESPACE, {0: hashes("a")}).ready
        for seconds in (nan, -1.0, -inf):
            with pytest.raises(ValueError, match=f"lease_seconds is {seconds}: it must be a number of seconds"):
                call(client, seconds)
        for seconds in (inf, 1e300, 2.0**32):
            call(client, seconds)


def test_jobs_and_flushes_take_times_of_any_length_but_none_that_is_no_number(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    done(rank.store("a"))
    client = rank.client
    assert not client.flush(timeout=inf)
    for seconds in (inf, 1e300):
        rank.fill(1, seconds)
        done(rank.finish(client.store([_block(seconds)], timeout=seconds)))
    assert not client.flush(timeout=inf)
    with pytest.raises(ValueError, match="timeout is nan"):
        client.store([_block("b")], timeout=nan)
    with pytest.raises(ValueError, match="timeout is nan"):
        client.load([_block("b")], timeout=nan)
    done(rank.store("c"))
    rank.close()


def _block(name: object) -> Blocks:
    return Blocks(0, hashes(name), [1])
