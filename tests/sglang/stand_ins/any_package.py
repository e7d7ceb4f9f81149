"""Stands for packages without a wheel for this torch: SGLang imports names from them that text models do not use."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


class _Name(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(metaclass=_Name):
    """A class whose attributes are strings."""


def anything(name: str) -> Any:
    """The attributes of such a package, and of its submodules."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.startswith(self._package + ".")
            else None
        )

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = anything  # type: ignore[method-assign]


def find_submodules(package: str) -> None:
    """Let this package have every submodule."""
    sys.meta_path.append(_Finder(package))
