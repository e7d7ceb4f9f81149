"""Turns an engine's options into its namespace. Engine-independent.

An option counts by its value: a file by its content, a function by its code. If a value cannot be compared, the engine
shares with no other, because a namespace that is too narrow costs hits, and one that is too wide gives wrong tokens.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import logging
import os
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsidecar.integrations.checkpoint import checkpoint_of
from kvsidecar.integrations.weights import digest_of
from kvsidecar.types import MAX_TEXT_BYTES, Namespace

_log = logging.getLogger("kvsidecar")

SERVED_CHARACTERS = MAX_TEXT_BYTES // 4
"""Longest name under which requests address a model: the daemon refuses longer texts."""
MAX_DEPTH = 32
MAX_VALUES = 100_000
"""Most values in one option. An option that is deeper or larger cannot be compared."""
SHORT_WORD = re.compile("[a-z][a-z0-9_.]{0,15}")
"""A word that is no secret: the name of a type, a method, a backend."""
NAMELESS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Fields of a model's configuration that say where it comes from, not what it is."""


class NotComparable(Exception):
    """The value of an option cannot be compared, so two of them may differ."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The namespace in which an engine shares, with the options that determine it."""

    namespace: Namespace
    options: Mapping[str, str]
    """What the namespace is made of: each option's value, or a digest of it."""
    served_name: str = ""
    """The name under which requests address the model: no part of the namespace."""


