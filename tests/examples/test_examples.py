"""examples/: each is run as its page says, as far as a machine without containers allows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsidecar.integrations import next_use
from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.protocol.paths import default_socket_path
from tests.harness import SECONDS, DaemonProcess, environment, eventually

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NODE, NPM, PROMETHEUS = shutil.which("node"), shutil.which("npm"), shutil.which("prometheus")
COMPOSE: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())


def run(*command: str, cwd: Path | None = None, typed: str = "", **variables: str) -> str:
    """Standard output of a command that succeeds."""
    env = environment(**variables)
    ran = subprocess.run(command, cwd=cwd, env=env, input=typed, capture_output=True, text=True, timeout=2 * SECONDS)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# -- engines -------------------------------------------------------------------------------------------------------


def test_the_small_engine_is_as_short_as_the_readme_says_and_runs(daemon: DaemonProcess) -> None:
    (lines,) = re.findall(r"in (\d+) lines", (ROOT / "README.md").read_text())
    assert len((EXAMPLES / "engine.py").read_text().splitlines()) == int(lines)
    assert "3 blocks can be loaded" in run(sys.executable, str(EXAMPLES / "engine.py"), KVSIDECAR_SOCKET=daemon.socket)


def test_made_up_conversations_hit_what_they_have_stored(short_dir: Path) -> None:
    with DaemonProcess(short_dir, "--pool-size", "64MiB") as daemon:
        daemon.wait_ready()
        words = [str(EXAMPLES / "load.py"), "--seconds", "3", "--conversations", "2", "--turns-per-second", "1000"]
        said = run(sys.executable, *words, KVSIDECAR_SOCKET=daemon.socket)
        turns, hits, wanted = map(int, re.findall(r"(\d+) turns, (\d+) of (\d+) blocks", said)[-1])
        assert turns > 2
        assert wanted / 2 < hits <= wanted
        loaded, needed = (daemon.metric(f"kvsidecar_prompt_tokens_{each}_total") for each in ("loaded", "needed"))
        assert loaded == 16 * hits, "the hit rate that kvsidecar status shows"
        assert loaded <= needed <= 16 * wanted, "of those turns that began after it was attached"


def test_made_up_conversations_fill_the_pool_and_read_from_the_disk(short_dir: Path) -> None:
    """Without options, at the smallest size of a pool: what one turn reads another one has pushed out."""
    disk = ("--disk-dir", str(short_dir / "disk"), "--disk-size", "64MiB", "--disk-admission", "all")
    with DaemonProcess(short_dir, "--pool-size", "8MiB", *disk) as daemon:
        daemon.wait_ready()
        daemon.wait_log("tier on")
        command = [sys.executable, str(EXAMPLES / "load.py"), "--turns-per-second", "1000"]
        env = environment(KVSIDECAR_SOCKET=daemon.socket)
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as load:
            try:
                eventually(lambda: daemon.metric('kvsidecar_tier_copied_bytes_total{direction="read",tier="disk"}') > 0)
                eventually(lambda: daemon.get("/status")[1]["pool"]["used_bytes"] > 0.8 * (8 << 20))
            finally:
                load.terminate()
            assert load.stdout is not None
            assert load.stdout.readline() == "5 conversations, blocks of 64 KiB\n", "half as much again as the pool"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("engine.py",), "no kvsidecar answers at "),
        (("chat.py", "--url", "http://127.0.0.1:1"), "http://127.0.0.1:1 does not tell its models ("),
        (("agent_loop.py", "--url", "http://127.0.0.1:1"), "http://127.0.0.1:1 does not tell its models ("),
    ],
)
def test_an_example_that_finds_nobody_says_so_in_a_sentence(words: tuple[str, ...], said: str, short_dir: Path) -> None:
    env = environment(KVSIDECAR_SOCKET=str(short_dir / "none.sock"))
    command = [sys.executable, str(EXAMPLES / words[0]), *words[1:]]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 1
    assert ran.stderr.startswith(said)
    assert ran.stderr.count("\n") == 1


def test_the_small_engine_says_why_the_daemon_is_not_ready(short_dir: Path) -> None:
    """What a reader of the README first sees who may lock 8 MiB."""
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS="pool.pin_chunk=raise(no more pages)") as daemon:
        eventually(lambda: daemon.get("/ready")[1]["state"] == "failed")
        command = [sys.executable, str(EXAMPLES / "engine.py")]
        ran = subprocess.run(
            command, env=environment(KVSIDECAR_SOCKET=daemon.socket), capture_output=True, text=True, timeout=SECONDS
        )
    assert ran.returncode == 1
    assert "no more pages" in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


# -- another language ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples of Node, installed as their page says."""
    if NODE is None or NPM is None:
        pytest.skip("Node and npm are not installed")
    root = tmp_path_factory.mktemp("node")
    place = root / "examples" / "node"
    shutil.copytree(EXAMPLES / "node", place, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(ROOT / "proto", root / "proto")
    quiet = ("--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error")
    run(str(NPM), "install", *quiet, cwd=place)
    return place


def test_an_engine_in_node_stores_looks_up_and_loads_with_the_stubs_alone(
    daemon: DaemonProcess, node_place: Path
) -> None:
    said = run(str(NODE), "engine.js", cwd=node_place, KVSIDECAR_SOCKET=daemon.socket)
    assert said.splitlines() == [
        "store: OUTCOME_DONE, 4096 bytes",
        "1 of 1 blocks can be loaded",
        "load: OUTCOME_DONE, the bytes are equal",
    ]
    assert daemon.metric("kvsidecar_attached_ranks") == 0
    assert daemon.metric("kvsidecar_leases") == 0


def test_a_router_in_node_finds_what_an_engine_has_stored(
    daemon: DaemonProcess, node_place: Path, tmp_path: Path
) -> None:
    run(sys.executable, str(EXAMPLES / "engine.py"), KVSIDECAR_SOCKET=daemon.socket)
    hashes = [hashlib.sha256(b"block %d" % number).hexdigest() for number in (0, 1, 2, 99)]
    said = run(str(NODE), "lookup.js", "my-model", *hashes, cwd=node_place, KVSIDECAR_SOCKET=daemon.socket)
    assert "STATE_READY" in said
    assert "3 of 4 blocks can be loaded" in said

    # By default it looks where a daemon of the same user listens.
    (node_place / "user.js").write_text("process.geteuid = () => Number(process.env.EUID);")
    command = [str(NODE), "--require", "./user.js", "lookup.js"]
    for uid, runtime in ((0, "/none"), (1234, str(tmp_path)), (1234, "none"), (1234, "")):
        variables = {**environment(), "EUID": str(uid), "XDG_RUNTIME_DIR": runtime}
        ran = subprocess.run(command, cwd=node_place, env=variables, capture_output=True, text=True, timeout=SECONDS)
        where = default_socket_path({"XDG_RUNTIME_DIR": runtime}, uid)
        assert ran.stderr.startswith(f"{where}: ") or os.path.exists(where), ran.stderr


# -- chat ------------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """As an OpenAI-compatible server streams: two tokens, then the end. Asked without a stream, it gives the messages
    that it was told to. Keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.messages: Iterator[dict[str, Any]] = iter(())


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"id": "tiny"}]}', "application/json")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        if not asked.get("stream"):
            message = {"role": "assistant", **next(self.server.messages)}
            self._answer(json.dumps({"choices": [{"message": message}]}).encode(), "application/json")
            return
        deltas: list[dict[str, str]] = [{"role": "assistant"}, {"content": "one "}, {"content": "two"}]
        lines = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas]
        self._answer("".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_chat_sends_the_whole_conversation_with_each_turn(server: Server) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    words = ["--users", "2", "--turns", "3", "--words", "5", "--seed", "7"]
    said = run(sys.executable, str(EXAMPLES / "chat.py"), "--url", url, *words)
    assert "6 answers" in said
    assert "0 users failed" in said
    longest = [each["messages"] for each in server.asked if len(each["messages"]) == 5]
    assert len(longest) == 2
    assert [each["role"] for each in longest[0]] == ["user", "assistant"] * 2 + ["user"]
    assert longest[0][1]["content"] == "one two"
    assert {each["model"] for each in server.asked} == {"tiny"}
    first = [each["messages"][0]["content"] for each in server.asked]
    assert len(set(first)) == 2
    run(sys.executable, str(EXAMPLES / "chat.py"), "--url", url, *words)
    assert sorted(first) == sorted(each["messages"][0]["content"] for each in server.asked[len(first) :])


# -- an agent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "params"), [((), "kv_transfer_params"), (("--sglang",), "custom_params")])
def test_an_agent_says_with_each_request_when_its_prompt_is_used_next(
    server: Server, flags: tuple[str, ...], params: str
) -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": '{"question": "why"}'}}
        for name in ("read_clock", "research", "another")
    ]
    server.messages = iter(
        [
            {"content": None, "tool_calls": calls},
            {"content": "because"},
            {"content": "first answer"},
            {"content": "second answer"},
            {"content": "t"},
        ]
    )
    url = f"http://127.0.0.1:{server.server_port}"
    said = run(sys.executable, str(EXAMPLES / "agent_loop.py"), "--url", url, *flags, typed="first?\nsecond?\n")
    assert said.splitlines()[-2:] == ["first answer", "second answer"]
    assert [each[params]["kvsidecar"] for each in server.asked] == [
        {"pause": "2min", "tool_pause": "5s"},
        {"over": True},  # the sub-agent
        {"pause": "2min", "tool_pause": "5s"},
        {"pause": "2min", "tool_pause": "5s"},
        {"over": True},
    ]
    for each in server.asked:
        said, counters = next_use.said_in(each[params]), Counters()
        assert next_use.pause_after(said, [7], counters, frozenset([7])) in (5.0, inf)
        assert counters.bad_pauses == 0
    whole = server.asked[-1]
    roles = ["system", "user", "assistant", "tool", "tool", "tool", "assistant", "user", "assistant"]
    assert [each["role"] for each in whole["messages"]] == roles
    assert [each["content"] for each in whole["messages"][4:6]] == ["because", "there is no tool another"]
    assert whole["max_tokens"] == 1


