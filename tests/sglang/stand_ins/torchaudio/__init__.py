"""Stands for a package without a wheel for this torch: SGLang imports names from it that text models do not use."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.0.0"


class _Name(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(metaclass=_Name):
    """A class whose attributes are strings."""


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of this package."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(__name__ + ".") else None

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _attribute  # type: ignore[method-assign]


__getattr__ = _attribute
sys.meta_path.append(_Finder())
