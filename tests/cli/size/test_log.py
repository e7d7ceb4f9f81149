"""Prompts of logs: what vLLM and gateways write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.cli.size.json_lines import BadFile
from kvsidecar.cli.size.log import BLOCK_CHARACTERS, read_log
from kvsidecar.cli.size.uses import Uses

FIRST, SECOND = [1] * 64 + [2] * 64 + [3], [1] * 64 + [4] * 64 + [2] * 64
"""Their first block is the same. The last one of the second has the content of another one, but not behind the same."""


def read(path: Path, *rows: Any) -> Uses:
    """A log with these lines; an object becomes one of JSON."""
    file = path / "requests.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return read_log(file)


def blocks(uses: Uses) -> list[list[int]]:
    return [use.runs.numbers().tolist() for use in uses.uses]


def text_of(name: str, pieces: int) -> str:
    """A text in so many pieces, which begins as longer ones of the same name."""
    return "".join(f"{name} {number}".ljust(BLOCK_CHARACTERS, ".") for number in range(pieces))


def test_vllm_writes_its_log_as_json_too(tmp_path: Path) -> None:
    """With `--logging-config.formatter json`. The first object is about something else."""

    def line(at: str, message: str) -> dict[str, Any]:
        return {"asctime": at, "levelname": "DEBUG", "name": "vllm.request_logger", "message": message}

    def prompt(at: str, tokens: list[int]) -> dict[str, Any]:
        text = "'hello\\nprompt_token_ids: [9, 9]'"
        return line(at, f"Request c-1 details: prompt: {text}, prompt_token_ids: {tokens}, prompt_embeds shape: None.")

    uses = read(
        tmp_path,
        "(APIServer pid=7) INFO 11-25 23:28:00 [api_server.py:1] before the logging is set up",
        line("2026-11-25 23:28:00,000", "Received request c-1: params: None, lora_request: None."),
        prompt("2026-11-25 23:28:00,000", FIRST),
        prompt("2026-11-25 23:28:01,500", SECOND),
    )
    assert [(use.at, use.tokens) for use in uses.uses] == [(0.0, 129), (1.5, 192)]
    assert blocks(uses) == [[0, 1], [0, 2, 3]]


@pytest.mark.parametrize("place", ["", "request", "body", "text"])
def test_requests_to_an_openai_server_are_cut_by_their_texts(place: str, tmp_path: Path) -> None:
    """Tokens are what the log tells of some of them: here two characters each."""
    system = {"role": "system", "content": text_of("system", 4)}
    question = {"role": "user", "content": [{"type": "text", "text": text_of("question", 2)}]}

    def line(at: float, *messages: Any, **more: Any) -> dict[str, Any]:
        body = {"model": "m", "messages": list(messages)}
        places: dict[str, dict[str, Any]] = {"": body, "request": {"request": body}, "body": {"body": body}}
        held = places.get(place)
        return {"startTime": at, **(held or {"request_body": json.dumps(body)}), **more}

    tokens = 4 * BLOCK_CHARACTERS // 2
    usage = {"response": {"usage": {"prompt_tokens": tokens + 20}}}
    uses = read(tmp_path, line(10, system, **usage), line(12, system, question), line(11, {**system, "role": "user"}))
    assert uses.block_tokens == pytest.approx(BLOCK_CHARACTERS / 2, abs=4)
    assert [use.at for use in uses.uses] == [0, 1, 2]
    first, other, longer = blocks(uses)
    assert len(first) == 4
    assert len(longer) == 6
    assert longer[:4] == first
    assert not set(other) & set(longer), "its role is another one"


def test_tools_come_before_messages_and_pictures_count_little(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": text_of("tool", 3)}}]
    picture = {"role": "user", "content": [{"image_url": {"url": "data:image/png;base64," + "A" * 9000}}]}
    rows: list[dict[str, Any]] = [
        {"timestamp": at, "tools": tools, "messages": [{"role": "user", "content": content}]}
        for at, content in ((1, text_of("a", 1)), (2, text_of("b", 1)))
    ]
    uses = read(tmp_path, *rows, {"timestamp": 3, "messages": [picture]})
    one, two, pictured = blocks(uses)
    assert one[:3] == two[:3]
    assert one[3:] != two[3:]
    assert pictured == []
    assert uses.block_tokens == BLOCK_CHARACTERS / 4
    assert "4.0 characters a token assumed" in uses.name


def test_a_prompt_may_be_a_text_or_tokens(tmp_path: Path) -> None:
    assert [len(each) for each in blocks(read(tmp_path, {"time": 1, "prompt": text_of("a", 3)}))] == [3]
    assert blocks(read(tmp_path, {"created": 1, "request": {"prompt": FIRST}})) == [[0, 1]]


def test_of_numbers_of_tokens_a_session_is_taken_to_grow(tmp_path: Path) -> None:
    """A prompt that is shorter than the one before was rewritten, as after a compaction."""
    rows = [("s", 130), ("t", 64), ("s", 200), ("s", 64), ("s", 128)]
    lines = [{"ts": at, "session_id": name, "prompt_tokens": tokens} for at, (name, tokens) in enumerate(rows)]
    assert blocks(read(tmp_path, *lines)) == [[0, 1], [2], [0, 1, 3], [4], [4, 5]]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"timestamp": 1}], "line 1: there is no prompt: it needs 'prompt_token_ids', 'hash_ids', OpenAI's"),
        ([{"timestamp": 1, "session_id": "s"}], "line 1: there is no prompt"),
        ([{"prompt": "a"}], "line 1: there is no 'timestamp'"),
        ([{"created_at": "noon", "prompt": "a"}], "line 1: 'created_at' must be seconds, milliseconds or ISO 8601"),
        ([{"time": 1, "messages": "hello"}], "line 1: 'messages' must be a list of objects"),
        ([{"time": 1, "prompt": {"a": 1}}], "line 1: 'prompt' must be a text or a list of token ids"),
        (
            [{"time": 1, "prompt": "a"}, {"time": 2, "prompt_token_ids": [1]}],
            "line 2: its blocks are made from tokens, those before from a text",
        ),
        ([{"time": 1, "prompt": "a"}, "{"], "line 2: it is not JSON"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(rows: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile) as refused:
        read(tmp_path, *rows)
    assert said in str(refused.value)
