"""Reads the requests in a log of vLLM or of a gateway.

- vLLM's, with ``--enable-log-requests`` and ``VLLM_LOGGING_LEVEL=DEBUG``, and no ``--max-log-len``; plain, or with its
  formatter for JSON. Other lines are ignored.
- A gateway's, a JSON object a line, with the time of the request (one of `TIMES`: seconds, milliseconds from 1e11 on,
  or ISO 8601) and one of

  - ``prompt_token_ids``;
  - ``hash_ids`` of prompt blocks, each hashed with all before it, of ``block_tokens`` tokens, and ``input_tokens``;
  - OpenAI's ``messages`` or ``prompt``, in the object itself or in its ``request`` or ``body``: texts are cut into
    pieces of equally many characters. Their number of tokens follows from ``prompt_tokens`` or ``usage`` in the log,
    otherwise from `CHARACTERS` a token;
  - ``session_id`` or ``conversation_id`` and the number of tokens: a prompt that is no shorter than the previous one of
    its session is taken to continue it, a shorter one to have nothing in common with it.

Answers are not known: their blocks are stored with the first prompt that names them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from kvsidecar.cli.size.json_lines import BadFile, Line, is_count, is_number, parse_line, read_text, shown
from kvsidecar.cli.size.progress import ReplayProgress
from kvsidecar.cli.size.uses import Use, Uses, runs_of

BLOCK_TOKENS: Final = 64
"""Size of the blocks into which prompts of tokens are cut."""
BLOCK_CHARACTERS: Final = 256
"""Size of the pieces into which texts are cut."""
CHARACTERS: Final = 4.0
"""Assumed length of a token, if the log has no numbers of tokens."""
WARM_SHARE: Final = 0.25
"""Share of a log's time, at its beginning, that is not counted."""
MILLISECONDS: Final = 1e11
"""Numbers from here on are times in milliseconds, not in seconds."""
YEAR: Final = 366 * 86400.0
VLLM: Final = re.compile(
    r"(?P<month>0[1-9]|1[0-2])-(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d) "
    r"\[.*prompt_token_ids: \[(?P<tokens>[\d, ]*)\]"
)
"""A prompt in vLLM's log. Its times have no year. The prompt's text, which may be anything, precedes its tokens."""
VLLM_MESSAGE: Final = re.compile(r"Request .*prompt_token_ids: \[(?P<tokens>[\d, ]*)\]", re.DOTALL)
"""A prompt in the ``message`` of a JSON object, whose ``asctime`` is the time."""
TIMES: Final = ("timestamp", "@timestamp", "time", "ts", "startTime", "start_time", "created_at", "created")
BODIES: Final = ("request", "body", "request_body")
"""Fields in which a gateway may log OpenAI's request, as an object or as a text of one."""
SESSIONS: Final = ("session_id", "conversation_id")
COUNTS: Final = ("prompt_tokens", "input_tokens")


class Unit(Enum):
    """What a prompt's blocks are cut from."""

    TOKENS = "tokens"
    HASHES = "hashes"
    TEXT = "a text"
    COUNT = "the number of its tokens"


class _Prompt(NamedTuple):
    at: float
    tokens: int
    """0: not known."""
    blocks: list[int]
    unit: Unit
    block_tokens: int = BLOCK_TOKENS
    characters: int = 0
    """Length of the prompt, if it is a text."""


class _Numbers:
    """Numbers blocks: the same content after the same blocks gets the same number."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}
        self._sessions: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of_tokens(self, tokens: list[int]) -> list[int]:
        whole = np.array(tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS], np.int64).reshape(-1, BLOCK_TOKENS)
        return self._chained(block.tobytes() for block in whole)

    def of_text(self, text: str) -> list[int]:
        whole = len(text) // BLOCK_CHARACTERS * BLOCK_CHARACTERS
        pieces = (text[i : i + BLOCK_CHARACTERS] for i in range(0, whole, BLOCK_CHARACTERS))
        return self._chained(piece.encode("utf-8", "replace") for piece in pieces)

    def of_hashes(self, hashes: Iterable[object]) -> list[int]:
        return [self._known.setdefault(each, len(self._known)) for each in hashes]

    def of_session(self, session: str, tokens: int) -> list[int]:
        """The session's blocks so far, and new ones for what it has grown by. If it has shrunk, all are new."""
        found = self._sessions.setdefault(session, [])
        blocks = tokens // BLOCK_TOKENS
        if blocks < len(found):
            found.clear()
        for _ in range(blocks - len(found)):
            found.append(self._known.setdefault(len(self._known), len(self._known)))
        return found.copy()

    def _chained(self, contents: Iterable[bytes]) -> list[int]:
        found: list[int] = []
        last = -1
        for content in contents:
            digest = blake2b(content, digest_size=16, salt=last.to_bytes(8, "big", signed=True)).digest()
            last = self._known.setdefault(digest, len(self._known))
            found.append(last)
        return found


