"""What clients say of their namespaces is bounded, and compared for people."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvsidecar.core import namespace_options
from kvsidecar.core.namespace_options import MAX_NAMED, MAX_OPTIONS, NamespaceOptions, taken
from kvsidecar.types import MAX_TEXT_BYTES, Namespace

ONE = Namespace("m", "bf16", "L", 16, 1, 1, "sha256", extra="1")
TWO = replace(ONE, extra="2")
OTHER_MODEL = replace(ONE, model="n")


def test_options_that_differ_are_named_with_what_may_be_seen_of_them() -> None:
    options = NamespaceOptions()
    options.add(ONE, {"same": "1", "length": "512", "secret": "#a", "only here": "1"}, 0)
    options.add(TWO, {"same": "1", "length": "1024", "secret": "#b", "only there": "1"}, 0)
    assert options.differences(TWO, ONE) == ["length (1024 instead of 512)", "only here", "only there", "secret"]
    assert options.differences(ONE, ONE) == []


def test_what_is_in_the_namespace_itself_needs_nobody_to_say_it() -> None:
    options = NamespaceOptions()
    assert options.differences(replace(ONE, tp_size=2, dtype="x" * 1000), ONE) == ["dtype", "tp_size (2 instead of 1)"]
    (unknown,) = options.differences(TWO, ONE)
    assert "unknown" in unknown


def test_the_first_of_a_namespace_is_told_of_another_of_its_model() -> None:
    options = NamespaceOptions()
    assert options.add(ONE, {"a": "1"}, 0) is None
    assert options.add(OTHER_MODEL, {"a": "1"}, 0) is None
    assert options.add(TWO, {"a": "2"}, 0) == ONE
    assert options.add(TWO, {"a": "2"}, 0) is None, "once"
    assert options.add(replace(ONE, extra="3"), {}, 0) is None, "it says nothing"


def test_long_texts_and_many_options_are_left_out() -> None:
    assert taken([("a", "1"), ("b" * 129, "1"), ("c", "1" * 65)]) == {"a": "1"}
    assert len(taken((str(i), "1") for i in range(2 * MAX_OPTIONS))) == MAX_OPTIONS


def test_a_text_names_a_few_options() -> None:
    options = NamespaceOptions()
    for number, namespace in enumerate((ONE, TWO)):
        options.add(namespace, {f"option {i:04}": str(number) for i in range(MAX_OPTIONS)}, 0)
    differing = options.differences(ONE, TWO)
    assert len(differing) == MAX_NAMED + 1
    assert differing[-1] == f"{MAX_OPTIONS - MAX_NAMED} more"


def test_the_oldest_of_a_user_and_then_of_all_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = len("m" + "bf16" + "L" + "sha256" + "0")
    each = namespace_options.SAID_BYTES + texts + namespace_options.OPTION_BYTES + 2
    monkeypatch.setattr(namespace_options, "MAX_BYTES_OF_USER", 2 * each)
    monkeypatch.setattr(namespace_options, "MAX_BYTES", 3 * each)
    options = NamespaceOptions()
    mine = [replace(ONE, extra=str(number)) for number in range(5)]
    others = [replace(ONE, extra="xy"[number]) for number in range(2)]
    options.add(others[0], {"a": "0"}, 2)
    for namespace in mine:
        options.add(namespace, {"a": namespace.extra}, 1)
    assert options.nbytes == 3 * each
    assert options.differences(mine[4], mine[3]) == ["a (4 instead of 3)"]
    assert options.differences(others[0], mine[4]) == ["a (0 instead of 4)"], "another user's stay"
    assert "unknown" in options.differences(mine[2], mine[3])[0]
    options.add(others[1], {"a": "1"}, 2)
    assert options.nbytes == 3 * each
    assert "unknown" in options.differences(others[0], mine[4])[0]
    for namespace in (*mine, *others):
        options.add(namespace, {"a": "1"}, 3)
    assert options.nbytes <= 3 * each


def test_namespaces_count_with_their_names_however_little_is_said_of_them() -> None:
    """One option of two letters each, and 32,000 names of 5 KiB were kept for a user."""
    options = NamespaceOptions()
    for number in range(2000):
        texts = {name: f"{number}".rjust(MAX_TEXT_BYTES, name[0]) for name in ("dtype", "kv_layout", "extra")}
        options.add(replace(ONE, **texts), {"a": "1"}, 1)  # type: ignore[arg-type]
    assert len(options._said) * 3 * MAX_TEXT_BYTES < namespace_options.MAX_BYTES_OF_USER == 4 << 20


def test_the_latest_engine_names_the_model_and_one_that_says_no_name_takes_none_away() -> None:
    options = NamespaceOptions()
    options.add(ONE, {}, 0, "old")
    options.add(ONE, {"a": "1"}, 0, "new")
    options.add(ONE, {"a": "2"}, 0)
    assert (options.served_name(ONE), options.served_name(TWO)) == ("new", "")
    options.add(TWO, {}, 0, "new")
    (unknown,) = options.differences(TWO, ONE)
    assert "unknown" in unknown, "of one whose engines said no options"


def test_a_model_has_the_name_of_its_latest_engine_in_whichever_namespace_that_is() -> None:
    options = NamespaceOptions()
    assert options.served_name_of_model("m") == ""
    options.add(ONE, {}, 0, "one")
    options.add(TWO, {}, 0, "two")
    options.add(OTHER_MODEL, {}, 0, "other")
    assert options.served_name_of_model("m") == "two"
    options.add(ONE, {"a": "1"}, 0)
    assert (options.served_name_of_model("m"), options.served_name_of_model("n")) == ("one", "other")


def test_a_model_that_is_forgotten_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_options, "MAX_BYTES_OF_USER", 4 * namespace_options.SAID_BYTES)
    options = NamespaceOptions()
    for number in range(100):
        options.add(replace(ONE, model=str(number)), {}, 1, "n")
    assert (options.served_name_of_model("0"), options.served_name_of_model("99")) == ("", "n")
    assert set(options._latest) == {each.model for each in options._said}


def test_names_count_among_what_is_kept_for_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 64 * MAX_TEXT_BYTES
    monkeypatch.setattr(namespace_options, "MAX_BYTES_OF_USER", most)
    options = NamespaceOptions()
    for number in range(100):
        options.add(replace(ONE, extra=str(number)), {}, 1, "n" * MAX_TEXT_BYTES)
    assert len(options._said) * (MAX_TEXT_BYTES + namespace_options.SAID_BYTES) < most
    assert options.served_name(replace(ONE, extra="99"))
