"""A small agent that says, with each request, when its prompt is used next.

    vllm serve Qwen/Qwen3-8B --enable-auto-tool-choice --tool-call-parser hermes --kv-transfer-config ...
    python examples/agent_loop.py --url http://localhost:8000

Type a question, or several, one a line. The model may call two tools: one reads the clock, and one has a sub-agent
look into something. Nobody knows before the answer whether the model calls a tool, so a request says both pauses, and
the connector takes the one for tools if the answer has one of its `tool_tokens`. A sub-agent does not come back, and
says so at once. When the input ends, the session is over: its last prompt is sent once more, for one token.

`kvsidecar serve --eviction rhythm` then keeps the blocks of a session that is back soon, and gives those of one that is
over first. Any other server ignores what is said. For SGLang give --sglang: there it is in `custom_params`. Needs
nothing but Python.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.parse
from typing import Any

PERSON, TOOL = "2min", "5s"
"""How long a person and a tool usually take; rough values will do."""
SYSTEM = "You are a helpful assistant. Use the tools where they help, and answer in a few sentences."
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}
    for name, text, parameters in (
        ("read_clock", "The time and date.", {"type": "object", "properties": {}}),
        (
            "research",
            "Have an assistant look into a question.",
            {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]},
        ),
    )
]


class Server:
    """An OpenAI-compatible server.

    Args:
        params: name of what a server passes on to what keeps its KV.
    """

    def __init__(self, url: str, model: str, timeout: float, params: str) -> None:
        self._parts, self._timeout, self._params = urllib.parse.urlsplit(url), timeout, params
        try:
            self._model = model or self._call("GET", "/v1/models")["data"][0]["id"]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise SystemExit(f"{url} does not tell its models ({error}): is a server running there?") from None

    def ask(self, messages: list[dict[str, Any]], next_use: dict[str, Any], **more: Any) -> dict[str, Any]:
        """The model's message.

        Args:
            next_use: of this prompt, for kvsidecar.
        """
        body = {"model": self._model, "messages": messages, self._params: {"kvsidecar": next_use}, **more}
        try:
            message: dict[str, Any] = self._call("POST", "/v1/chat/completions", json.dumps(body))["choices"][0][
                "message"
            ]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise SystemExit(f"the server did not answer: {error}") from None
        return message

    def _call(self, method: str, path: str, body: str | None = None) -> Any:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.netloc, timeout=self._timeout)
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                raise ValueError(f"HTTP {reply.status}: {reply.read(500).decode(errors='replace')}")
            return json.load(reply)
        finally:
            connection.close()


def use_tool(server: Server, name: str, arguments: str) -> str:
    if name == "read_clock":
        return time.strftime("%A, %d %B %Y, %H:%M")
    if name == "research":
        asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": arguments}]
        return str(server.ask(asked, {"over": True}).get("content") or "")  # it reports, and does not come back
    return f"there is no tool {name}"


def answer(server: Server, messages: list[dict[str, Any]], most_steps: int) -> str:
    """Let the model use tools until it answers. Adds all messages."""
    for _ in range(most_steps):
        message = server.ask(messages, {"pause": PERSON, "tool_pause": TOOL}, tools=TOOLS)
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            return str(message.get("content") or "")
        for call in calls:
            function = call["function"]
            print(f"  ({function['name']} {function['arguments']})")
            found = use_tool(server, function["name"], function["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
    return f"(no answer after {most_steps} steps)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://localhost:8000", help="of the server, without /v1")
    parser.add_argument("--model", default="", help="by default the first that the server has")
    parser.add_argument("--steps", type=int, default=10, help="most requests for one question")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    parser.add_argument("--sglang", action="store_true", help="the server is SGLang's")
    options = parser.parse_args()

    params = "custom_params" if options.sglang else "kv_transfer_params"
    server = Server(options.url, options.model, options.timeout, params)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    try:
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.strip()})
            print(answer(server, messages, options.steps), flush=True)
    except KeyboardInterrupt:
        pass
    if len(messages) > 1:
        server.ask(messages, {"over": True}, tools=TOOLS, max_tokens=1)


if __name__ == "__main__":
    main()
