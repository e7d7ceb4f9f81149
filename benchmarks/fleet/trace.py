"""Requests with the blocks of their prompts: read from a file of Mooncake's traces, or generated.

The generated conversations follow what the conversation trace of Mooncake (FAST 2025) shows, and the generated agents
the published means of its tool and agent trace. An hour of requests cannot show who comes back after an hour: that
share is an assumption (`Mix.returns`), and it decides what a disk is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvsidecar.cache.arrays import Ints
from kvsidecar.cli.size.json_lines import read_lines
from kvsidecar.cli.size.uses import Use, Uses, runs_of

BLOCK_TOKENS: Final = 512
MAX_TOKENS: Final = 128_000

CONTINUES: Final = (0.29, 0.4, 0.5, 0.57, 0.58, 0.66, 0.7)
"""The probability of a next turn after the first, the second, ...; the last one from there on."""
SYSTEM_TOKENS: Final = 900
"""Of every conversation."""
DOCUMENTS: Final = 60
DOCUMENT_SHARE: Final = 0.1
"""Of the conversations: they begin with one of the shared documents."""
RETURN_MEDIAN: Final = 3600.0
"""Seconds until somebody comes back who was away."""
AGENTS: Final = 50
STEPS: Final = 0.35
"""The probability that an agent takes a further step."""


@dataclass(frozen=True, slots=True)
class Request:
    at: float
    """Seconds from the start of the trace."""
    input_tokens: int
    output_tokens: int
    blocks: Ints
    """Numbers of the full blocks of the prompt, in prefix order. The same number is the same prefix."""


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    requests: list[Request]
    num_blocks: int
    """Numbers of blocks are less than this."""

    @property
    def seconds(self) -> float:
        return self.requests[-1].at if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Mix:
    """What is generated.

    Args:
        rate: requests a second.
        agents: share of the requests; the others are turns of conversations.
        returns: share of the turns that come after hours instead of minutes.
    """

    hours: float
    rate: float
    agents: float = 0.5
    returns: float = 0.1
    seed: int = 0


def read(path: Path) -> Trace:
    """A trace as Mooncake publishes it: a JSON object a line, blocks of 512 tokens.

    Its last block of a prompt is mostly a part of one, which no engine caches; it is left out.

    Raises:
        BadFile: it is something else.
    """
    numbers: dict[int, int] = {}
    requests = []
    for line in read_lines(path):
        tokens = line.count("input_length")
        full = line.counts("hash_ids")[: tokens // BLOCK_TOKENS]
        blocks = np.array([numbers.setdefault(each, len(numbers)) for each in full], np.int64)
        requests.append(Request(line.number("timestamp") / 1000, tokens, line.count("output_length"), blocks))
    requests.sort(key=lambda request: request.at)
    return Trace(path.stem, requests, len(numbers))


def generate(mix: Mix) -> Trace:
    """Conversations and agents; the same mix gives the same trace."""
    maker = _Maker(mix)
    sessions = [*maker.conversations(), *maker.agents()]
    requests = list(merge(*sessions, key=lambda request: request.at))
    return Trace("generated", requests, maker.num_blocks)


@dataclass(slots=True)
class _Prompt:
    """A prompt that grows."""

    blocks: list[int] = field(default_factory=list)
    tokens: int = 0


class _Maker:
    def __init__(self, mix: Mix) -> None:
        self._mix = mix
        self._rng = np.random.default_rng(mix.seed)
        self._seconds = mix.hours * 3600
        self.num_blocks = 0

    def conversations(self) -> Iterator[list[Request]]:
        system = self._grown(_Prompt(), SYSTEM_TOKENS)
        documents = [self._grown(system, self._normal(5000, 0.8)) for _ in range(DOCUMENTS)]
        popular = _zipf(DOCUMENTS)
        alive = accumulate((1.0, *CONTINUES, *[CONTINUES[-1]] * 30), lambda turns, more: turns * more)
        for at in self._arrivals(self._mix.rate * (1 - self._mix.agents) / sum(alive)):
            shared = self._rng.random() < DOCUMENT_SHARE
            base = documents[self._rng.choice(DOCUMENTS, p=popular)] if shared else system
            prompt = self._grown(base, max(0, self._normal(5264, 1.22) - base.tokens))
            turns = []
            for turn in range(1000):
                turns.append(self._request(at, prompt, self._normal(300, 0.55)))
                if self._rng.random() > CONTINUES[min(turn, len(CONTINUES) - 1)]:
                    break
                away = self._rng.random() < self._mix.returns
                at += self._normal(RETURN_MEDIAN, 1.0) if away else self._normal(140, 1.1)
                grows = self._normal(5000, 1.0) if self._rng.random() < 0.15 else self._normal(450, 0.7)
                prompt = self._grown(prompt, grows)
                if at > self._seconds or prompt.tokens > MAX_TOKENS:
                    break
            yield [each for each in turns if each.at >= 0]

    def agents(self) -> Iterator[list[Request]]:
        systems = [self._grown(_Prompt(), self._normal(3600, 0.6)) for _ in range(AGENTS)]
        popular = _zipf(AGENTS)
        for at in self._arrivals(self._mix.rate * self._mix.agents * (1 - STEPS)):
            prompt = self._grown(systems[self._rng.choice(AGENTS, p=popular)], self._normal(2050, 1.15))
            steps = []
            while at <= self._seconds and prompt.tokens <= MAX_TOKENS:
                steps.append(self._request(at, prompt, self._normal(140, 0.7)))
                if self._rng.random() > STEPS:
                    break
                at += self._normal(15, 1.0)
                prompt = self._grown(prompt, self._normal(700, 1.0))
            yield [each for each in steps if each.at >= 0]

    def _arrivals(self, rate: float) -> Iterator[float]:
        """When sessions begin: some before the trace, which begins in the middle of them."""
        if not rate:
            return
        before = min(4 * 3600.0, self._seconds)
        at = -before + self._rng.exponential(1 / rate)
        while at < self._seconds:
            yield at
            at += self._rng.exponential(1 / rate)

    def _normal(self, median: float, sigma: float) -> int:
        """Log-normal."""
        return max(1, round(median * math.exp(sigma * self._rng.standard_normal())))

    def _grown(self, prompt: _Prompt, tokens: int) -> _Prompt:
        total = min(prompt.tokens + tokens, MAX_TOKENS + 1)
        first = self.num_blocks
        self.num_blocks += total // BLOCK_TOKENS - len(prompt.blocks)
        return _Prompt([*prompt.blocks, *range(first, self.num_blocks)], total)

    def _request(self, at: float, prompt: _Prompt, output: int) -> Request:
        return Request(at, prompt.tokens, output, np.array(prompt.blocks, np.int64))


def _zipf(count: int) -> Any:
    weights = 1 / np.arange(1, count + 1)
    return weights / weights.sum()


def uses_of(trace: Trace, warm_share: float) -> Uses:
    """The prompts of a trace. It does not name the blocks of answers."""
    prompts = [Use(each.at, each.input_tokens, runs_of(each.blocks)) for each in trace.requests]
    return Uses(trace.name, BLOCK_TOKENS, trace.num_blocks, warm_share * trace.seconds, prompts)