# -- compose ---------------------------------------------------------------------------------------------------------


def mounts() -> Iterator[tuple[str, Path, str]]:
    """(service, path here, path in the container) of every file that is mounted."""
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                yield name, (EXAMPLES / source).resolve(), target


def test_what_is_mounted_is_there() -> None:
    found = list(mounts())
    assert len(found) == 6
    assert [str(path) for _, path, _ in found if not path.is_file()] == []
    dashboards = yaml.safe_load((EXAMPLES / "compose/dashboards.yaml").read_text())["providers"][0]["options"]["path"]
    assert any(target.startswith(dashboards + "/") and target.endswith(".json") for _, _, target in found)
    assert COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in {
        target for _, _, target in found
    }


def test_the_services_find_each_other() -> None:
    source = yaml.safe_load((EXAMPLES / "compose/datasource.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    (job,) = yaml.safe_load((EXAMPLES / "compose/prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["kvsidecar:9464"]}]
    assert {"kvsidecar", "prometheus"} <= set(COMPOSE["services"])


def test_only_a_daemon_is_asked_for_its_health_and_any_other_process_of_the_image_ends_when_told() -> None:
    others = [each for each in COMPOSE["services"].values() if "build" in each and "entrypoint" in each]
    assert others
    assert all(each["healthcheck"] == {"disable": True} and each["init"] for each in others)


