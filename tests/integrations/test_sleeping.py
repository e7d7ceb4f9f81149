from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from kvsidecar.integrations.vllm.sleeping import CHUNK, StartWeights, watch  # noqa: E402


class Allocator:
    """Has vLLM's methods, of 0.32."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        self.calls.append(f"sleep {offload_tags}")

    def discard(self, tags: tuple[str, ...] | str) -> None:
        self.calls.append(f"discard {tags}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake up {tags}")


def watched() -> tuple[Any, list[str]]:
    allocator = Allocator()
    watch(allocator, lambda: allocator.calls.append("unregister"), lambda: allocator.calls.append("restore"))
    return allocator, allocator.calls


def test_the_memory_is_given_back_before_vllm_unmaps_it_and_shared_when_it_is_mapped() -> None:
    allocator, calls = watched()
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up()
    allocator.sleep(offload_tags=())  # level 2
    allocator.wake_up(["weights"])
    allocator.wake_up(tags=["kv_cache"])
    allocator.discard("weights")
    allocator.discard(("kv_cache",))
    assert calls == [
        "unregister", "sleep ('weights',)", "wake up None", "restore",
        "unregister", "sleep ()", "wake up ['weights']", "wake up ['kv_cache']", "restore",
        "discard weights", "unregister", "discard ('kv_cache',)",
    ]  # fmt: skip


def test_the_last_watch_counts() -> None:
    allocator, calls = watched()
    watch(allocator, lambda: calls.append("later"), lambda: None)
    allocator.sleep()
    assert calls == ["later", "sleep None"]


class Runner:
    """As vLLM's model runner: it has the model, and calls the connector."""

    def __init__(self, *modules: Any) -> None:
        self.model = torch.nn.Sequential(*modules)

    def register(self) -> StartWeights | None:
        return StartWeights.of_caller()


def weights_of(runner: Runner) -> StartWeights:
    weights = runner.register()
    assert weights is not None
    return weights


@pytest.fixture
def runner() -> Runner:
    torch.manual_seed(1)
    # More words than a chunk has; bytes that are no whole words; a parameter that does not begin at one.
    odd = torch.nn.Module()
    odd.register_parameter("scales", torch.nn.Parameter(torch.rand(19).half()[2:]))
    return Runner(torch.nn.Linear(1024, 2 * CHUNK // 1024 + 8), torch.nn.Linear(3, 3).bfloat16(), odd)


def test_weights_that_come_back_as_they_were_are_unchanged(runner: Runner) -> None:
    weights = weights_of(runner)
    assert weights.unchanged()
    kept = {name: parameter.clone() for name, parameter in runner.model.named_parameters()}
    with torch.no_grad():
        for parameter in runner.model.parameters():
            parameter.zero_()
        assert not weights.unchanged()  # asleep at level 2
        for name, parameter in runner.model.named_parameters():
            parameter.copy_(kept[name])
    assert weights.unchanged()


def test_any_other_weights_are_changed(runner: Runner) -> None:
    weights = weights_of(runner)
    with torch.no_grad():
        for parameter in runner.model.parameters():
            flat = parameter.view(-1)
            for at in (0, len(flat) - 1):
                old = flat[at].clone()
                flat[at] = old + 1
                assert not weights.unchanged()
                flat[at] = old
            first, last = flat[0].clone(), flat[-1].clone()
            flat[0], flat[-1] = last, first  # the same sum
            assert not weights.unchanged()
            flat[0], flat[-1] = first, last
    assert weights.unchanged()


def test_rows_of_two_chunks_that_change_places_are_changed(runner: Runner) -> None:
    weights = weights_of(runner)
    rows = runner.model[0].weight
    with torch.no_grad():
        rows.copy_(torch.roll(rows, 2 * CHUNK // 1024, 0))
    assert not weights.unchanged()


def test_a_caller_without_a_model_has_no_weights() -> None:
    assert StartWeights.of_caller() is None