def read_log(path: Path, progress: ReplayProgress | None = None) -> Uses:
    """The prompts of a log, in order of time. Raises BadFile: a line is wrong, or there is no prompt."""
    numbers, prompts, years = _Numbers(), list[_Prompt](), 0
    for text in read_text(path):
        if progress is not None:
            progress.read(path.name, text.number)
        line = None
        if text.text.startswith("{"):
            line = parse_line(path, text)
            prompt = _of_object(line, numbers)
        else:
            prompt = _of_vllm(text.text, numbers)
            if prompt is not None:
                prompt = prompt._replace(at=prompt.at + years * YEAR)
                if prompts and prompt.at < prompts[-1].at - YEAR / 2:
                    years, prompt = years + 1, prompt._replace(at=prompt.at + YEAR)
        if prompt is None:
            continue
        if prompts and (problem := _mixture(prompts[0], prompt)):
            raise BadFile(f"{path}, line {text.number}: {problem}")
        prompts.append(prompt)
    if not prompts:
        raise BadFile(f"{path}: there is no prompt; vLLM logs them with --enable-log-requests and its level at DEBUG")
    return _uses(path, prompts, len(numbers))


def _mixture(first: _Prompt, other: _Prompt) -> str:
    """Why the two cannot be in one log; empty if they can."""
    if other.unit is not first.unit:
        return f"its blocks are made from {other.unit.value}, those before from {first.unit.value}"
    if other.block_tokens != first.block_tokens:
        return f"its blocks have {other.block_tokens} tokens, those before {first.block_tokens}"
    return ""


