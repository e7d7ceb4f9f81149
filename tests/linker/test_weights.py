"""Versions of weights that SGLang changes while it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.integrations.sglang.weights import Weights, holds_no_kv, watch


class Serving:
    version: str | None = "default"


def weights(token: str = "engine", start: str = "default") -> tuple[Weights, Serving]:
    serving = Serving()
    serving.version = start
    return Weights(32, lambda: serving.version, token), serving


HASHES = bytes(range(64))
DISK, TENSOR = "update_weights_from_disk", "update_weights_from_tensor"


def update(mine: Weights, serving: Serving, name: str | None = None, *, flush: bool = True) -> None:
    """As SGLang's method does it, while SGLang holds KV."""
    mine.changing(DISK)
    serving.version = name or serving.version
    if flush:
        mine.reset()
    mine.changed(lambda: flush)


def test_weights_as_started_are_shared_with_all_who_started_so() -> None:
    assert weights("a")[0].keys(HASHES) == weights("b")[0].keys(HASHES) == HASHES
    assert weights(start="v1")[0].keys(HASHES) == weights(start="v1")[0].keys(HASHES) != HASHES
    assert weights(start="v1")[0].keys(HASHES) != weights(start="v2")[0].keys(HASHES)


def test_a_flush_alone_changes_nothing() -> None:
    mine, _ = weights()
    mine.reset()
    assert (mine.keys(HASHES), mine.unnamed, mine.mixed) == (HASHES, 0, False)


def test_a_change_with_a_new_version_is_shared_under_its_name() -> None:
    keys = []
    for token in ("a", "b"):
        mine, serving = weights(token)
        mine.changing(DISK)
        assert mine.mixed, "KV of the old weights is still in the engine's cache"
        private = mine.keys(HASHES)
        assert private != HASHES
        serving.version = "step 1"
        assert mine.keys(HASHES) == private
        mine.reset()
        assert not mine.mixed
        keys.append(mine.keys(HASHES))
        assert mine.unnamed == 0
    assert keys[0] == keys[1] not in (HASHES, private)


def test_a_change_without_a_new_version_is_private() -> None:
    ranks = [weights("a"), weights("a")]
    other = weights("b")
    for each in (*ranks, other):
        update(*each)
        assert each[0].unnamed == 1
    first, second = (each[0].keys(HASHES) for each in ranks)
    assert first == second, "the ranks of one engine must agree"
    assert other[0].keys(HASHES) not in (HASHES, first)
    ranks[0][0].reset()
    assert (ranks[0][0].unnamed, ranks[0][0].keys(HASHES)) == (1, first), "a flush is no change"


@pytest.mark.parametrize("name", [None, "step 1"])
def test_the_version_of_a_change_begins_with_the_flush_whenever_that_comes(
    name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    mine, serving = weights()
    seen = [mine.keys(HASHES)]
    for _ in range(2):
        update(mine, serving, name, flush=False)
        assert mine.mixed
        seen.append(mine.keys(HASHES))
    assert len([each for each in caplog.messages if "/flush_cache" in each]) == 1
    mine.reset()
    assert not mine.mixed
    assert mine.keys(HASHES) not in seen, "what was computed meanwhile is hit after the flush"
    named, served = weights("another engine")
    update(named, served, "step 1")
    assert (mine.keys(HASHES) == named.keys(HASHES)) is (name is not None)
    seen.append(mine.keys(HASHES))
    update(mine, serving, name, flush=False)
    assert mine.mixed
    mine.reset()
    assert mine.keys(HASHES) not in seen, "each change has a version of its own"
    assert len([each for each in caplog.messages if "/flush_cache" in each]) == 2


def test_an_engine_that_was_flushed_before_a_change_needs_no_flush_after_it() -> None:
    """As trainers do it that pause the engine, flush it, and update it in several calls without a flush."""
    mine, serving = weights()
    mine.reset()
    mine.changing("begin_weight_update")
    mine.changed(lambda: True)
    for _ in range(3):
        mine.changing(TENSOR)
        serving.version = "step 1"
        mine.changed(lambda: True)
        assert mine.mixed, "further parts follow"
    mine.changing("end_weight_update")
    mine.changed(lambda: True)
    other, served = weights("other")
    update(other, served, "step 1")
    assert (mine.mixed, mine.keys(HASHES), mine.unnamed) == (False, other.keys(HASHES), 0)


@pytest.mark.parametrize("empty", [True, False])
def test_a_session_ends_the_mixture_if_nothing_was_computed_meanwhile(empty: bool) -> None:
    """A flush in a session is before its end, and SGLang may convert the weights there."""
    mine, _ = weights()
    mine.changing("begin_weight_update")
    mine.changed(lambda: True)
    mine.changing(TENSOR)
    mine.reset()
    mine.changed(lambda: True)
    assert mine.mixed
    mine.changing("end_weight_update")
    mine.changed(lambda: empty)
    assert mine.mixed is not empty
    mine.reset()
    assert not mine.mixed


def test_a_session_that_ends_without_a_begin_changes_nothing() -> None:
    mine, _ = weights()
    mine.changing("end_weight_update")
    mine.changed(lambda: False)
    assert (mine.mixed, mine.keys(HASHES)) == (False, HASHES)


def test_a_version_that_was_there_before_is_no_name() -> None:
    mine, serving = weights(start="v1")
    first = mine.keys(HASHES)
    for version in ("v2", "v1"):
        update(mine, serving, version)
    assert mine.keys(HASHES) != first
    assert mine.unnamed == 1


def test_another_name_for_the_same_weights_counts_from_the_next_flush() -> None:
    mine, serving = weights()
    serving.version = "step 1"
    assert mine.keys(HASHES) == HASHES
    mine.reset()
    named, _ = weights(start="step 1")
    assert mine.keys(HASHES) == named.keys(HASHES)


def test_updates_are_noticed_before_they_begin_and_after_they_end() -> None:
    log: list[str] = []

    class Updater:
        def update_weights_from_disk(self, request: str) -> str:
            log.append(f"update {request}")
            if request == "bad":
                raise RuntimeError(request)
            return "done"

    original = Updater.update_weights_from_disk
    updater = Updater()
    end = watch(
        Updater,
        lambda name: log.append(f"changing {name}"),
        lambda which: log.append(f"changed {which is updater}"),
    )
    assert updater.update_weights_from_disk("x") == "done"
    assert log == [f"changing {DISK}", "update x", "changed True"]
    with pytest.raises(RuntimeError, match="bad"):
        updater.update_weights_from_disk("bad")
    assert log[-1] == "changed True"
    end()
    assert Updater.update_weights_from_disk is original
    with pytest.raises(ValueError, match="no method"):
        watch(Serving, lambda _: None, lambda _: None)


def test_an_engine_holds_no_kv_if_no_page_is_taken_and_no_request_runs(caplog: pytest.LogCaptureFixture) -> None:
    def holds_none(free: int, idle: bool = True, **other: Any) -> bool:
        allocator = SimpleNamespace(size_full=70, page_size=16, available_size=lambda: free, **other)
        return holds_no_kv(SimpleNamespace(is_fully_idle=lambda ignore_waiting: idle and ignore_waiting), allocator)

    assert holds_none(64)
    assert not holds_none(48)
    assert not holds_none(64, idle=False)
    # Of two pools, the smaller one is that of windows.
    assert holds_none(16, full_available_size=lambda: 64)
    assert not holds_none(64, full_available_size=lambda: 48)
    assert not caplog.messages
    assert not holds_no_kv(SimpleNamespace(), SimpleNamespace()), "this is unknown"
    assert "is unknown whether" in caplog.text
