"""The uses of a pool in order of time: prompts that are looked up, and answers that are stored after them."""

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
    """Length of the prompt, which is looked up; 0: this is an answer, which is only stored."""
    runs: Runs
    """The blocks; equal numbers are equal prefixes."""
    prompt: Runs = NO_RUNS
    """Answers only: the blocks before it."""
    pause: float = 0.0
    """Answers only: announced seconds until the session's next request; infinity: there is none; 0: not announced."""

    @property
    def depth(self) -> int:
        """Blocks of the prompt before these."""
        return int(self.prompt.lengths.sum())


@dataclass(frozen=True, slots=True)
class Uses:
    name: str
    block_tokens: int
    num_blocks: int
    """Upper bound of the blocks' numbers."""
    warm: float
    """Seconds after which uses are counted."""
    uses: Sequence[Use]
    """All uses in order of time."""
