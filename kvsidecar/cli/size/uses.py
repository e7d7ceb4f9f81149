"""What a pool is asked for, in order of time: prompts, and the answers that are stored behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvsidecar.cache.arrays import Ints


class Runs(NamedTuple):
    """Numbers of blocks in prefix order, as runs of successive ones: prompts that grow are long, and mostly one run."""

    starts: Ints
    lengths: Ints

    def numbers(self) -> Ints:
        steps: Ints = np.repeat(self.starts - self.lengths.cumsum() + self.lengths, self.lengths)
        return steps + np.arange(len(steps))


NO_RUNS: Final = Runs(np.zeros(0, np.int64), np.zeros(0, np.int64))


def runs_of(numbers: Ints) -> Runs:
    begins = np.flatnonzero(np.append(np.ones(len(numbers[:1]), np.bool_), np.diff(numbers) != 1))
    return Runs(numbers[begins], np.diff(np.append(begins, len(numbers))))


@dataclass(frozen=True, slots=True)
class Use:
    at: float
    """Seconds from the start."""
    tokens: int
    """Of the prompt, which is looked up; 0: its answer, which is only stored."""
    runs: Runs
    """The same number is the same prefix."""
    prompt: Runs = NO_RUNS
    """Of an answer: what is before it."""
    pause: float = 0.0
    """Of an answer: seconds until its session's next request, as somebody says; infinity: there is none; 0: nobody
    says."""

    @property
    def depth(self) -> int:
        """Blocks of the prompt before these."""
        return int(self.prompt.lengths.sum())


@dataclass(frozen=True, slots=True)
class Uses:
    name: str
    block_tokens: int
    num_blocks: int
    """Numbers of blocks are less than this."""
    warm: float
    """Seconds after which it is counted."""
    uses: Sequence[Use]
    """In order of time."""
