"""What engines report about their namespaces: the name under which they serve the model, and a namespace's options, for
operators who wonder why two do not share.

Clients fill it, so it is bounded, and nothing but texts for people and routers depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from heapq import nsmallest
from itertools import islice

from kvsidecar.types import Namespace

MAX_OPTIONS = 1024
"""Options of one namespace. vLLM's has about 150, SGLang's about 200."""
MAX_NAME = 128
MAX_VALUE = 64
"""Bytes. Longer ones are left out."""
MAX_BYTES = 16 << 20
MAX_BYTES_OF_USER = 4 << 20
"""Beyond it the oldest of a user, and then of all, are forgotten."""
OPTION_BYTES = 128
"""What an option takes beside its texts."""
SAID_BYTES = 1024
"""What a namespace takes beside its texts and options."""
MAX_NAMED = 16
"""Options that one text names."""

_FIELDS = tuple(each.name for each in fields(Namespace) if each.name not in ("model", "extra"))


@dataclass(frozen=True, slots=True)
class _Said:
    served_name: str
    options: Mapping[str, str]
    uid: int
    nbytes: int


def taken(options: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The options of a client that are kept."""
    first = islice(options, MAX_OPTIONS)
    return {name: value for name, value in first if len(name.encode()) <= MAX_NAME and len(value.encode()) <= MAX_VALUE}


class NamespaceOptions:
    """The last report on each namespace."""

    def __init__(self) -> None:
        self._said: dict[Namespace, _Said] = {}
        self._latest: dict[str, Namespace] = {}
        """Each model's most recently reported namespace."""
        self._bytes_of: dict[int, int] = {}
        """Bytes that each user's reports take."""

    @property
    def nbytes(self) -> int:
        return sum(self._bytes_of.values())

    def add(
        self, namespace: Namespace, options: Mapping[str, str], uid: int, served_name: str = ""
    ) -> Namespace | None:
        """Note the options of a rank that has attached. Returns the model's most recently reported other namespace if
        this one was not known.

        Args:
            served_name: empty: the namespace keeps its present one.
        """
        if not options and not served_name:
            return None
        known = self._forget(namespace)
        served_name = served_name or (known.served_name if known else "")
        nbytes = _bytes_of(namespace, options, served_name)
        other = self._latest.get(namespace.model)
        self._said[namespace] = _Said(served_name, options, uid, nbytes)
        self._latest[namespace.model] = namespace
        self._bytes_of[uid] = self._bytes_of.get(uid, 0) + nbytes
        while self._bytes_of[uid] > MAX_BYTES_OF_USER:
            self._forget(next(each for each, said in self._said.items() if said.uid == uid))
        while self.nbytes > MAX_BYTES:
            self._forget(next(iter(self._said)))
        return None if known else other

    def served_name(self, namespace: Namespace) -> str:
        """The name under which the latest engine serves the model; empty if no engine has reported one."""
        said = self._said.get(namespace)
        return "" if said is None else said.served_name

    def served_name_of_model(self, model: str) -> str:
        """`served_name` of the model's namespace that was said of last."""
        latest = self._latest.get(model)
        return "" if latest is None else self.served_name(latest)

    def _forget(self, namespace: Namespace) -> _Said | None:
        said = self._said.pop(namespace, None)
        if said is not None:
            self._bytes_of[said.uid] -= said.nbytes
            if not self._bytes_of[said.uid]:
                del self._bytes_of[said.uid]
            if self._latest.get(namespace.model) == namespace:
                del self._latest[namespace.model]
        return said

    def differences(self, one: Namespace, other: Namespace) -> list[str]:
        """Differences between two namespaces of one model: names of options, with both values where these are short."""
        differing = [
            _difference(name, str(getattr(one, name)), str(getattr(other, name)))
            for name in _FIELDS
            if getattr(one, name) != getattr(other, name)
        ]
        mine, others = self._said.get(one), self._said.get(other)
        more = 0
        if mine is not None and others is not None and mine.options and others.options:
            names = {name for name, _ in mine.options.items() ^ others.options.items()}
            shown = nsmallest(MAX_NAMED, names)
            more = len(names) - len(shown)
            differing += [_difference(name, mine.options.get(name), others.options.get(name)) for name in shown]
        elif one.extra != other.extra and not differing:
            differing.append("options that are unknown, because no engine has attached since the daemon started")
        return [*differing, f"{more} more"] if more else differing


def _bytes_of(namespace: Namespace, options: Mapping[str, str], served_name: str) -> int:
    values = [served_name, *(getattr(namespace, each.name) for each in fields(namespace))]
    texts = [each for each in values if isinstance(each, str)]
    said = sum(len(name.encode()) + len(value.encode()) + OPTION_BYTES for name, value in options.items())
    return SAID_BYTES + sum(len(text.encode()) for text in texts) + said


def _difference(name: str, mine: str | None, others: str | None) -> str:
    if mine is None or others is None or "#" in (mine[:1], others[:1]) or max(len(mine), len(others)) > MAX_VALUE:
        return name
    return f"{name} ({mine} instead of {others})"