@dataclass(slots=True)
class NamespaceFacts:
    """The options of one engine that are part of its namespace.

    Args:
        private: unique to this engine, the same for all of its ranks.
    """

    private: str
    found: dict[str, Any] = field(default_factory=dict)
    not_comparable: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any) -> None:
        try:
            self.found[name] = canonical(value)
        except NotComparable:
            self.found[name] = {"private": self.private}
            self.not_comparable.append(name)

    def update(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.add(name, value)

    def digest(self) -> str:
        """The digest of all options. Logs those because of which the engine shares with no other."""
        if self.not_comparable:
            _log.warning(
                "kvsidecar: this engine shares KV with no other engine, not even with itself after a restart, because "
                "these options cannot be compared: %s. Functions can be compared if they consist of code, constants "
                "and other such functions only",
                ", ".join(self.not_comparable),
            )
        return _digest(json.dumps(self.found, sort_keys=True))

    def identity(self, model: str, served_name: str, **fields: Any) -> EngineIdentity:
        """The identity in a namespace with all options and these fields. A long name of the model becomes a digest, and
        a long name under which it is served is cut."""
        name = model if len(model) <= 200 else _digest(model)
        namespace = Namespace(name, **fields, extra=self.digest())
        options = {name: _shown(name, value) for name, value in self.found.items()}
        return EngineIdentity(namespace, options, served_name[:SERVED_CHARACTERS])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shown(name: str, value: Any) -> str:
    """An option as an operator may see it: numbers, flags and short words as they are; all else, which may be secret,
    as a digest."""
    if isinstance(value, str) and SHORT_WORD.fullmatch(value) and name.islower():
        return value
    text = json.dumps(value, sort_keys=True)
    plain = value is None or isinstance(value, (bool, int, float))
    return text if plain else f"#{_digest(text)[:12]}"


def canonical(value: Any) -> Any:
    """A JSON value that is equal in two processes exactly if the option has the same effect in both.

    Raises:
        Untold: the value cannot be compared.
    """
    try:
        return _Canonicalizer().convert_value(value)
    except NotComparable:
        raise
    except Exception as error:
        raise NotComparable from error


def _without_names(value: Any) -> Any:
    """A model's configuration (``hf_config``), without where it comes from."""
    if isinstance(value, Mapping):
        return {key: _without_names(each) for key, each in value.items() if key not in NAMELESS}
    return [_without_names(each) for each in value] if isinstance(value, (list, tuple)) else value


def _name(of: Any) -> str:
    return f"{getattr(of, '__module__', '')}.{getattr(of, '__qualname__', '')}"


def sources(value: Any) -> Any:
    """The digests of the modules with the classes or functions that a text names, or the texts in a mapping or list:
    ``module:Class`` or ``module.Class``. None for those that are not loaded."""
    if isinstance(value, Mapping):
        return {key: sources(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [sources(each) for each in value]
    name = value.partition(":")[0] if ":" in str(value) else str(value).rpartition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None)
    return None if file is None else {"content": digest_of(file)}


def _source_of(value: Any) -> str | None:
    """The digest of the file in which a class or function is, if others find it there by its name."""
    module = sys.modules.get(value.__module__)
    if module is None or module.__name__ in ("__main__", "__mp_main__"):
        return None
    found: Any = module
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not value:
        return None
    file = getattr(module, "__file__", None)
    return digest_of(file) if file is not None else "built in" if module.__name__ in sys.builtin_module_names else None


class _Canonicalizer:
    """Converts one option to JSON."""

    def __init__(self) -> None:
        self._depth, self._left = 0, MAX_VALUES
        self._functions: dict[int, int] = {}
        """Numbers of the functions that were visited, by id; functions may call each other."""

    def convert_value(self, value: Any) -> Any:
        self._left -= 1
        self._depth += 1
        if self._depth > MAX_DEPTH or self._left < 0:
            raise NotComparable
        try:
            return self._convert(value)
        finally:
            self._depth -= 1

    def _convert(self, value: Any) -> Any:
        match value:
            case enum.Enum():
                return [_name(type(value)), value.name]
            case str() | os.PathLike():
                return self._content_of(os.fspath(value))
            case None | bool() | int() | float():
                return value
            case bytes() | bytearray():
                return {"bytes": bytes(value).hex()}
            case Mapping():
                return {self._key(key): self.convert_value(each) for key, each in value.items()}
            case list() | tuple():
                return [self.convert_value(each) for each in value]
            case set() | frozenset():
                return sorted(
                    (self.convert_value(each) for each in value), key=lambda each: json.dumps(each, sort_keys=True)
                )
            case types.ModuleType():
                return {"module": value.__name__, "version": str(getattr(value, "__version__", ""))}
            case types.CodeType():
                return self._bytecode(value)
        return self._code(value) if callable(value) else self._object(value)

    def _key(self, key: Any) -> str:
        return key if isinstance(key, str) else json.dumps([type(key).__name__, self.convert_value(key)])

    @staticmethod
    def _content_of(text: str) -> Any:
        """A text, or the content of the file or directory that it names."""
        if os.path.isfile(text) or (os.sep in text and os.path.isdir(text)):
            return {"content": checkpoint_of(os.path.abspath(text), None).identity}
        return text

    def _code(self, value: Any) -> Any:
        match value:
            case functools.partial():
                return {"partial": [self.convert_value(each) for each in (value.func, value.args, value.keywords)]}
            case types.MethodType():
                return {"method": [self.convert_value(value.__func__), self.convert_value(value.__self__)]}
            case types.FunctionType() | type() if (source := _source_of(value)) is not None:
                return {"name": _name(value), "source": source}
            case types.FunctionType():
                return self._function(value)
            case types.BuiltinFunctionType() if isinstance(value.__self__, (types.ModuleType, type(None))):
                return {"builtin": _name(value)}
        return self._object(value)

    def _function(self, value: types.FunctionType) -> Any:
        if id(value) in self._functions:
            return {"function": self._functions[id(value)]}
        self._functions[id(value)] = len(self._functions)
        used = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
        cells = [each.cell_contents for each in value.__closure__ or ()]
        parts = (value.__code__, value.__defaults__, value.__kwdefaults__, used, cells)
        return {"code": [self.convert_value(each) for each in parts]}

    def _bytecode(self, code: types.CodeType) -> Any:
        constants = [
            repr(each) if each is Ellipsis or isinstance(each, complex) else self.convert_value(each)
            for each in code.co_consts
        ]
        arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        return [code.co_code.hex(), constants, arguments, code.co_names, code.co_varnames, code.co_freevars]

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "memory_format"):
            return str(value)
        if isinstance(value, type):
            raise NotComparable
        if hasattr(value, "to_dict"):
            return {_name(kind): self.convert_value(_without_names(value.to_dict()))}
        if dataclasses.is_dataclass(value):
            names = [each.name for each in dataclasses.fields(value)]
        elif isinstance(value, types.SimpleNamespace):
            names = sorted(vars(value))
        elif hasattr(value, "__struct_fields__"):
            names = list(value.__struct_fields__)
        elif hasattr(value, "compute_hash"):
            return {_name(kind): str(value.compute_hash())}
        elif callable(getattr(value, "uuid", None)):
            return {_name(kind): self.convert_value(value.uuid())}
        elif isinstance(value, logging.Logger):
            return {_name(kind): value.name}
        else:
            raise NotComparable
        return {_name(kind): {name: self.convert_value(getattr(value, name, None)) for name in names}}
