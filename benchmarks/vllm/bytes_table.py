"""The table of `benchmarks.vllm.bytes_per_token`: its rows, the file that has them, and what docs/sizing.md shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

RESULTS = Path(__file__).parents[1] / "results" / "vllm-0.33-bytes-per-token.json"
COLUMNS: Final = ("Model", "TP", "A hit needs", "Pool", "Simple", "Offloading")
MOST: Final = 1.05
"""The pool is to take at most so many times what a hit needs."""


@dataclass(frozen=True)
class Row:
    """One model on so many ranks: bytes for the whole prompt, on all ranks together."""

    model: str
    tp: int
    tokens: int
    """Of the prompt that a longer one hits."""
    needed: int
    loaded: int
    """What the hit loads from the pool."""
    pool: int
    simple: int
    offloading: int

    @property
    def misses(self) -> bool:
        return self.pool > MOST * self.needed

    @property
    def cells(self) -> tuple[str, ...]:
        held = (f"{self.kib(each)} ({each / self.needed:.2f})" for each in (self.pool, self.simple, self.offloading))
        return self.model, str(self.tp), self.kib(self.needed), *held

    def kib(self, nbytes: int) -> str:
        """For each token."""
        value = nbytes / self.tokens / 1024
        return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


@dataclass(frozen=True)
class Found:
    """All rows of a run."""

    vllm: str
    """Its version."""
    tokens: int
    """Of the prompt that is computed."""
    rows: tuple[Row, ...]

    @classmethod
    def read(cls, path: Path = RESULTS) -> Found:
        values: dict[str, Any] = json.loads(path.read_text())
        return cls(values["vllm"], values["tokens"], tuple(Row(**each) for each in values["rows"]))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def markdown(rows: Sequence[Row]) -> str:
    lines = [COLUMNS, ("---", *("---:",) * (len(COLUMNS) - 1)), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