def _uses(path: Path, prompts: list[_Prompt], num_blocks: int) -> Uses:
    prompts.sort(key=lambda prompt: prompt.at)
    first, name, block_tokens = prompts[0].at, path.name, prompts[0].block_tokens
    ratio = CHARACTERS
    if prompts[0].unit is Unit.TEXT:
        counted = [each for each in prompts if each.tokens]
        if counted:
            ratio = sum(each.characters for each in counted) / sum(each.tokens for each in counted)
        block_tokens = max(1, round(BLOCK_CHARACTERS / ratio))
        name += f", {ratio:.1f} characters a token" + ("" if counted else " assumed")
    uses = [
        Use(each.at - first, tokens, runs_of(np.array(each.blocks[: tokens // block_tokens], np.int64)))
        for each in prompts
        if (tokens := each.tokens or round(each.characters / ratio))
    ]
    return Uses(name, block_tokens, num_blocks, WARM_SHARE * (prompts[-1].at - first), uses)


# -- vLLM ----------------------------------------------------------------------------------------------------------


def _of_vllm(text: str, numbers: _Numbers) -> _Prompt | None:
    """The prompt on a line; None: there is none."""
    found = VLLM.search(text)
    return None if found is None else _of_tokens(_time_of(found), _ids(found["tokens"]), numbers)


def _ids(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each.strip()]


def _time_of(found: re.Match[str]) -> float:
    """Seconds, in a leap year: the log does not name the year."""
    month, day, hour, minute, second = (int(each) for each in found.group("month", "day", "hour", "minute", "second"))
    return datetime(2000, month, 1, tzinfo=UTC).timestamp() + ((day * 24 + hour) * 60 + minute) * 60 + second


# -- objects -------------------------------------------------------------------------------------------------------


def _of_object(line: Line, numbers: _Numbers) -> _Prompt | None:
    """The prompt of an object; None: it is another message of vLLM."""
    if line.has("asctime") and line.has("message"):
        found = VLLM_MESSAGE.match(str(line.value("message")))
        return None if found is None else _of_tokens(_timestamp(line, "asctime"), _ids(found["tokens"]), numbers)
    name = next((each for each in TIMES if line.has(each)), TIMES[0])
    at = _timestamp(line, name)
    if line.has("prompt_token_ids"):
        return _of_tokens(at, line.counts("prompt_token_ids"), numbers)
    if line.has("hash_ids"):
        return _of_hashes(at, line, numbers)
    for body in _bodies(line):
        if "messages" in body or "prompt" in body:
            return _of_request(at, line, body, numbers)
    session = next((each for each in SESSIONS if line.has(each)), None)
    tokens = _tokens(line)
    if session is None or not tokens:
        line.refuse(
            "there is no prompt: it needs 'prompt_token_ids', 'hash_ids', OpenAI's 'messages' or 'prompt', or a "
            "'session_id' with 'prompt_tokens'"
        )
    return _Prompt(at, tokens, numbers.of_session(str(line.value(session)), tokens), Unit.COUNT)


def _of_tokens(at: float, tokens: list[int], numbers: _Numbers) -> _Prompt:
    return _Prompt(at, len(tokens), numbers.of_tokens(tokens), Unit.TOKENS)


def _of_hashes(at: float, line: Line, numbers: _Numbers) -> _Prompt:
    block_tokens, tokens, hashes = line.count("block_tokens"), line.count("input_tokens"), line.value("hash_ids")
    if not isinstance(hashes, list) or not all(isinstance(each, int | str) for each in hashes):
        line.refuse(f"'hash_ids' must be a list of numbers or texts, not {shown(hashes)}")
    if not block_tokens:
        line.refuse("'block_tokens' must be at least 1")
    return _Prompt(at, tokens, numbers.of_hashes(hashes[: tokens // block_tokens]), Unit.HASHES, block_tokens)


def _of_request(at: float, line: Line, body: Mapping[str, Any], numbers: _Numbers) -> _Prompt:
    prompt = body.get("prompt")
    if "messages" not in body and isinstance(prompt, list) and all(map(is_count, prompt)):
        return _of_tokens(at, prompt, numbers)
    text = _text_of(line, body)
    return _Prompt(at, _tokens(line), numbers.of_text(text), Unit.TEXT, characters=len(text))


def _bodies(line: Line) -> Iterator[Mapping[str, Any]]:
    """The objects that may be OpenAI's request."""
    yield line.values
    for name in BODIES:
        body = line.values.get(name)
        if isinstance(body, str) and body.startswith("{"):
            try:
                body = json.loads(body)
            except (ValueError, RecursionError):
                continue
        if isinstance(body, dict):
            yield body


def _text_of(line: Line, body: Mapping[str, Any]) -> str:
    """The text of the prompt in its order: tools, then messages."""
    if "messages" not in body:
        if not isinstance(body["prompt"], str):
            line.refuse(f"'prompt' must be a text or a list of token ids, not {shown(body['prompt'])}")
        return body["prompt"]
    messages, tools = body["messages"], body.get("tools")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        line.refuse(f"'messages' must be a list of objects, not {shown(messages)}")
    return "".join(_part(each) for each in ([tools] if tools else []) + messages)


def _part(value: Any) -> str:
    """A text that is equal for equal values. A picture or a sound becomes a digest: its bytes are no tokens."""
    if isinstance(value, str):
        long = value.startswith("data:")
        return blake2b(value.encode("utf-8", "replace"), digest_size=16).hexdigest() if long else value
    if isinstance(value, dict):
        return "".join(f"{name}:{_part(each)}\n" for name, each in value.items())
    if isinstance(value, list):
        return "".join(map(_part, value))
    return json.dumps(value)


def _tokens(line: Line) -> int:
    """Number of tokens in the prompt; 0 if the log does not have it."""
    places = [line.values, line.values.get("usage"), line.values.get("response")]
    if isinstance(places[-1], dict):
        places.append(places[-1].get("usage"))
    for place in places:
        for name in COUNTS:
            if isinstance(place, dict) and is_count(place.get(name)):
                return int(place[name])
    return 0


def _timestamp(line: Line, name: str) -> float:
    value = line.value(name)
    if is_number(value):
        return value / 1000 if value >= MILLISECONDS else float(value)
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        line.refuse(f"{name!r} must be seconds, milliseconds or ISO 8601, not {shown(value)}")
