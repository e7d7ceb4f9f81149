"""Who may have how many descriptors: nobody fills the table, whoever came first."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvsidecar.errors import InvalidRequest, LimitExceeded
from kvsidecar.server import arrivals as arrivals_module
from kvsidecar.server.arrivals import CONNECTION_FDS, MAX_SHARED_FDS, TABLE_SHARE, Arrival, Arrivals
from kvsidecar.types import MAX_DESCRIPTORS

MOST = 64


@pytest.fixture
def at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hello has `MOST` descriptors at most, and a user: a process may not have as many open as the real limits."""
    assert MAX_SHARED_FDS == MAX_DESCRIPTORS
    monkeypatch.setattr(arrivals_module, "MAX_DESCRIPTORS", MOST)
    monkeypatch.setattr(arrivals_module, "MAX_SHARED_FDS", MOST)


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    near, far = socket.socketpair()
    with near, far:
        yield near


def null(count: int) -> list[int]:
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


def fill(arrivals: Arrivals, uid: int, connection: socket.socket) -> list[Arrival]:
    """As many whole connections as this user gets."""
    got = []
    while True:
        try:
            arrival = arrivals.begin(connection, uid)
        except LimitExceeded:
            return got
        arrivals.complete(arrival)
        got.append(arrival)


def test_there_is_always_room_for_one_more_user(connection: socket.socket) -> None:
    arrivals = Arrivals(table := 4000)
    shares = [len(fill(arrivals, uid, connection)) for uid in range(6)]
    room = table * TABLE_SHARE / CONNECTION_FDS
    assert shares[0] == room / 2
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] > 0
    assert sum(shares) < room


def test_the_oldest_unfinished_one_makes_room_for_the_same_user_only(connection: socket.socket) -> None:
    arrivals = Arrivals(400)  # 150 for one user
    bystander = arrivals.begin(connection, 2)
    first, second = arrivals.begin(connection, 1), arrivals.begin(connection, 1)
    old, new = null(100), null(60)
    arrivals.received(first, old)
    arrivals.received(second, new)
    assert "closed" in first.refused
    assert not any(map(is_open, old))
    assert second.refused == bystander.refused == ""
    late = null(1)
    with pytest.raises(LimitExceeded):
        arrivals.received(first, late)
    assert not is_open(late[0])
    arrivals.end(first)
    arrivals.end(second)
    assert not any(map(is_open, new))
    arrivals.end(bystander)
    assert len(fill(arrivals, 1, connection)) == 50, "all was given back, once"


@pytest.mark.usefixtures("at_most")
def test_one_hello_has_no_more_descriptors_than_a_rank_may_share(connection: socket.socket) -> None:
    arrivals = Arrivals(400)  # 150 for one user
    arrival = arrivals.begin(connection, 1)
    for _ in range(16):
        arrivals.received(arrival, null(MOST // 16))
    one_more = null(1)
    with pytest.raises(InvalidRequest, match=f"more than {MOST}"):
        arrivals.received(arrival, one_more)
    assert not is_open(one_more[0])
    arrivals.complete(arrival)
    fds = arrival.take_fds()
    arrivals.end(arrival)
    assert all(map(is_open, fds)), "whoever took them closes them"
    for fd in fds:
        os.close(fd)


@pytest.mark.usefixtures("at_most")
def test_descriptors_that_are_closed_early_make_room_for_the_next(connection: socket.socket) -> None:
    arrivals = Arrivals(400)  # 150 for one user
    first, second = arrivals.begin(connection, 1), arrivals.begin(connection, 1)
    arrivals.received(first, null(MOST - 10))
    arrivals.complete(first)
    fds = first.take_fds()
    with pytest.raises(LimitExceeded):
        arrivals.received(second, null(11))
    for fd in fds[:10]:
        os.close(fd)
    arrivals.closed(first, 10)
    arrivals.received(second, null(11))
    arrivals.end(first)
    arrivals.closed(first, 5)  # after its end nothing is counted for it
    arrivals.end(second)
    third = arrivals.begin(connection, 1)
    arrivals.received(third, null(MOST))
    arrivals.end(third)
    for fd in fds[10:]:
        os.close(fd)
