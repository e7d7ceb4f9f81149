from __future__ import annotations

from collections.abc import Callable, Mapping

from kvsidecar.core.labelled_counts import LABEL_CHARACTERS, MODELS_SHOWN, QUIET_SECONDS, DeviceCounts, ModelCounts
from kvsidecar.types import Direction
from tests.clock import Clock


def unsaid(model: str) -> str:
    """No engine has said a name for any model."""
    return ""


def values(
    counts: ModelCounts, used: Mapping[str, int] | None = None, served_name: Callable[[str], str] = unsaid
) -> dict[tuple[str, ...], float]:
    """Series by the name behind ``kvsidecar_model_`` and the labels' values."""
    return {
        (sample.name.removeprefix("kvsidecar_model_"), *sample.labels.values()): sample.value
        for family in counts.metrics(used or {}, served_name)
        for sample in family.samples
    }


def test_copies_and_lookups_are_counted_under_the_models_name() -> None:
    counts = ModelCounts()
    counts.copied("a", Direction.STORE, 10)
    counts.copied("a", Direction.STORE, 5)
    counts.copied("b", Direction.LOAD, 7)
    counts.looked_up("a", hits=3, misses=1)
    seen = values(counts, {"a": 100, "b": 20})
    assert seen["copies_total", "a", "store"] == 2
    assert seen["copied_bytes_total", "a", "store"] == 15
    assert seen["copied_bytes_total", "a", "load"] == 0
    assert seen["copied_bytes_total", "b", "load"] == 7
    assert (seen["lookup_blocks_total", "a", "hit"], seen["lookup_blocks_total", "a", "miss"]) == (3, 1)
    assert (seen["used_bytes", "a"], seen["used_bytes", "b"], seen["used_bytes", "other"]) == (100, 20, 0)


def test_what_engines_report_of_prompts_is_counted_under_the_models_name() -> None:
    counts = ModelCounts()
    counts.copied("a", Direction.STORE, 10)
    counts.reported("a", needed_tokens=64, loaded_tokens=48)
    counts.reported("made up", needed_tokens=16, loaded_tokens=0)
    seen = values(counts)
    assert (seen["prompt_tokens_needed_total", "a"], seen["prompt_tokens_loaded_total", "a"]) == (64, 48)
    assert (seen["prompt_tokens_needed_total", "other"], seen["prompt_tokens_loaded_total", "other"]) == (16, 0)


def test_the_first_prompts_of_an_engine_are_counted_under_its_models_name() -> None:
    counts = ModelCounts()
    counts.attached("a")
    counts.reported("a", needed_tokens=64, loaded_tokens=0)
    counts.attached("a")
    counts.copied("a", Direction.STORE, 10)
    seen = values(counts)
    assert (seen["prompt_tokens_needed_total", "a"], seen["prompt_tokens_needed_total", "other"]) == (64, 0)


def test_a_lookup_takes_no_label_because_anybody_may_name_any_model_in_it() -> None:
    counts = ModelCounts()
    for number in range(1000):
        counts.looked_up(f"made up {number}", hits=0, misses=2)
    assert {labels[1] for labels in values(counts)} == {"other"}
    assert values(counts)["lookup_blocks_total", "other", "miss"] == 2000


def test_what_has_no_label_is_counted_as_one_and_nothing_twice() -> None:
    counts = ModelCounts()
    for number in range(3 * MODELS_SHOWN):
        counts.copied(f"m{number}", Direction.STORE, 1)
    seen = values(counts, {f"m{number}": 2 for number in range(3 * MODELS_SHOWN)})
    assert len([each for each in seen if each[0] == "used_bytes"]) == MODELS_SHOWN + 1
    assert seen["copied_bytes_total", "other", "store"] == 2 * MODELS_SHOWN
    assert seen["used_bytes", "other"] == 4 * MODELS_SHOWN
    for name, total in ("copied_bytes_total", 3 * MODELS_SHOWN), ("used_bytes", 6 * MODELS_SHOWN):
        assert sum(value for labels, value in seen.items() if labels[0] == name) == total


def test_the_largest_of_those_that_were_kept_over_a_restart_have_labels() -> None:
    seen = values(ModelCounts(), {f"m{number}": number for number in range(1, 2 * MODELS_SHOWN + 1)})
    shown = {labels[1]: value for labels, value in seen.items() if labels[0] == "used_bytes"}
    assert min(value for label, value in shown.items() if label != "other") == MODELS_SHOWN + 1
    assert shown["other"] == sum(range(1, MODELS_SHOWN + 1))


def test_a_label_stays_with_its_model_until_that_was_quiet_for_long_and_another_one_needs_it() -> None:
    clock = Clock(1000.0)
    counts = ModelCounts(clock)
    for number in range(MODELS_SHOWN):
        counts.copied(f"m{number}", Direction.STORE, 1)
    clock.now += QUIET_SECONDS - 1
    for number in range(1, MODELS_SHOWN):
        counts.looked_up(f"m{number}", hits=1, misses=0)
    counts.copied("new", Direction.STORE, 1)
    assert ("used_bytes", "new") not in values(counts)
    clock.now += 1
    counts.copied("new", Direction.STORE, 1)
    counts.copied("another", Direction.STORE, 1)
    seen = values(counts)
    assert ("used_bytes", "m0") not in seen
    assert ("used_bytes", "another") not in seen, "all others were counted a second ago"
    assert seen["copies_total", "new", "store"] == 1, (
        "what was counted as another's stays there, so that that only grows"
    )
    assert seen["copies_total", "other", "store"] == 2


def test_long_names_are_cut_and_the_name_of_the_rest_is_the_rest() -> None:
    counts = ModelCounts()
    counts.copied("x" * LABEL_CHARACTERS + "1", Direction.STORE, 1)
    counts.copied("x" * LABEL_CHARACTERS + "2", Direction.STORE, 1)
    counts.copied("other", Direction.STORE, 4)
    seen = values(counts, {"x" * LABEL_CHARACTERS + "1": 8, "other": 16})
    assert seen["copied_bytes_total", "x" * LABEL_CHARACTERS, "store"] == 2
    assert seen["copied_bytes_total", "other", "store"] == 4
    assert (seen["used_bytes", "x" * LABEL_CHARACTERS], seen["used_bytes", "other"]) == (8, 16)


def test_every_model_with_a_label_has_one_name_to_join_and_none_else() -> None:
    counts = ModelCounts()
    long = "x" * LABEL_CHARACTERS
    for model in ("weights", "unsaid", long + "1"):
        counts.copied(model, Direction.STORE, 1)
    said = {"weights": "org/" + long, "without a label": "chat"}
    seen = values(counts, {"kept": 5}, lambda model: said.get(model, ""))
    named = {labels[1:]: value for labels, value in seen.items() if labels[0] == "info"}
    names = {
        "weights": ("org/" + long)[:LABEL_CHARACTERS],
        **{each: each for each in ("unsaid", long, "kept", "other")},
    }
    assert named == dict.fromkeys(names.items(), 1)
    assert {labels[1] for labels in seen} == set(names), "a join loses nothing"


def test_devices_have_all_series_from_the_start() -> None:
    counts = DeviceCounts()
    counts.of("GPU-1").copied(Direction.LOAD, 9)
    counts.of("GPU-2")
    seen = {
        (sample.name, *sample.labels.values()): sample.value for family in counts.metrics() for sample in family.samples
    }
    assert seen["kvsidecar_device_copied_bytes_total", "GPU-1", "load"] == 9
    assert seen["kvsidecar_device_copies_total", "GPU-2", "store"] == 0
    assert len(seen) == 8
