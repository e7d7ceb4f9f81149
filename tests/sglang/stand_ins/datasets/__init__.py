"""Stands for a package that SGLang's benchmarks import, and its test kits with them; nothing here uses it."""

from typing import Any


def load_dataset(*arguments: object, **options: object) -> Any:
    raise NotImplementedError("datasets has no stand-in")
