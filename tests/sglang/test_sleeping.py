from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.integrations.sglang.sleeping import watch


def updater(enabled: bool = True) -> Any:
    class Updater:
        """Has SGLang's method and attribute."""

        memory_saver_adapter = SimpleNamespace(enabled=enabled)

        def release_memory_occupation(self, request: Any) -> str:
            calls.append("released")
            return "done"

    calls: list[str] = []
    return Updater, calls


@pytest.mark.parametrize("tags", [None, [], ["kv_cache"], ["weights", "kv_cache"]])
def test_the_daemon_gives_the_memory_back_before_sglang_releases_it(tags: list[str] | None) -> None:
    kind, calls = updater()
    end = watch(kind, lambda: calls.append("closed"))
    assert kind().release_memory_occupation(SimpleNamespace(tags=tags)) == "done"
    assert calls == ["closed", "released"]
    end()
    kind().release_memory_occupation(SimpleNamespace(tags=tags))
    assert calls == ["closed", "released", "released"]


def test_memory_that_stays_ends_no_offload() -> None:
    for kind, calls, tags in ((*updater(), ["weights"]), (*updater(enabled=False), None)):
        watch(kind, lambda: calls.append("closed"))  # noqa: B023 - called in this turn
        kind().release_memory_occupation(SimpleNamespace(tags=tags))
        assert calls == ["released"]


def test_an_sglang_without_the_method_is_left_alone() -> None:
    watch(object, lambda: None)()


def test_this_sglang_has_what_is_watched() -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    assert hasattr(SchedulerWeightUpdaterManager, "release_memory_occupation")
