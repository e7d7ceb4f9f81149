"""Replays recorded sessions of coding agents, a given number at once.

Each line of a file is a session with blocks of one size: ``{"id": ..., "block": 64, "requests": [[t, input tokens,
output tokens, think, api, [first, count, first, count, ...]], ...]}``. The runs spell the prompt's blocks: an id is one
block of its session, and equal ids are equal KV. ``think`` is the pause before the request and ``api`` how long it
took, both in seconds; ``t`` is not used. The public traces of github.com/callanjfox/kv-cache-tester (Apache-2.0) can be
written in this form.

Nothing is shared between sessions. When one ends, another one begins at once, in an order that the seed determines;
when all have been replayed they start over, with other blocks.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from kvsidecar.cli.size.json_lines import BadFile, Line, is_count, is_number, read_lines, shown
from kvsidecar.cli.size.uses import NO_RUNS, Runs, Use, Uses, runs_of

MAX_THINK: Final = 300.0
"""Longest pause in seconds. Longer ones are cut to it, as in InferenceX's AgentX."""
START_WITHIN: Final = 300.0
"""Seconds in which the first sessions begin."""
TOOL_WITHIN: Final = 30.0
"""Longest pause in seconds that counts as waiting for a tool. A longer one counts as waiting for a person."""
TOOL_SECONDS: Final = 8.0
PERSON_SECONDS: Final = 120.0
"""The two pauses that hints announce, however long the pause really is."""
WARM_SECONDS: Final = 1800.0


class RecordedRequest(NamedTuple):
    tokens: int
    output_tokens: int
    think: float
    api: float
    runs: Runs
    answer: Runs
    """The answer's blocks, as far as a later prompt names them."""
    depth: int
    """Blocks of the prompt."""


class RecordedSession(NamedTuple):
    requests: list[RecordedRequest]
    num_blocks: int


@dataclass(frozen=True)
class SessionReplay:
    """The choice of what is replayed.

    Args:
        sessions: how many run at once.
    """

    path: Path
    sessions: int
    hours: float = 4.0
    seed: int = 0
    half: int = 0
    """1 or 2: only the sessions of that half, which depends on their ids; 0: all. Choices made on one half can be
    confirmed on the other."""
    hints: bool = False
    """Whether each request ends with a hint of what its session does next: that it has ended, or that it waits for a
    person or for a tool."""
    warm_seconds: float = WARM_SECONDS
    """Requests before this time are not counted."""
    midway: bool = False
    """Whether each of the first sessions begins at a request that the seed chooses, like sessions that a new node takes
    over."""
    speed: float = 1.0
    """Divisor of all times of the sessions."""


def schedule(what: SessionReplay) -> Uses:
    """The prompts and answers of a file's sessions. Raises BadFile: it is not what the module describes."""
    block_tokens, recorded = read_sessions(what.path, what.half)
    rng, uses, end = random.Random(what.seed), list[Use](), what.hours * 3600 * what.speed
    order: list[int] = []
    base = 0
    for _ in range(what.sessions):
        at, midway = rng.uniform(0, START_WITHIN), what.midway
        while at < end:
            if not order:
                order = list(range(len(recorded)))
                rng.shuffle(order)
            session = recorded[order.pop()]
            first = rng.randrange(len(session.requests)) if midway else 0
            midway = False
            for number, each in enumerate(session.requests[first:], first):
                at += each.think if number > first else 0
                if at >= end:
                    break
                uses.append(Use(at / what.speed, each.tokens, _moved(each.runs, base)))
                at += each.api
                if (len(each.answer.starts) or what.hints) and at < end:
                    pause = _pause(session.requests[number + 1 :]) / what.speed if what.hints else 0.0
                    answer, prompt = _moved(each.answer, base), _moved(each.runs, base)
                    uses.append(Use(at / what.speed, 0, answer, prompt, pause))
            base += session.num_blocks
            if not any(each.think + each.api for each in session.requests):
                at += 1.0  # else this would go on for ever
    uses.sort(key=lambda use: use.at)
    file = f"{what.path.name}, half {what.half}" if what.half else what.path.name
    name = f"{file}, {what.sessions} sessions at once, {what.hours:g} h, seed {what.seed}"
    return Uses(name, block_tokens, base, what.warm_seconds, uses)


