"""Stands for `sglang-kernel`, whose extension does not load with this torch. SGLang imports names from it that it does
not call with ``SGLANG_FORCE_FUSED_OP_BACKEND=torch`` and Triton attention."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.4.10"


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Missing":
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *arguments: object, **options: object) -> Any:
        raise NotImplementedError(f"sgl_kernel.{self._name} has no stand-in")


def is_arch_support_pdl() -> bool:
    """Asked by SGLang's Triton attention."""
    return False


def _find(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return globals().get(name, _Missing(name))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every submodule."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(__name__ + ".") else None

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _find  # type: ignore[method-assign]


sys.meta_path.append(_Finder())
__getattr__ = _find
