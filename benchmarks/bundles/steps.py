"""What the checks of the bundles have in common; it travels with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Answers = tuple[list[tuple[int, ...]], str]
"""Tokens of each answer, and what is said of the time they took."""

failed = 0
began = time.monotonic()


def step(name: str, run: Callable[[], Any]) -> Any:
    """Print what ``run`` says, if it returns a text, or why it failed. Returns its result; None: it failed."""
    global failed
    result = None
    try:
        result = run()
        said = f"ok    {name}: {result if isinstance(result, str) else ''}"
    except Exception as error:  # noqa: BLE001 (the next step may say more)
        failed += 1
        said = f"FAIL  {name}: {type(error).__name__}: {error}"
    print(f"[{time.monotonic() - began:6.1f} s] {said}", flush=True)
    return result


def end() -> int:
    """The exit code."""
    print("all is well" if not failed else f"{failed} steps failed", flush=True)
    return int(failed > 0)


class Asked:
    """The same prompts, answered again and again.

    Args:
        answers: has an engine answer all of them; is told whether it is the first time.
        otherwise: why an answer may differ from the cold one; empty: none may.
    """

    def __init__(self, answers: Callable[[bool], Answers], otherwise: str = "") -> None:
        self._answers, self._otherwise = answers, otherwise
        self._cold: list[tuple[int, ...]] = []

    def cold(self) -> str:
        self._cold, said = self._answers(True)
        return f"{said}; {self._cold[0][:6]}"

    def again(self) -> str:
        found, said = self._answers(False)
        equal = sum(one == other for one, other in zip(found, self._cold, strict=True))
        said = f"{said}; tokens of {equal} of {len(found)} as cold{self._otherwise}"
        if equal < len(found) and not self._otherwise:
            raise RuntimeError(said)
        return said
