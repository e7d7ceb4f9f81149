"""Copies and lookups by model and by device, for the metrics: few labels, whatever clients send."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final

from prometheus_client.core import Metric

from kvsidecar.core import metric_families
from kvsidecar.core.shares import REST
from kvsidecar.types import Direction

MODELS_SHOWN: Final = 32
"""Models with a label of their own at a time."""
LABEL_CHARACTERS: Final = 128
"""Longest label. Models whose names begin with the same characters share one."""
QUIET_SECONDS: Final = 3600.0
"""A model that was not counted for this long may lose its label to another one."""


@dataclass(slots=True)
class Counts:
    """What was counted under one label."""

    copies: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))
    copied_bytes: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))
    hits: int = 0
    misses: int = 0
    needed_tokens: int = 0
    loaded_tokens: int = 0
    counted_at: float = 0.0

    def copied(self, direction: Direction, nbytes: int) -> None:
        self.copies[direction] += 1
        self.copied_bytes[direction] += nbytes


class ModelCounts:
    """Counts by model. `MODELS_SHOWN` models have labels of their own: those that came first, by an engine or by blocks
    that were kept. The others are counted as one. A lookup gives no label: anybody may name any model in it.

    A label stays with its model, so that its counters only grow, until another model comes and this one was not counted
    for `QUIET_SECONDS`. Its counters go with it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, Counts] = {}
        self._rest = Counts()

    def attached(self, model: str) -> None:
        """Before its first prompts, which would be counted with the others: its hit rate would begin at 100 %."""
        label = model[:LABEL_CHARACTERS]
        if label not in self._counts:
            self._admit(label)

    def copied(self, model: str, direction: Direction, nbytes: int) -> None:
        label = model[:LABEL_CHARACTERS]
        counts = self._counts.get(label) or self._admit(label)
        counts.counted_at = self._clock()
        counts.copied(direction, nbytes)

    def looked_up(self, model: str, hits: int, misses: int) -> None:
        counts = self._counts.get(model[:LABEL_CHARACTERS], self._rest)
        counts.counted_at = self._clock()
        counts.hits += hits
        counts.misses += misses

    def reported(self, model: str, needed_tokens: int, loaded_tokens: int) -> None:
        counts = self._counts.get(model[:LABEL_CHARACTERS], self._rest)
        counts.counted_at = self._clock()
        counts.needed_tokens += needed_tokens
        counts.loaded_tokens += loaded_tokens

    def _admit(self, label: str) -> Counts:
        """Give it a label, if one is free."""
        if label == REST:
            return self._rest
        if len(self._counts) >= MODELS_SHOWN:
            quiet = min(self._counts, key=lambda each: self._counts[each].counted_at)
            if self._clock() - self._counts[quiet].counted_at < QUIET_SECONDS:
                return self._rest
            del self._counts[quiet]
        return self._counts.setdefault(label, Counts(counted_at=self._clock()))

    def metrics(self, used: Mapping[str, int], served_name: Callable[[str], str]) -> Iterable[Metric]:
        """
        Args:
            used: bytes of the pool by model.
            served_name: the name that requests give a model; empty if nobody has said it.
        """
        by_label = dict(used)
        for model in [each for each in used if len(each) > LABEL_CHARACTERS]:  # few of very many
            label = model[:LABEL_CHARACTERS]
            by_label[label] = by_label.get(label, 0) + by_label.pop(model)
        for label in nlargest(MODELS_SHOWN, by_label, by_label.__getitem__):
            if label not in self._counts:  # such as a model whose blocks were kept over a restart
                self._admit(label)
        labelled = {**self._counts, REST: self._rest}
        # No label of the counters: it comes with an engine and may change with the next, which would begin them anew.
        # Without a gap, so that a query that joins it loses nothing.
        names = {(label, served_name(label)[:LABEL_CHARACTERS] or label): 1 for label in labelled}
        text = "Always 1. To be joined with the other metrics of models, for the name that requests give the model."
        yield metric_families.gauge("model_info", text, ["model", "served_name"], names)
        used_bytes = {label: by_label.get(label, 0) for label in self._counts}
        used_bytes[REST] = sum(by_label.values()) - sum(used_bytes.values())
        text = "Bytes of the pool that the model's blocks occupy."
        yield metric_families.gauge(
            "model_used_bytes", text, ["model"], {label: used_bytes[label] for label in labelled}
        )
        hits = {(label, "hit"): counts.hits for label, counts in labelled.items()}
        misses = {(label, "miss"): counts.misses for label, counts in labelled.items()}
        text = "Blocks requested by lookups, by model and result."
        yield metric_families.counter("model_lookup_blocks", text, ["model", "result"], hits | misses)
        needed = {(label,): counts.needed_tokens for label, counts in labelled.items()}
        text = "As kvsidecar_prompt_tokens_needed_total, by model."
        yield metric_families.counter("model_prompt_tokens_needed", text, ["model"], needed)
        loaded = {(label,): counts.loaded_tokens for label, counts in labelled.items()}
        text = "As kvsidecar_prompt_tokens_loaded_total, by model."
        yield metric_families.counter("model_prompt_tokens_loaded", text, ["model"], loaded)
        yield from _copies("model", labelled)


class DeviceCounts:
    """Counts by device."""

    def __init__(self) -> None:
        self._counts: dict[str, Counts] = {}

    def of(self, device: str) -> Counts:
        return self._counts.get(device) or self._counts.setdefault(device, Counts())

    def metrics(self) -> Iterable[Metric]:
        return _copies("device", self._counts)


def _copies(name: str, labelled: Mapping[str, Counts]) -> Iterable[Metric]:
    labels = [name, "direction"]
    copies = {(label, way): count for label, counts in labelled.items() for way, count in counts.copies.items()}
    yield metric_families.counter(f"{name}_copies", f"Successful copies, by {name} and direction.", labels, copies)
    nbytes = {(label, way): count for label, counts in labelled.items() for way, count in counts.copied_bytes.items()}
    yield metric_families.counter(
        f"{name}_copied_bytes", f"Bytes moved by successful copies, by {name} and direction.", labels, nbytes
    )
