"""Measure multi-turn conversations at an OpenAI-compatible server, such as vLLM with and without kvsidecar.

    python examples/chat.py --url http://localhost:8000 --users 16 --turns 6

Each user sends the whole conversation again with each turn, as chat clients do, so all but the last message can be a
hit. Shows the time to the first token by turn: without offload it grows when the GPU's own cache is too small for all
users, with offload it stays. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import threading
import time
import urllib.parse
from collections import defaultdict
from typing import Any

WORDS = ("cache", "block", "store", "load", "engine", "token", "prompt", "layer", "batch", "memory", "copy", "stream")


def first_token_seconds(url: str, body: dict[str, Any], timeout: float) -> tuple[float, str]:
    """(seconds to the first token, the whole answer) of a streamed completion."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=timeout)
    began, first, text = time.monotonic(), 0.0, ""
    try:
        path = parts.path.rstrip("/") + "/v1/chat/completions"
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {reply.read(500).decode(errors='replace')}")
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                token = choice["delta"].get("content") or ""
                first = first or (time.monotonic() - began if token else 0.0)
                text += token
    finally:
        connection.close()
    return first or time.monotonic() - began, text


def talk(
    options: argparse.Namespace, user: int, model: str, seconds: dict[int, list[float]], failed: list[str]
) -> None:
    chance = random.Random(f"{options.seed} {user}")
    messages: list[dict[str, str]] = []
    for turn in range(options.turns):
        said = " ".join(chance.choice(WORDS) for _ in range(options.words))
        messages.append({"role": "user", "content": f"User {user}, turn {turn}: {said}"})
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": options.max_tokens,
            "temperature": 0,
            "stream": True,
        }
        try:
            first, answer = first_token_seconds(options.url, body, options.timeout)
        except (OSError, RuntimeError, ValueError) as error:
            failed.append(str(error))
            return
        seconds[turn].append(first)
        messages.append({"role": "assistant", "content": answer})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://localhost:8000", help="of the server, without /v1")
    parser.add_argument("--model", default="", help="by default the first that the server has")
    parser.add_argument("--users", type=int, default=16, help="conversations at the same time")
    parser.add_argument("--turns", type=int, default=6, help="of each conversation")
    parser.add_argument("--words", type=int, default=400, help="of each message of a user")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the same seed sends the same words")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    options = parser.parse_args()

    model = options.model
    if not model:
        parts = urllib.parse.urlsplit(options.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=options.timeout)
        try:
            connection.request("GET", parts.path.rstrip("/") + "/v1/models")
            model = json.load(connection.getresponse())["data"][0]["id"]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise SystemExit(f"{options.url} does not tell its models ({error}): is a server running there?") from None
        connection.close()
    seconds: dict[int, list[float]] = defaultdict(list)
    failed: list[str] = []
    began = time.monotonic()
    users = [
        threading.Thread(target=talk, args=(options, user, model, seconds, failed)) for user in range(options.users)
    ]
    for each in users:
        each.start()
    for each in users:
        each.join()
    took = time.monotonic() - began
    print(f"{model}: {options.users} users, {options.turns} turns of {options.words} words, seed {options.seed}")
    print("turn  first token: median     90 %")
    for turn, each in sorted(seconds.items()):
        ninety = statistics.quantiles(each, n=10)[-1] if len(each) > 1 else each[0]
        print(f"{turn:4}  {1000 * statistics.median(each):14.0f} ms  {1000 * ninety:5.0f} ms")
    print(f"{sum(map(len, seconds.values()))} answers in {took:.1f} s, {len(failed)} users failed")
    if failed:
        raise SystemExit(f"the first failure: {failed[0]}")


if __name__ == "__main__":
    main()