def test_the_daemon_and_the_load_of_the_file_work(short_dir: Path) -> None:
    daemon, load = COMPOSE["services"]["kvsidecar"], COMPOSE["services"]["load"]
    assert daemon["command"][0] == "serve"
    flags = [flag for flag in daemon["command"][1:] if flag not in ("--device", "host")]
    with DaemonProcess(short_dir, *flags, "--pool-size", "16MiB", device="host") as running:
        running.wait_ready()
        script = EXAMPLES / Path(load["entrypoint"][1]).name
        run(sys.executable, str(script), *load["command"], "--seconds", "2", KVSIDECAR_SOCKET=running.socket)


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed (Debian: apt install prometheus)")
def test_a_real_prometheus_scrapes_a_daemon_with_the_files_configuration(short_dir: Path, tmp_path: Path) -> None:
    with DaemonProcess(short_dir) as daemon:
        daemon.wait_ready()
        address = daemon.http.removeprefix("http://")
        config = (EXAMPLES / "compose/prometheus.yml").read_text().replace("kvsidecar:9464", address)
        (tmp_path / "prometheus.yml").write_text(config.replace("scrape_interval: 5s", "scrape_interval: 1s"))
        shutil.copy(ROOT / "deploy/prometheus/alerts.yaml", tmp_path)
        port = free_port()
        flags = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        with open(tmp_path / "log", "wb") as log:
            prometheus = subprocess.Popen(
                [str(PROMETHEUS), *flags, f"--web.listen-address=127.0.0.1:{port}"], stderr=log, cwd=tmp_path
            )
        try:
            for query, value in (("up", "1"), ("kvsidecar_ready", "1")):
                eventually(lambda query=query: asked(port, query), lambda: (tmp_path / "log").read_text(), pause=0.2)
                assert asked(port, query) == value
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/rules", timeout=SECONDS) as reply:
                (group, *_) = json.load(reply)["data"]["groups"]
            assert group["rules"]
        finally:
            prometheus.terminate()
            prometheus.wait(SECONDS)


def asked(port: int, query: str) -> str:
    """The value of a query that one series answers; nothing while there is none."""
    with contextlib.suppress(OSError):
        url = f"http://127.0.0.1:{port}/api/v1/query?query={query}"
        with urllib.request.urlopen(url, timeout=SECONDS) as reply:
            found = json.load(reply)["data"]["result"]
            return str(found[0]["value"][1]) if found else ""
    return ""


def test_no_example_is_forgotten_by_the_page() -> None:
    page = (EXAMPLES / "README.md").read_text()
    shown = {name for name in re.findall(r"\]\(([\w./]+)\)", page) if not name.startswith("..")}
    there = {name for name in os.listdir(EXAMPLES) if name not in ("README.md", "compose", "node", "__pycache__")}
    in_node = {f"node/{each.name}" for each in (EXAMPLES / "node").glob("*.js")}
    assert there | in_node == shown
