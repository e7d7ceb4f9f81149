"""`kvsidecar size`, as it is called."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvsidecar.cli.main import main
from kvsidecar.cli.size.progress import EVERY_SECONDS, ReplayProgress
from kvsidecar.support.units import GiB
from tests.cli.size.support import alternating
from tests.harness import DaemonProcess, Rank, done

LLAMA = ("size", "Llama-3.1-8B", "--host-memory", "512GiB")


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, arguments, catch_exceptions=False)


def test_it_prints_figures_and_the_lines_to_paste() -> None:
    shown = run(*LLAMA, "--context", "8Ki", "--sessions", "32", "--tp", "2", "--gpus", "8")
    assert shown.exit_code == 0
    for text in (
        "128 KiB",
        "2 MiB of 16 tokens: 32 layers",
        "1 GiB in 512 blocks",
        "pool_size",
        "MemoryMax=",
        "8 copiers",
    ):
        assert text in shown.output, text
    assert "Assumed" not in shown.output


def test_json_has_the_same() -> None:
    body = json.loads(run(*LLAMA, "--context", "8Ki", "--sessions", "31", "--json").stdout)
    assert body["kv"]["token_bytes"] == 128 * 1024
    assert body["session_bytes"] == GiB
    assert body["pool_bytes"] == 32 * GiB
    assert body["paste"]["toml"] == 'pool_size = "32GiB"'


def test_this_machines_memory_is_an_assumption_that_is_said() -> None:
    shown = run("size", "Llama-3.1-8B", "--context", "1Ki", "--sessions", "1")
    assert "Assumed: the daemon may take" in shown.output
    assert "80% of this machine's memory" in shown.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("Llama-3.3-7B",), 78, "did you mean Llama-3.3-70B?"),
        (("Mixtral",), 78, "did you mean Mixtral-8x7B or Mixtral-8x22B?"),
        (("nothing like any",), 78, "config.json, or one of Llama-3.1-8B, "),
        ((), 2, "name a MODEL, or use --running"),
        (("Llama-3.1-8B", "--tp", "2", "--gpus", "3"), 2, "--gpus 3 is not a multiple of --tp 2"),
        (("Llama-3.1-8B", "--shared-prefix", "64Ki"), 2, "--shared-prefix is longer than --context"),
        (("Llama-3.1-8B", "--context", "long"), 2, "'long' is not a number of tokens"),
        (("Llama-3.1-8B", "--retention", "some"), 2, "'some' is not a number of tokens"),
        (("Llama-3.1-8B", "--host-memory", "1GiB"), 78, "one session needs a pool of 5 GiB"),
        (("Llama-3.1-8B", "--bench", "/no/such"), 78, "--bench /no/such cannot be read: No such file"),
        (("Llama-3.1-8B", "--trace", "/no/such"), 78, "/no/such, after line 0"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: tuple[str, ...], code: int, words: str) -> None:
    refused = run("size", *(() if "--host-memory" in arguments else ("--host-memory", "512GiB")), *arguments)
    assert refused.exit_code == code
    assert words in refused.output
    assert "Traceback" not in refused.output


def test_the_command_says_what_a_trace_hits(tmp_path: Path) -> None:
    file = str(alternating(tmp_path / "trace.jsonl"))
    shown = run(
        "size", "Llama-3.1-8B", "--host-memory", "64GiB", "--context", "1Ki", "--sessions", "1", "--trace", file
    )
    assert "of the prompt tokens with half the pool" in shown.output
    assert "with room for everything" in shown.output
    body = json.loads(run(*LLAMA, "--trace", file, "--json").stdout)
    pools = ("half the pool", "the pool of 413 GiB", "twice the pool")
    policies = [each for pool in pools for each in (pool, f"{pool} and --eviction rhythm")]
    assert list(body["hits"]) == [*policies, "room for everything"]


def test_measured_pinning_is_used(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    rows = [{"phase": "idle"}, {"phase": "pool", "ms_per_gib": 100.0}]
    file.write_text(json.dumps({"measurements": {"pin": {"rows": rows}}}))
    assert "at the 100 ms/GiB that were measured" in run(*LLAMA, "--bench", str(file)).output
    file.write_text("{}")
    assert "has no pinning time" in run(*LLAMA, "--bench", str(file)).output


def test_a_running_engine_gives_the_figures(daemon: DaemonProcess) -> None:
    where = ("--socket", daemon.socket, "--host-memory", "64GiB")
    assert "has no blocks yet" in run("size", "--running", *where).output
    rank = Rank(daemon)
    done(rank.store("a", "b"))
    body = json.loads(run("size", "--running", *where, "--json").stdout)
    status = daemon.get("/status")[1]["namespaces"][0]
    group = body["kv"]["groups"][0]
    assert group["block_bytes"] == status["bytes"] // 2
    assert group["block_tokens"] == status["namespace"]["block_size"]
    assert "of 'other' yet" in run("size", "other", "--running", *where).output
    rank.close()


def test_only_what_takes_long_is_said_and_not_too_often() -> None:
    out, now = io.StringIO(), [0.0]
    progress = ReplayProgress(out, lambda: now[0])
    progress.read("a.log", 64)
    assert out.getvalue() == ""
    now[0] = EVERY_SECONDS
    progress.read("a.log", 63)
    progress.read("a.log", 128)
    progress.read("a.log", 192)
    now[0] *= 2
    progress.replayed("lru", 1, 4)
    assert out.getvalue() == "5 s: a.log, 128 lines read\n10 s: lru, 25% of the requests replayed\n"
