"""The doctor's finding on a fact."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvsidecar.cli.doctor.facts import Facts


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but slowly or with fewer features."""
    PROBLEM = "problem"
    """The daemon or this engine's offload will not work."""
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: Verdict
    text: str
    fix: str = ""
    """One sentence; empty if there is nothing to fix."""


Result = tuple[Verdict, str] | tuple[Verdict, str, str]
Check = Callable[[Facts], Iterable[Result]]
