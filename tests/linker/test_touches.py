"""Pages of a request that has ended are used once more, when its last ones are stored."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.client import Namespace
from kvsidecar.errors import ClientError
from kvsidecar.integrations.sglang import touches
from kvsidecar.integrations.sglang.counters import RankCounters
from kvsidecar.integrations.sglang.groups import KV, MAMBA, SWA, groups_of
from kvsidecar.integrations.sglang.shared import RankState
from kvsidecar.integrations.sglang.touches import AFTER_SECONDS, PageTouches
from kvsidecar.integrations.sglang.transfers import HASH_BYTES, hashes_of
from tests.linker.transfers import keys

NAMESPACE = Namespace("m", "bf16", "sglang pages by layer", 16, 1, 1, "sglang sha256")
PAGES = 4
BYTES = PAGES * HASH_BYTES


class Told:
    """A client, and all that it was told."""

    def __init__(self) -> None:
        self.touches: list[tuple[Mapping[int, bytes], float | None]] = []
        self.reachable = True
        self.refuses = False

    def touch_nowait(self, namespace: Namespace, groups: Mapping[int, bytes], pause: float | None) -> bool:
        assert namespace == NAMESPACE
        if self.refuses:
            raise ClientError("refused")
        if self.reachable:
            self.touches.append((groups, pause))
        return self.reachable


class Ends:
    """What the tests drive."""

    def __init__(self, pools: tuple[str, ...] = (KV,), trailing: Mapping[str, int] | None = None) -> None:
        self.client, self.counters, self.now = Told(), RankCounters(), 0.0
        jobs: Any = SimpleNamespace(client=self.client)
        groups = groups_of([(pool, range(2), False) for pool in pools], 2, 1)
        shared = RankState(
            jobs, groups, NAMESPACE, lambda hashes: hashes_of(hashes)[::-1], self.counters, lambda: self.now
        )
        self.touches = PageTouches(shared, trailing or {})

    def end(self, name: object, session: str | None = None, pause: float | None = None) -> None:
        self.touches.request_ended(keys(PAGES, name), session, pause)

    def told(self) -> list[tuple[Mapping[int, bytes], float | None]]:
        """By the daemon's keys, after the time and one step for each."""
        self.now += AFTER_SECONDS
        for _ in range(10):
            self.touches.step()
        told, self.client.touches = self.client.touches, []
        return told


def of(name: object) -> bytes:
    return hashes_of(keys(PAGES, name))[::-1]


def test_a_request_is_touched_a_while_after_its_end_with_what_it_says() -> None:
    ends = Ends()
    ends.end("a", pause=5.0)
    ends.now += AFTER_SECONDS / 2
    ends.end("b")
    ends.touches.step()
    assert ends.client.touches == []
    ends.now += AFTER_SECONDS / 2
    ends.touches.step()
    ends.touches.step()
    assert ends.client.touches == [({0: of("a")}, 5.0)]
    assert ends.told() == [({0: of("a")}, 5.0), ({0: of("b")}, None)]
    assert (ends.counters.touches, ends.counters.unsent_touches) == (2, 0)


def test_a_step_touches_one_request() -> None:
    ends = Ends()
    for name in range(3):
        ends.end(name)
    ends.now += AFTER_SECONDS
    ends.touches.step()
    assert len(ends.client.touches) == 1


def test_of_windows_and_states_only_what_a_hit_needs_is_touched() -> None:
    ends = Ends((KV, SWA, MAMBA, "other"), {SWA: 2, MAMBA: 1})
    ends.end("a")
    ((groups, _),) = ends.told()
    assert [len(each) // HASH_BYTES for each in groups.values()] == [PAGES, 2, 1, PAGES]
    assert all(of("a").endswith(each) for each in groups.values())


def test_of_a_long_request_the_head_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "MAX_HASHES", 3)
    ends = Ends()
    ends.end("a")
    assert ends.told() == [({0: hashes_of(keys(3, "a"))[::-1]}, None)]


def test_nothing_is_touched_of_a_request_without_pages() -> None:
    ends = Ends()
    ends.touches.request_ended([], "s", 5.0)
    ends.touches.session_ended("s")
    assert ends.told() == []


def test_the_last_request_of_a_session_that_ends_is_not_waited_for() -> None:
    ends = Ends()
    ends.end("a", "s", 5.0)
    ends.end("b", "s", 5.0)
    ends.end("c", "other", 5.0)
    assert len(ends.told()) == 3
    ends.touches.session_ended("s")
    ends.touches.session_ended("s")
    ends.touches.session_ended("nobody's")
    assert ends.told() == [({0: of("b")}, inf)]


def test_a_session_that_ends_with_its_last_request_is_told_last() -> None:
    ends = Ends()
    ends.end("a", "s", 5.0)
    ends.touches.session_ended("s")
    assert [pause for _, pause in ends.told()] == [5.0, inf]


def test_what_waits_and_what_is_kept_of_sessions_has_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "MAX_WAITING_BYTES", 2 * BYTES)
    monkeypatch.setattr(touches, "MAX_SESSIONS_BYTES", 2 * BYTES)
    ends = Ends()
    for name in ("a", "b", "a", "c"):
        ends.end(name, f"session {name}")
    assert [groups for groups, _ in ends.told()] == [{0: of("a")}, {0: of("c")}]
    assert ends.counters.unsent_touches == 2
    ends.touches.session_ended("session b")
    assert ends.told() == [], "it was the oldest"
    for name in ("a", "c"):
        ends.touches.session_ended(f"session {name}")
    assert ends.told() == [({0: of("a")}, inf), ({0: of("c")}, inf)]
    assert (ends.touches._waiting_bytes, ends.touches._sessions_bytes) == (0, 0)


def test_what_the_daemon_does_not_hear_is_counted() -> None:
    ends = Ends()
    ends.end("a")
    ends.client.reachable = False
    assert ends.told() == []
    ends.end("b")
    ends.client.refuses = True
    assert ends.told() == []
    assert (ends.counters.touches, ends.counters.unsent_touches) == (0, 2)
