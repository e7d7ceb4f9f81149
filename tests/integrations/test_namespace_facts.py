"""Options count by their value, and where it cannot be told, the engine is alone."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from kvsidecar.integrations.namespace_facts import NamespaceFacts, NotComparable, canonical, sources


class Color(Enum):
    RED = 1


@dataclass
class Options:
    a: int = 1
    b: Any = None


def compiled(source: str, **globals_: Any) -> FunctionType:
    """A function as a worker gets it that somebody's script has defined: no file has it under its name."""
    scope: dict[str, Any] = {"__name__": "__main__", **globals_}
    exec(source, scope)
    found = scope["f"]
    assert isinstance(found, FunctionType)
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, "1"),
        (None, "None"),
        (True, "True"),
        ("a", b"a"),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({1: "a"}, {"1": "a"}),
        ({1, 2}, {1, 3}),
        (Color.RED, 1),
        (Options(1), Options(2)),
        (Options(b=Options(1)), Options(b=Options(2))),
        (SimpleNamespace(a=1), Options(1)),
        (Options, Color),
        (len, max),
        (logging.getLogger("a"), logging.getLogger("b")),
        (functools.partial(compiled("def f(c): return c"), 1), functools.partial(compiled("def f(c): return c"), 2)),
    ],
)
def test_values_that_differ_are_told_apart(one: Any, other: Any) -> None:
    assert canonical(one) != canonical(other)
    assert canonical(one) == canonical(one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(c): return c + 1", "def f(c): return c + 2"),
        ("def f(c): return c.a", "def f(c): return c.b"),
        ("def f(c, d=1): return c", "def f(c, d=2): return c"),
        ("def f(c):\n  def g(): return 1\n  return g", "def f(c):\n  def g(): return 2\n  return g"),
        ("def h(c): return 1\ndef f(c): return h(c)", "def h(c): return 2\ndef f(c): return h(c)"),
        ("A = 1\ndef f(c): return c * A", "A = 2\ndef f(c): return c * A"),
        ("def h(x):\n  return lambda c: x\nf = h(1)", "def h(x):\n  return lambda c: x\nf = h(2)"),
    ],
)
def test_functions_count_by_what_they_do_not_by_their_name(one: str, other: str) -> None:
    assert canonical(compiled(one)) != canonical(compiled(other))
    assert canonical(compiled(one)) == canonical(compiled("# another file\n\n" + one))


def test_functions_that_call_each_other_are_told() -> None:
    calls = "def g(c): return f(c)\ndef f(c): return g(c)"
    assert canonical(compiled(calls)) == canonical(compiled(calls))


def module_of(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("plugin_of_a_user", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plugin_of_a_user", module)
    spec.loader.exec_module(module)
    return module


def test_what_has_a_file_counts_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for text in ("A = 1", "A = 1", "A = 2"):
        text += "\nclass C:\n  def m(self): return A\ndef f(c): return print(unknown)\n"
        module = module_of(tmp_path, text, monkeypatch)
        found.append([canonical(module.f), canonical(module.C), canonical(module.C.m)])
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))


@pytest.mark.parametrize(
    "make",
    [
        object,
        lambda: compiled("def f(c): return a", a=object()),
        lambda: compiled("f = lambda c, d=[object()]: c"),
        lambda: type("Local", (), {}),
        lambda: SimpleNamespace(deep={"x": [object()]}),
        lambda: functools.reduce(lambda inner, _: [inner], range(100), []),
        lambda: "x".join,
        lambda: (each for each in ()),
    ],
)
def test_what_cannot_be_told_makes_an_engine_private_and_is_named(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NotComparable):
        canonical(make())
    digests = []
    for private in ("one", "one", "other"):
        facts = NamespaceFacts(private)
        facts.add("model_config.hf_overrides", make())
        digests.append(facts.digest())
    assert digests[0] == digests[1] != digests[2], "the ranks of one engine share, and nobody else"
    assert "model_config.hf_overrides" in caplog.text


def test_files_count_by_their_content_wherever_they_are(tmp_path: Path) -> None:
    for name, text in (("one", "1"), ("copy", "1"), ("other", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scales.json").write_text(text)
    one, copy, other = ({"path": str(tmp_path / name / "scales.json")} for name in ("one", "copy", "other"))
    assert canonical(one) == canonical(copy) != canonical(other)
    assert canonical(Path(one["path"])) == canonical(one["path"])
    assert canonical(str(tmp_path / "gone")) == str(tmp_path / "gone")
    assert "scales" not in str(canonical(one))


def test_a_relative_path_is_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for text in ("1", "2"):
        Path("scales.json").write_text(text)
        found.append(canonical("scales.json"))
    assert found[0] != found[1]
    assert canonical("org/model") == "org/model"


def test_a_file_that_cannot_be_read_makes_an_engine_private(tmp_path: Path) -> None:
    (tmp_path / "scales.safetensors").symlink_to("/proc/self/mem")
    with pytest.raises(NotComparable):
        canonical(str(tmp_path / "scales.safetensors"))


class Configuration:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


def test_a_models_configuration_counts_without_where_it_comes_from() -> None:
    one = Configuration(rope_theta=1.0, text_config={"_name_or_path": "/a", "layers": [1]}, _name_or_path="/a")
    copy = Configuration(rope_theta=1.0, text_config={"_name_or_path": "/b", "layers": [1]}, _name_or_path="/b")
    other = Configuration(rope_theta=1.0, text_config={"_name_or_path": "/a", "layers": [2]}, _name_or_path="/a")
    assert canonical(one) == canonical(copy) != canonical(other)


def test_classes_that_a_text_names_count_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for text in ("class C: ...", "class C: ...", "class C:\n  a = 1"):
        module_of(tmp_path, text, monkeypatch)
        found.append([sources("plugin_of_a_user.C"), sources({"Llama": "plugin_of_a_user:C"})])
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))
    assert sources({"Llama": "not_loaded:C"}) == {"Llama": None}
