"""NVIDIA AIPerf replays recorded sessions of coding agents against a small vLLM on the CPU, with the connector.

    python3 -m venv .venv-aiperf && .venv-aiperf/bin/pip install aiperf==0.13.0
    .venv-vllm/bin/python -m benchmarks.vllm.aiperf --trace agentic.jsonl.xz

It shows that the recognised client runs, and how it is started; on the CPU its figures say nothing about a GPU. The
sessions are written as AIPerf's loader `weka_trace` reads them, a file each: a recorded block becomes --block-tokens
tokens, and times are divided by --speed. Tokens are those of the small model, whose tokenizer AIPerf reads from its
folder: AIPerf's own (`builtin`) would be downloaded. What is left of a command line after -- goes to AIPerf. Prints
what AIPerf prints, and what the engine has counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.vllm.engine import CPU_ENVIRONMENT, ENVIRONMENT
from kvsidecar.bench.processes import private_daemon
from kvsidecar.cli.size.agentic import RecordedSession, read_sessions
from kvsidecar.support.units import parse_size

NAME = "tiny"
MODEL = Path(__file__).parents[2] / "examples" / "tiny_model.py"
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
CONTEXT = 4096
"""Tokens of the small model, whose KV takes 1 KiB each."""
GPU_BYTES = "5M"
"""Of the engine's own cache: little more than the longest prompt."""
ANSWER_TOKENS = 16
"""At most. With only a few of these random bytes, AIPerf may see no text, and count an error."""
TEMPLATE_TOKENS = 256
"""That the template and the answer add to a prompt, at most."""
START_SECONDS = 600.0
COUNTED = re.compile(
    r"^(vllm:(?:external_)?prefix_cache_(?:queries|hits)_total|vllm:kvsidecar_(?:stored_blocks|loaded_tokens)_total)"
    r"\{.*\} (\S+)$",
    re.MULTILINE,
)
"""Of the engine's metrics."""


def weka_trace(
    name: str, session: RecordedSession, block_tokens: int, speed: float, most_tokens: int
) -> dict[str, Any] | None:
    """A session as AIPerf's ``WekaTrace``, up to its first prompt of more than ``most_tokens``; None: that is its
    first.

    Args:
        block_tokens: that a recorded block has.
        speed: all times are divided by it.
    """
    requests: list[dict[str, Any]] = []
    at = 0.0
    for each in session.requests:
        hashes = each.runs.numbers().tolist()
        if len(hashes) * block_tokens > most_tokens:
            break
        at += each.think / speed if requests else 0.0
        requests.append(
            {
                "t": round(at, 3),
                "type": "s",
                "model": NAME,
                "in": max(1, len(hashes) * block_tokens),
                "out": max(1, min(each.output_tokens, ANSWER_TOKENS)),
                "hash_ids": hashes,
                "api_time": round(each.api / speed, 3),
                "think_time": round(each.think / speed, 3),
            }
        )
        at += each.api / speed
    if not requests:
        return None
    return {"id": name, "models": [NAME], "block_size": block_tokens, "hash_id_scope": "local", "requests": requests}


def write_traces(options: argparse.Namespace, directory: Path) -> int:
    """The sessions that AIPerf replays, a file each. Returns their number."""
    directory.mkdir()
    _, recorded = read_sessions(options.trace)
    most, written = CONTEXT - TEMPLATE_TOKENS, 0
    for number, session in enumerate(recorded):
        name = f"session_{number:04}"
        trace = weka_trace(name, session, options.block_tokens, options.speed, most)
        if trace is not None and len(trace["requests"]) > 1:
            (directory / f"{name}.json").write_text(json.dumps(trace))
            written += 1
        if written == options.sessions:
            break
    return written


@contextmanager
def server(directory: Path, daemon_socket: str) -> Iterator[str]:
    """vLLM's server with a small model. Yields its URL once it answers."""
    subprocess.run([sys.executable, str(MODEL), str(directory / "model")], check=True, stdout=subprocess.DEVNULL)
    (directory / "template.jinja").write_text(TEMPLATE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "KVSidecarConnector",
        "kv_connector_module_path": "kvsidecar.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": daemon_socket},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory / "model")]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += [
        "--max-model-len",
        str(CONTEXT),
        "--block-size",
        "32",
        "--kv-cache-memory-bytes",
        GPU_BYTES,
        "--enable-prompt-tokens-details",
    ]
    command += ["--chat-template", str(directory / "template.jinja"), "--kv-transfer-config", json.dumps(transfer)]
    own = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment = {**os.environ, **own, **CPU_ENVIRONMENT}
    log = directory / "vllm.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            time.sleep(1)
    raise SystemExit(f"vLLM does not answer:\n{log.read_text(errors='replace')[-4000:]}")


def command_of(options: argparse.Namespace, url: str, traces: Path, artifacts: Path) -> list[str]:
    """AIPerf's command line."""
    return [
        str(options.aiperf), "profile",
        "--model", NAME, "--url", url, "--endpoint-type", "chat", "--streaming",
        "--custom-dataset-type", "weka_trace", "--input-file", str(traces),
        "--tokenizer", str(traces.parent / "model"), "--use-server-token-count",
        "--concurrency", str(options.concurrency), "--benchmark-duration", str(options.seconds),
        "--extra-inputs", "ignore_eos:true",
        "--artifact-dir", str(artifacts), "--ui", "none",
        *options.more,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="sessions, as kvsidecar.cli.size.agentic describes")
    parser.add_argument("--aiperf", type=Path, default=Path(".venv-aiperf/bin/aiperf"), help="its command")
    parser.add_argument("--sessions", type=int, default=32, help="that are replayed; the first ones that fit")
    parser.add_argument("--concurrency", type=int, default=8, help="sessions at once")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--block-tokens", type=int, default=1, help="that a recorded block becomes")
    parser.add_argument("--speed", type=float, default=60.0, help="that times are divided by")
    parser.add_argument("--pool", type=parse_size, default="8MiB", help="of the daemon")
    parser.add_argument("--eviction", default="rhythm", help="of the daemon")
    parser.add_argument("--logs", type=Path, help="folder for logs, traces and AIPerf's files; it must not exist")
    parser.add_argument("more", nargs="*", help="options for AIPerf, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvs-") as temporary:
        directory = options.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=options.logs is None)
        written = write_traces(options, directory / "traces")
        print(f"{written} sessions", flush=True)
        flags = ["--eviction", options.eviction]
        with private_daemon(directory, "host", options.pool, flags) as daemon, server(directory, daemon.socket) as url:
            print("vLLM is ready", flush=True)
            command = command_of(options, url, directory / "traces", directory / "aiperf")
            online = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
            ran = subprocess.run(command, env=online, check=False)  # offline it takes a folder for a name on the hub
            metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
            for name, value in sorted(COUNTED.findall(metrics)):
                print(f"{name} {float(value):.0f}")
    raise SystemExit(ran.returncode)


if __name__ == "__main__":
    main()
