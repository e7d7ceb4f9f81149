"""Multi-turn conversations, some at a time: which request comes next, and how long each took. Pure, knows no engine."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Talk:
    history: list[int]
    turn: int = 0
    answer: list[int] = field(default_factory=list)


@dataclass
class Timing:
    """Of one request; seconds."""

    prompt: int
    """Its tokens."""
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    """Of its answer so far."""
    cached: int = 0
    """Of its prompt's tokens, those that were not computed."""
    turn: int = 0
    known: int = 0
    """Tokens at its start that were in an earlier prompt of its session: the most that can hit."""

    def answered(self, tokens: int, now: float) -> None:
        """So many tokens have come until now."""
        if tokens and not self.tokens:
            self.first = now
        self.tokens, self.last = tokens, now


def counted(timings: Sequence[Timing]) -> dict[str, Any]:
    """Of all of these; times in milliseconds, one of each request."""
    return {
        "requests": len(timings),
        "prompt_tokens": sum(each.prompt for each in timings),
        "cached_tokens": sum(each.cached for each in timings),
        "output_tokens": sum(each.tokens for each in timings),
        "ttft_ms": [(each.first - each.sent) * 1e3 for each in timings],
        "tpot_ms": [(each.last - each.first) * 1e3 / (each.tokens - 1) for each in timings if each.tokens > 1],
    }


class Conversations:
    """A closed loop: every conversation asks its next turn, with all that was said before, when its turn comes round;
    in between all others have theirs, so a prefix is used again only after the whole working set was touched.

    Args:
        count: of conversations.
        turns: of each.
        concurrency: requests in flight.
        first_tokens: of the first prompt, on average; each is between half and one and a half of it.
        turn_tokens: that each later turn adds, on average, likewise.
        output_tokens: of every answer.
        system_tokens: that all conversations begin with.
        vocabulary: token ids are below it.
        seed: of everything random.
    """

    def __init__(
        self,
        *,
        count: int,
        turns: int,
        concurrency: int,
        first_tokens: int,
        turn_tokens: int,
        output_tokens: int,
        system_tokens: int = 0,
        vocabulary: int,
        seed: int = 0,
    ) -> None:
        self.output_tokens = output_tokens
        self._turns = turns
        self._numbers = random.Random(seed)
        self._vocabulary = vocabulary
        system = self._some(system_tokens, exactly=True)
        self._talks = [_Talk(system + self._some(first_tokens)) for _ in range(count)]
        # What the user says in a turn must not depend on which answer came first: all runs ask the same.
        self._said = [[self._some(turn_tokens) for _ in range(turns)] for _ in range(count)]
        self._waiting = deque(range(count))
        self._free = concurrency
        self._timings: dict[str, Timing] = {}
        self._running = 0

    def _some(self, mean: int, *, exactly: bool = False) -> list[int]:
        length = mean if exactly else self._numbers.randrange(mean // 2, mean + mean // 2 + 1)
        return [self._numbers.randrange(10, self._vocabulary - 10) for _ in range(length)]

    @property
    def over(self) -> bool:
        return not self._waiting and not self._running

    @property
    def tokens(self) -> int:
        """Of all histories: the working set when all conversations are over."""
        return sum(map(len, self.histories))

    @property
    def histories(self) -> list[list[int]]:
        """All that was said in each, and what would be asked next."""
        return [talk.history for talk in self._talks]

    def next_requests(self) -> list[tuple[str, list[int]]]:
        """Name and token ids of the requests that may be sent now."""
        found = []
        while self._free and self._waiting:
            number = self._waiting.popleft()
            talk = self._talks[number]
            name = f"{number}-{talk.turn}"
            self._timings[name] = Timing(len(talk.history), turn=talk.turn)
            self._free -= 1
            self._running += 1
            found.append((name, talk.history))
        return found

    def sent(self, name: str, now: float) -> None:
        self._timings[name].sent = now

    def answered(self, name: str, tokens: list[int], now: float, finished: bool, cached: int) -> None:
        """All tokens of the answer so far."""
        # vLLM may append to the name it was given.
        name = "-".join(name.split("-")[:2])
        timing = self._timings[name]
        timing.answered(len(tokens), now)
        if not finished:
            return
        timing.cached = cached
        number = int(name.split("-")[0])
        talk = self._talks[number]
        talk.history = talk.history + tokens + self._said[number][talk.turn]
        talk.turn += 1
        self._free += 1
        self._running -= 1
        if talk.turn < self._turns:
            self._waiting.append(number)

    def result(self) -> dict[str, Any]:
        """Times in milliseconds, one of each request; ``later`` are those after the first turn. A round's ``seconds``
        are those from the end of the last answer of the round before to the end of its own."""
        timings = list(self._timings.values())
        later = [each for each in timings if each.turn]
        rounds, began = [], min((each.sent for each in timings), default=0.0)
        for turn in range(self._turns):
            of_turn = [each for each in timings if each.turn == turn]
            ended = max((each.last for each in of_turn), default=began)
            rounds.append({**counted(of_turn), "seconds": ended - began})
            began = ended
        return {
            **counted(timings),
            "rounds": rounds,
            "working_set_tokens": self.tokens,
            "later_ttft_ms": [(each.first - each.sent) * 1e3 for each in later],
        }
