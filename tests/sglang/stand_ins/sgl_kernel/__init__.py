"""Stands for `sglang-kernel`, which has no wheel for the CPU: SGLang imports names from it that it does not call."""

from typing import Any

__version__ = "0.4.10"
__path__: list[str] = []


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Missing":
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *arguments: object, **options: object) -> Any:
        raise NotImplementedError(f"sgl_kernel.{self._name} has no stand-in")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)