def _pause(coming: list[RecordedRequest]) -> float:
    """The pause that a hint announces before these requests."""
    if not coming:
        return inf
    return PERSON_SECONDS if coming[0].think > TOOL_WITHIN else TOOL_SECONDS


def _moved(runs: Runs, base: int) -> Runs:
    return Runs(runs.starts + base, runs.lengths)


def read_sessions(path: Path, half: int = 0) -> tuple[int, list[RecordedSession]]:
    """Tokens of a block, and the sessions of a file, or of one half of it."""
    block_tokens, found = 0, []
    for line in read_lines(path):
        if half and half != half_of(line.value("id")):
            continue
        tokens = line.count("block")
        if not tokens or tokens != (block_tokens or tokens):
            line.refuse(f"'block' must be the same number of tokens on each line, and not {tokens}")
        block_tokens = tokens
        rows = line.value("requests")
        if not isinstance(rows, list) or not rows:
            line.refuse(f"'requests' must be a list of requests, not {shown(rows)}")
        prompts = [_prompt(line, row, block_tokens) for row in rows]
        found.append(_session(rows, prompts, block_tokens))
    if not any(session.num_blocks for session in found):
        of_half = f" in half {half}" if half else ""
        raise BadFile(f"{path}: no prompt{of_half} has a block")
    return block_tokens, found


def half_of(session: Any) -> int:
    """The half, 1 or 2, to which the id of a session belongs."""
    return 1 + hashlib.sha256(str(session).encode()).digest()[0] % 2


def _prompt(line: Line, row: Any, block_tokens: int) -> Runs:
    if not isinstance(row, list) or len(row) != 6 or not isinstance(row[5], list):
        line.refuse(f"a request is a list of 6 with its runs as the last, not {shown(row)}")
    numbers = row[:1] + row[3:5]
    if not all(map(is_number, numbers)) or not is_count(row[1]) or not row[1] or not is_count(row[2]):
        line.refuse(f"a request begins with its time, tokens and seconds, not {shown(row[:5])}")
    if len(row[5]) % 2 or not all(is_count(each) and each < 1 << 31 for each in row[5]):
        line.refuse(f"runs are pairs of whole numbers, not {shown(row[5])}")
    pairs = np.array(row[5], np.int64).reshape(-1, 2)
    runs = Runs(pairs[:, 0], pairs[:, 1])
    if (blocks := int(runs.lengths.sum())) * block_tokens > row[1]:
        line.refuse(f"{blocks} blocks of {block_tokens} tokens are more than the prompt's {row[1]} tokens")
    return runs


def _session(rows: list[Any], prompts: list[Runs], block_tokens: int) -> RecordedSession:
    """A session with its answers, found in the first later prompt that continues theirs: a prompt's last block names
    all before it."""
    answers = [NO_RUNS] * len(rows)
    open_ends: list[tuple[int, int, int, int]] = []
    """Number of a prompt, the number of its blocks, the last one, and the number of blocks with its answer."""
    num_blocks = 0
    lengths = []
    for number, (row, runs) in enumerate(zip(rows, prompts, strict=True)):
        numbers = runs.numbers()
        left = []
        for waiting in open_ends:
            which, length, last, end = waiting
            if length < len(numbers) and numbers[length - 1] == last:
                answers[which] = runs_of(numbers[length:end]) if length < end else NO_RUNS
            else:
                left.append(waiting)
        open_ends = left
        lengths.append(len(numbers))
        if len(numbers):
            open_ends.append((number, len(numbers), int(numbers[-1]), (row[1] + row[2]) // block_tokens))
            num_blocks = max(num_blocks, int(numbers.max()) + 1)
    return RecordedSession(
        [
            RecordedRequest(row[1], row[2], min(row[3], MAX_THINK), row[4], runs, answer, length)
            for row, runs, answer, length in zip(rows, prompts, answers, lengths, strict=True)
        ],
        num_blocks,
    )
