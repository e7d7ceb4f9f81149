"""The requests of a log: of vLLM, or of a gateway.

- vLLM's, with ``--enable-log-requests`` and ``VLLM_LOGGING_LEVEL=DEBUG``, and no ``--max-log-len``. Lines of anything
  else are passed over.
- A gateway's, a JSON object a line: ``timestamp`` (seconds, milliseconds from 1e11 on, or ISO 8601) and either
  ``prompt_token_ids``, or ``hash_ids`` of prompt blocks, each hashed with all before it, of ``block_tokens`` tokens,
  and ``input_tokens``.

Answers are not known: their blocks are stored with the first prompt that names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from benchmarks.fleet.uses import Use, Uses, runs_of
from kvsidecar.cli.size.json_lines import BadFile, Line, is_number, parse_line, read_text, shown

BLOCK_TOKENS: Final = 64
"""Into which prompts of tokens are cut."""
WARM_SHARE: Final = 0.25
"""Of a log's time that is not counted."""
MILLISECONDS: Final = 1e11
"""Times from here on."""
YEAR: Final = 366 * 86400.0
VLLM: Final = re.compile(
    r"(?P<month>0[1-9]|1[0-2])-(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d) "
    r"\[.*prompt_token_ids: \[(?P<tokens>[\d, ]*)\]"
)
"""vLLM's times have no year. A prompt's text stands before its tokens, whatever it says."""


class _Prompt(NamedTuple):
    at: float
    tokens: int
    blocks: list[int]


class _Numbers:
    """Numbers of blocks: the same tokens behind the same ones have the same number."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of_tokens(self, tokens: list[int]) -> list[int]:
        whole = np.array(tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS], np.int64).reshape(-1, BLOCK_TOKENS)
        found: list[int] = []
        for block in whole:
            key = (found[-1] if found else -1, block.tobytes())
            found.append(self._known.setdefault(key, len(self._known)))
        return found

    def of_hashes(self, hashes: Iterable[object]) -> list[int]:
        return [self._known.setdefault(each, len(self._known)) for each in hashes]


def read_log(path: Path) -> Uses:
    """The prompts of a log, in order of time.

    Raises:
        BadFile: a line is wrong, or there is no prompt.
    """
    numbers, prompts, block_tokens, years = _Numbers(), list[_Prompt](), 0, 0
    for text in read_text(path):
        if text.text.startswith("{"):
            line = parse_line(path, text)
            prompt, tokens = _of_gateway(line, numbers)
            if tokens != (block_tokens or tokens):
                line.refuse(f"its blocks have {tokens} tokens, those before {block_tokens}")
        elif (found := VLLM.search(text.text)) is not None:
            at = _time_of(found) + years * YEAR
            if prompts and at < prompts[-1].at - YEAR / 2:
                years, at = years + 1, at + YEAR
            ids = [int(each) for each in found["tokens"].split(",") if each.strip()]
            prompt, tokens = _Prompt(at, len(ids), numbers.of_tokens(ids)), BLOCK_TOKENS
        else:
            continue
        block_tokens = tokens
        prompts.append(prompt)
    if not prompts:
        raise BadFile(f"{path}: there is no prompt; vLLM logs them with --enable-log-requests and its level at DEBUG")
    prompts.sort(key=lambda prompt: prompt.at)
    first = prompts[0].at
    uses = [
        Use(each.at - first, each.tokens, runs_of(np.array(each.blocks, np.int64))) for each in prompts if each.tokens
    ]
    return Uses(path.name, block_tokens, len(numbers), WARM_SHARE * (prompts[-1].at - first), uses)


def _time_of(found: re.Match[str]) -> float:
    """Seconds, in a leap year: the log does not say which year it was."""
    month, day, hour, minute, second = (int(each) for each in found.group("month", "day", "hour", "minute", "second"))
    return datetime(2000, month, 1, tzinfo=UTC).timestamp() + ((day * 24 + hour) * 60 + minute) * 60 + second


def _of_gateway(line: Line, numbers: _Numbers) -> tuple[_Prompt, int]:
    """A prompt, and the tokens of its blocks."""
    at = _timestamp(line)
    if line.has("prompt_token_ids"):
        tokens = line.counts("prompt_token_ids")
        return _Prompt(at, len(tokens), numbers.of_tokens(tokens)), BLOCK_TOKENS
    block_tokens, input_tokens, hashes = line.count("block_tokens"), line.count("input_tokens"), line.value("hash_ids")
    if not isinstance(hashes, list) or not all(isinstance(each, int | str) for each in hashes):
        line.refuse(f"'hash_ids' must be a list of numbers or texts, not {shown(hashes)}")
    if not block_tokens:
        line.refuse("'block_tokens' must be at least 1")
    return _Prompt(at, input_tokens, numbers.of_hashes(hashes[: input_tokens // block_tokens])), block_tokens


def _timestamp(line: Line) -> float:
    value = line.value("timestamp")
    if is_number(value):
        return value / 1000 if value >= MILLISECONDS else float(value)
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        line.refuse(f"'timestamp' must be seconds, milliseconds or ISO 8601, not {shown(value)}")
