"""What every measuring process has in common: its settings, and the file that its rows go to.

Each system is measured in a process of its own, so that a crash costs one system and each begins on a clean GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.peers.report import Limit, Problem, Row, to_line
from benchmarks.peers.shapes import BOTH, CHUNK_SIZES, DEEP_SIZES, SHAPES, SIZES, Direction, Shape, shape_named

QUICK_REPEAT = 3


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        rpc: ``host:port`` of the peer's server; empty for a system without one.
        http: the same for its HTTP port.
    """

    rows: Path
    repeat: int
    quick: bool
    shapes: Sequence[Shape]
    rpc: str = ""
    http: str = ""

    @property
    def sizes(self) -> Sequence[int]:
        return (1, 64, 512) if self.quick else SIZES

    @property
    def chunk_sizes(self) -> Sequence[int]:
        return (64, 512) if self.quick else CHUNK_SIZES

    @property
    def deep_sizes(self) -> Sequence[int]:
        return () if self.quick else DEEP_SIZES


class Rows:
    """The rows of one worker, on disk as soon as they are known: a killed worker keeps what it measured."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def add(self, row: Row) -> None:
        print(to_line(row), file=self._file, flush=True)

    def add_limits(self, system: str, bulk_gbps: Callable[[Direction], float]) -> None:
        """The limit of both directions."""
        for direction in BOTH:
            self.add(Limit(system, direction, bulk_gbps(direction)))

    def refuse(self, system: str, reason: object) -> None:
        self.add(Problem(system, " ".join(str(reason).split())[:300]))

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def settings_from(arguments: Sequence[str] | None = None) -> Settings:
    """The settings of a worker's command line, which `command` wrote."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layouts", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--rpc", default="")
    parser.add_argument("--http", default="")
    known = parser.parse_args(arguments)
    shapes = tuple(shape_named(name) for name in known.layouts.split(","))
    return Settings(known.rows, known.repeat, known.quick, shapes, known.rpc, known.http)


def arguments_of(settings: Settings) -> list[str]:
    """The command line that `settings_from` reads."""
    words = ["--rows", str(settings.rows), "--repeat", str(settings.repeat)]
    words += ["--layouts", ",".join(shape.name for shape in settings.shapes)]
    words += ["--quick"] if settings.quick else []
    words += ["--rpc", settings.rpc] if settings.rpc else []
    return [*words, *(["--http", settings.http] if settings.http else [])]
