"""Recorded sessions of coding agents as a closed loop: which request comes when. Pure, knows no engine and no clock."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.vllm.conversations import Timing, counted
from kvsidecar.cli.size.agentic import MAX_THINK, RecordedRequest, read_sessions

Ints = npt.NDArray[np.int64]


class Asked(NamedTuple):
    """A request that may be sent now."""

    name: str
    tokens: list[int]
    output_tokens: int


@dataclass
class _Agent:
    """One of the loops: a session, and behind it the next one."""

    session: int = 0
    started: int = 0
    """How many sessions it has begun: their tokens differ, also where a session comes twice."""
    request: int = 0
    due: float | None = 0.0
    """When the next request is sent; None while one runs."""
    seen: set[int] | None = None


class Sessions:
    """So many agents at once. Each waits for its answer, then for the recorded pause, and asks again.

    Args:
        path: of the recorded sessions, as `kvsidecar.cli.size.agentic` describes them.
        concurrency: agents.
        seconds: after which nothing new is sent.
        warm_seconds: of these, at the beginning; what is sent then is not counted.
        speed: recorded pauses, of at most 300 s, are divided by it.
        block_tokens: that each recorded block has here; with fewer than recorded, prompts are shorter by as much.
        max_tokens: longest prompt with its answer. A session ends before the first that is longer.
        max_output_tokens: of an answer.
        vocabulary: token ids are below it.
        seed: of the order of sessions, and of where in its first session each agent begins.
    """

    def __init__(
        self,
        path: str,
        *,
        concurrency: int,
        seconds: float,
        warm_seconds: float,
        speed: float,
        block_tokens: int,
        max_tokens: int,
        max_output_tokens: int,
        vocabulary: int,
        seed: int = 0,
    ) -> None:
        _, self._recorded = read_sessions(Path(path))
        self._seconds, self._warm_seconds, self._speed = seconds, warm_seconds, speed
        self._block_tokens, self._vocabulary = block_tokens, vocabulary
        self._max_tokens, self._max_output_tokens = max_tokens, max_output_tokens
        self._numbers = random.Random(seed)
        self._order: deque[int] = deque()
        self._timings: dict[str, Timing] = {}
        self._agents = [_Agent() for _ in range(concurrency)]
        for agent in self._agents:
            self._begin(agent)
            requests = self._requests(agent)
            agent.request = self._numbers.randrange(requests)
            agent.due = self._numbers.random() * MAX_THINK / speed / 4

    def over(self, now: float) -> bool:
        return now >= self._seconds and all(agent.due is not None for agent in self._agents)

    def next_due(self) -> float | None:
        """When the next request may be sent; None: only after an answer."""
        return min((agent.due for agent in self._agents if agent.due is not None), default=None)

    def due(self, now: float) -> list[Asked]:
        """The requests to send at this time, in seconds from the start."""
        if now >= self._seconds:
            return []
        found = []
        for number, agent in enumerate(self._agents):
            if agent.due is not None and agent.due <= now:
                agent.due = None
                found.append(self._ask(f"{number}-{agent.started}-{agent.request}", number, agent, now))
        return found

    def answered(self, name: str, tokens: int, now: float, finished: bool, cached: int) -> None:
        """Of an answer so far: its tokens, and how many of its prompt's were not computed."""
        name = "-".join(name.split("-")[:3])  # vLLM may append to the name it was given
        timing = self._timings[name]
        timing.answered(tokens, now)
        if not finished:
            return
        timing.cached = cached
        agent = self._agents[int(name.split("-")[0])]
        agent.request += 1
        if agent.request >= self._requests(agent):
            self._begin(agent)
        agent.due = now + self._recorded[agent.session].requests[agent.request].think / self._speed

    def result(self) -> dict[str, Any]:
        """Of what was sent after the warm-up. Times in milliseconds, one of each request."""
        timings = [each for each in self._timings.values() if each.sent >= self._warm_seconds and each.last]
        return {
            **counted(timings),
            "known_tokens": sum(each.known for each in timings),
            "counted_seconds": max((each.last for each in timings), default=0.0) - self._warm_seconds,
        }

    def _begin(self, agent: _Agent) -> None:
        """The next session that has a request short enough."""
        agent.started, agent.request, agent.seen = agent.started + 1, 0, set()
        while True:
            if not self._order:
                numbers = list(range(len(self._recorded)))
                self._numbers.shuffle(numbers)
                self._order.extend(numbers)
            agent.session = self._order.popleft()
            if self._requests(agent):
                return

    def _requests(self, agent: _Agent) -> int:
        """Of its session, up to the first that is too long."""
        requests = self._recorded[agent.session].requests
        fits = (self._prompt_tokens(each) + self._max_output_tokens <= self._max_tokens for each in requests)
        return next((number for number, each in enumerate(fits) if not each), len(requests))

    def _prompt_tokens(self, request: RecordedRequest) -> int:
        return max(1, int(request.runs.lengths.sum()) * self._block_tokens)

    def _ask(self, name: str, number: int, agent: _Agent, now: float) -> Asked:
        request = self._recorded[agent.session].requests[agent.request]
        blocks = request.runs.numbers()
        assert agent.seen is not None
        known = next((at for at, block in enumerate(blocks.tolist()) if block not in agent.seen), len(blocks))
        agent.seen.update(blocks.tolist())
        tokens = self._tokens((len(self._agents) * 1_003 + number) * 1_000_003 + agent.started, blocks)
        self._timings[name] = Timing(len(tokens), now, known=min(known * self._block_tokens, len(tokens)))
        return Asked(name, tokens, max(1, min(request.output_tokens, self._max_output_tokens)))

    def _tokens(self, session: int, blocks: Ints) -> list[int]:
        """Equal blocks of a session have equal tokens, and no others: neither its next time nor with more agents."""
        if not len(blocks):
            return [10]
        mixed: Any = np.uint64((session + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
        mixed = mixed + blocks.astype(np.uint64)[:, None] * np.uint64(0xBF58476D1CE4E5B9)
        mixed = mixed + np.arange(self._block_tokens, dtype=np.uint64) * np.uint64(0x94D049BB133111EB)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xD6E8FEB86659FD93)
        mixed = mixed ^ (mixed >> np.uint64(32))
        tokens: list[int] = (mixed % np.uint64(self._vocabulary - 20) + np.uint64(10)).ravel().tolist()
        return tokens
