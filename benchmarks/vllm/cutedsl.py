"""A stand-in for the CuTe DSL: modules that name its functions and types can be imported, and nothing is compiled.

vLLM has kernels in it beside those in Triton, which it takes on a Hopper GPU; its model of Kimi-Linear imports both.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from unittest.mock import MagicMock

NAME = "cutlass"


class _Names(types.ModuleType):
    """A module that has every public name."""

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the package and every module below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] == NAME:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in_if_missing() -> None:
    """Call it before vLLM is imported. vLLM is told that it has no kernels of this kind."""
    if importlib.util.find_spec(NAME) is not None:
        return
    from vllm.utils import import_utils

    import_utils.has_cutedsl = lambda: False  # others import it by name
    from vllm.model_executor.kernels.linear.cute_dsl import _ll_router_common, skinny_gemm

    for module in (_ll_router_common, skinny_gemm):
        module._cutedsl_available = False
    sys.meta_path.append(_Modules())
