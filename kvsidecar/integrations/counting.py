"""Counters with their help texts. Engine-independent."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def counter(text: str) -> Any:
    """A field of a class of `Totals`, with its help text."""
    return field(default=0, metadata={"help": text})


def help_of(totals: type[Totals]) -> dict[str, str]:
    """Help texts by name."""
    return {each.name: each.metadata["help"] for each in fields(totals) if each.metadata}


@dataclass(slots=True)
class Totals:
    """Counters since the start: the fields of a dataclass with slots that is derived from this one."""

    _taken: list[int] = field(default_factory=list, init=False, repr=False)

    def take(self) -> dict[str, int]:
        """Increments since the last call, by name, without zeros."""
        names = self.__slots__
        now: list[int] = [getattr(self, name) for name in names]
        if now == self._taken:
            return {}
        before, self._taken = self._taken or [0] * len(now), now
        return {name: value - then for name, value, then in zip(names, now, before, strict=True) if value != then}
