"""The operators' commands as processes, against real daemons."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvsidecar.cli.operate.drain import cancel_drain, open_jobs, waits_for
from kvsidecar.cli.operate.targets import find_namespace
from kvsidecar.cli.operate.top import LIVE_ANSWER_SECONDS
from kvsidecar.client import AttachRefused, Blocks, Namespace
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.cli.command import run
from tests.e2e.endings import pause
from tests.harness import (
    NAMESPACE,
    SECONDS,
    DaemonProcess,
    Gate,
    Rank,
    done,
    environment,
    eventually,
    hashes,
    layout,
    wait_until_ready,
)
from tests.marks import processes
from tests.terminal import Terminal

# -- engines -----------------------------------------------------------------------------------------------------


def test_engines_lists_every_rank_with_what_it_copied(daemon: DaemonProcess) -> None:
    none = run("engines", "--socket", daemon.socket)
    assert (none.returncode, none.stdout) == (0, "No engine is attached.\n")
    rank = Rank(daemon, instance="my-engine")
    done(rank.store("a", "b"))
    done(rank.load("a", at=[5]))
    shown = run("engines", "--socket", daemon.socket, COLUMNS="120").stdout
    for word in ("my-engine", "0/1", "host", "24 KiB", "12 KiB", str(os.getpid()), "m"):
        assert word in shown, word
    (body,) = json.loads(run("engines", "--socket", daemon.socket, "--json").stdout)
    assert (body["stored_bytes"], body["loaded_bytes"]) == (2 * 12288, 12288)
    assert body["namespace"]["model"] == "m"
    rank.close()


def test_loaded_tokens_are_counted_once_for_all_ranks_of_an_engine(daemon: DaemonProcess) -> None:
    shards = [layout(shard=number, num_shards=2) for number in range(2)]
    ranks = [Rank(daemon, rank=number, world_size=2, groups=shards[number]) for number in range(2)]
    for rank in ranks:
        done(rank.store("a", "b", "c"))
    assert daemon.metric("kvsidecar_loaded_tokens_total") == 0
    for rank in ranks:
        done(rank.load("a", "b", at=[5, 6]))
        assert daemon.metric("kvsidecar_loaded_tokens_total") == 2 * NAMESPACE.block_size
    with daemon.client() as client:
        assert client.status().jobs.loaded_tokens == 2 * NAMESPACE.block_size
    shown = run("top", "--once", "--interval", "0.1", "--prefill-rate", "8", "--socket", daemon.socket, COLUMNS="120")
    assert f"{2 * NAMESPACE.block_size} tokens so far, {2 * NAMESPACE.block_size / 8:g} s of prefill" in shown.stdout
    refused = run("top", "--once", "--engine-price", "2", "--socket", daemon.socket)
    assert refused.returncode == 2
    assert "--engine-price requires --prefill-rate" in refused.stderr
    for rank in ranks:
        rank.close()


def test_status_counts_lookups_and_evictions(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    for number in range(0, 120, 4):  # 120 blocks of 12 KiB into a pool of 1 MiB
        done(rank.store(*range(number, number + 4)))
    rank.hits(119, "x")
    with daemon.client() as client:
        reply = client.status()
    assert (reply.lookups.hits, reply.lookups.misses) == (1, 1)
    assert reply.pool.evicted_blocks == 120 - reply.pool.blocks
    assert reply.pool.evicted_bytes == reply.pool.evicted_blocks * 12288
    rank.close()


@processes
def test_status_and_the_log_say_in_what_the_namespaces_of_a_model_differ(short_dir: Path) -> None:
    other = replace(NAMESPACE, extra="other")
    lengths = ({"max_model_len": "512", "hf_overrides": "#1"}, {"max_model_len": "1024", "hf_overrides": "#2"})
    with DaemonProcess(short_dir) as daemon:
        daemon.wait_ready()
        one = Rank(daemon, options=lengths[0])
        done(one.store("a", "b"))
        two, again = (Rank(daemon, namespace=other, options=lengths[1]) for _ in range(2))
        done(two.store("a"))
        listed = daemon.get("/status")[1]["namespaces"]
        differs = {each["blocks"]: each["differs"] for each in listed}
        said = ["hf_overrides", "max_model_len (1024 instead of 512)"]
        assert differs == {2: [], 1: said}
        shown = run("status", "--socket", daemon.socket, COLUMNS="200").stdout
        assert "blocks: 1, shares nothing with the largest" in shown
        assert "It differs in hf_overrides, max_model_len (1024 instead of 512)." in shown
        for each in (one, two, again):
            each.close()
    logged = [each for each in daemon.read_log() if each["event"] == "a namespace of its own"]
    assert [each["differs_in"] for each in logged] == [", ".join(said)], "once"


@processes
@pytest.mark.parametrize("command", [["engines"], ["clear", "--all", "--yes"], ["drain"], ["top", "--once"]])
def test_without_a_daemon_each_command_says_so(short_dir: Path, command: list[str]) -> None:
    missing = run(*command, "--socket", str(short_dir / "none.sock"))
    assert missing.returncode == 69
    assert "no kvsidecar answers" in missing.stderr
    assert missing.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("status",), ("top", "--once", "--interval", "0.1")])
def test_a_command_waits_for_a_daemon_that_is_slow(daemon: DaemonProcess, command: tuple[str, ...]) -> None:
    pause(daemon)
    goes_on = threading.Timer(3 * LIVE_ANSWER_SECONDS, daemon.process.send_signal, (signal.SIGCONT,))
    goes_on.start()
    shown = run(*command, "--socket", daemon.socket)
    assert shown.returncode == 0, shown.stderr
    goes_on.join()


@processes
@pytest.mark.parametrize("command", [("status",), ("top", "--once", "--interval", "0.1")])
def test_the_exit_code_tells_of_a_failed_daemon(short_dir: Path, command: tuple[str, ...]) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS="pool.pin_chunk=raise(no more pages)") as daemon:
        eventually(lambda: daemon.get("/ready")[1]["state"] == "failed", "the pin fails")
        shown = run(*command, "--socket", daemon.socket)
    assert (shown.returncode, shown.stderr) == (1, "")
    assert "no more pages" in shown.stdout


# -- clear -------------------------------------------------------------------------------------------------------


def test_clear_of_all_asks_first(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    done(rank.store("a", "b"))
    command = [sys.executable, "-m", "kvsidecar", "clear", "--all", "--socket", daemon.socket]

    def answer(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=SECONDS, env=environment(), check=False
        )

    for nothing in ("n\n", ""):
        refused = answer(nothing)
        assert refused.returncode == 1
        assert "Clear all 2 blocks (24 KiB) in 1 namespace?" in refused.stdout
    assert rank.hits("a", "b") == 2
    assert answer("y\n").returncode == 0
    assert rank.hits("a", "b") == 0
    done(rank.store("a"))
    assert run("clear", "--all", "--yes", "--socket", daemon.socket).stdout == "1 block cleared.\n"
    assert rank.hits("a") == 0
    rank.close()


def named(namespace: Namespace, served_name: str) -> pb.NamespaceStatus:
    wire, digest = namespace_to_wire(namespace), namespace.digest
    return pb.NamespaceStatus(namespace=wire, served_name=served_name, digest=digest)


def test_a_namespace_is_named_by_its_model_or_where_that_is_not_enough_by_all_of_it() -> None:
    small = Namespace("m", "bf16", "LBNHC", 16, 1, 1, "sha256")
    large = Namespace("m", "bf16", "LBNHC", 32, 1, 1, "sha256")
    both = pb.StatusReply(namespaces=[named(each, "") for each in (small, large)])
    only = pb.StatusReply(namespaces=both.namespaces[:1])
    assert find_namespace("m", only) == small
    assert find_namespace(str(large), both) == large
    unclear = find_namespace("m", both)
    assert isinstance(unclear, str)
    assert str(small) in unclear
    assert str(large) in unclear
    known = f"'m #{small.digest}', 'm #{large.digest}'"
    assert find_namespace("x", both) == f"no namespace has the model 'x'; known models: {known}"
    assert "there are no namespaces" in str(find_namespace("x", pb.StatusReply()))


def test_a_namespace_may_be_named_as_its_model_is_served_but_not_if_another_says_so_too() -> None:
    chat = Namespace("LlamaForCausalLM-1", "bf16", "LBNHC", 16, 1, 1, "sha256")
    reply = pb.StatusReply(namespaces=[named(chat, "chat"), named(replace(chat, tp_size=2), "code")])
    for name in ("chat", str(chat)):
        assert find_namespace(name, reply) == chat
    assert "several namespaces" in str(find_namespace("LlamaForCausalLM-1", reply))
    reply.namespaces.append(named(replace(chat, model="other"), "chat"))
    assert "several namespaces" in str(find_namespace("chat", reply))
    assert find_namespace(f"chat #{chat.digest}", reply) == chat
    # One that takes what another is called as its own name makes it unclear, and is not taken for it.
    reply.namespaces.append(named(replace(chat, model="third"), f"chat #{chat.digest}"))
    assert "several namespaces" in str(find_namespace(f"chat #{chat.digest}", reply))


@processes
def test_models_have_the_names_that_requests_give_them(short_dir: Path) -> None:
    weights = replace(NAMESPACE, model="LlamaForCausalLM-6576b1cd210c")
    with DaemonProcess(short_dir) as daemon:
        daemon.wait_ready()
        chat, hostile = (
            Rank(daemon, namespace=weights, served_name="llama-70b"),
            Rank(daemon, served_name="\x1b[31mred"),
        )
        done(chat.store("a"))
        done(hostile.store("b"))
        shown = run("status", "--socket", daemon.socket, COLUMNS="80").stdout
        assert [line.split()[0] for line in shown.splitlines() if "1 x 1" in line] == [
            "llama-70b",
            "\N{REPLACEMENT CHARACTER}[31mred",
        ]
        assert "LlamaForCausalLM" not in shown
        assert "llama-70b" in run("engines", "--socket", daemon.socket, COLUMNS="120").stdout
        other = Rank(daemon, namespace=replace(weights, tp_size=2), served_name="llama-70b")
        shown = run("status", "--socket", daemon.socket, COLUMNS="80").stdout
        assert shown.count("llama-70b #") == 2 + shown.count("shares nothing")
        assert f"llama-70b #{weights.digest}" in shown
        with pytest.raises(AttachRefused, match="served_name has 1025 bytes; it may have 1024"):
            Rank(daemon, served_name="x" * 1025)
        assert "1 block cleared" in run("clear", "--namespace", "\x1b[31mred", "--socket", daemon.socket).stdout
        for each in (chat, hostile, other):
            each.close()


# -- drain -------------------------------------------------------------------------------------------------------


def test_drain_stops_new_work_and_returns_at_once(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    drained = run("drain", "--socket", daemon.socket)
    assert drained.returncode == 0
    assert "Draining" in drained.stdout
    assert "No job is running." in drained.stdout
    assert rank.store("a").reason == "draining"
    assert daemon.get("/ready")[1]["state"] == "draining"
    assert daemon.get("/health")[0] == 200
    assert "already draining" in run("drain", "--wait", "--socket", daemon.socket).stdout
    rank.close()


def test_a_drain_by_mistake_is_taken_back(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        assert (
            run("drain", "--cancel", "--socket", daemon.socket).stdout == "The daemon was not draining. It is ready.\n"
        )
        assert "`kvsidecar drain --cancel`" in run("drain", "--socket", daemon.socket).stdout
        assert daemon.get("/ready")[1]["state"] == "draining"
        back = run("drain", "--cancel", "--socket", daemon.socket)
        assert back.returncode == 0
        assert back.stdout == "Drain cancelled: new work is accepted again, and stored blocks are still there.\n"
        assert daemon.get("/ready")[0] == 200
        assert client.status().readiness.reason == ""
    assert run("drain", "--cancel", "--wait", "--socket", daemon.socket).returncode == 2


def test_what_cannot_be_taken_back_is_said() -> None:
    class Daemon:
        cancelled = False
        readiness = pb.Readiness(state=pb.Readiness.STATE_DRAINING, reason="the daemon is shutting down")

        def cancel_drain(self) -> bool:
            return self.cancelled

        def status(self) -> pb.StatusReply:
            return pb.StatusReply(readiness=self.readiness)

    said = Console(record=True, file=io.StringIO())
    daemon = Daemon()
    assert not cancel_drain(daemon, said)  # type: ignore[arg-type]
    assert said.export_text() == "Drain not cancelled: the daemon is shutting down.\n"
    daemon.cancelled, daemon.readiness = True, pb.Readiness(state=pb.Readiness.STATE_FAILED, reason="no memory")
    assert cancel_drain(daemon, said)  # type: ignore[arg-type]
    assert said.export_text() == "Drain cancelled, but the daemon is failed: no memory.\n"


@processes
def test_drain_waits_for_the_copy_that_runs(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@2={gate}") as daemon:
        daemon.wait_ready()
        rank = Rank(daemon, instance="busy")
        rank.fill(0, "a")
        job = rank.client.store([Blocks(0, hashes("a"), [0])])
        daemon.wait_log("failpoint")
        late = run("drain", "--wait", "--timeout", "0", "--socket", daemon.socket)
        assert late.returncode == 1
        assert "Timed out after 0 s, still waiting for 1 job to end (busy 0/1)" in " ".join(late.stdout.split())
        with waiting_drain(daemon) as waiting:
            assert waiting.stdout is not None
            while "waiting for 1 job to end (busy 0/1)" not in (line := waiting.stdout.readline()):
                assert line, "it does not wait"
            gate.let_pass()
            said, _ = waiting.communicate(timeout=SECONDS)
            assert said.endswith("Drained: no job is running.\n")
        assert waiting.returncode == 0
        done(rank.finish(job))
        rank.close()


@contextmanager
def waiting_drain(daemon: DaemonProcess) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-u", "-m", "kvsidecar", "drain", "--wait", "--socket", daemon.socket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(COLUMNS="120")) as waiting:
        try:
            yield waiting
        finally:
            waiting.kill()  # one that waits for ever fails the test and does not hang it


@processes
def test_a_daemon_that_ends_while_it_is_waited_for_is_drained(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@2={gate}") as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        rank.client.store([Blocks(0, hashes("a"), [0])])
        daemon.wait_log("failpoint")
        with waiting_drain(daemon) as waiting:
            assert waiting.stdout is not None
            assert "Draining" in waiting.stdout.readline()
            assert "waiting" in waiting.stdout.readline()
            daemon.process.kill()
            said, _ = waiting.communicate(timeout=SECONDS)
            assert said == "The daemon has exited.\n"
        assert waiting.returncode == 0
        rank.close()


def test_jobs_of_an_engine_that_has_gone_are_waited_for_too() -> None:
    assert open_jobs(pb.StatusReply(jobs=pb.JobsStatus(running=1, queued=2))) == 3
    held = pb.StatusReply(ranks=[pb.RankStatus(instance="e", world_size=1, jobs_running=4)])
    assert open_jobs(held) == 4
    assert waits_for(held) == "4 jobs to end (e 0/1)"


# -- top ---------------------------------------------------------------------------------------------------------


def test_top_once_prints_one_screen(daemon: DaemonProcess) -> None:
    rank = Rank(daemon, instance="my-engine")
    done(rank.store("a"))
    shown = run("top", "--once", "--interval", "0.1", "--socket", daemon.socket, COLUMNS="100")
    assert shown.returncode == 0
    for word in ("kvsidecar ready", "12 KiB of 1 MiB used", "Store", "in 1 job", "my-engine"):
        assert word in shown.stdout, word
    assert "\x1b" not in shown.stdout
    rank.close()


@processes
def test_top_without_a_terminal_asks_for_once() -> None:
    refused = run("top")
    assert refused.returncode == 2
    assert "--once" in refused.stderr


@contextmanager
def top(socket: str) -> Iterator[Terminal]:
    with Terminal("top", "--interval", "0.1", "--socket", socket) as terminal:
        yield terminal


@pytest.mark.parametrize("way", ["q", "ctrl-c", "sigterm"])
def test_top_ends_and_leaves_the_terminal_as_it_was(daemon: DaemonProcess, way: str) -> None:
    with top(daemon.socket) as terminal:
        terminal.until("kvsidecar ready")
        assert not terminal.restored()
        if way == "sigterm":
            terminal.process.send_signal(signal.SIGTERM)
        else:
            terminal.press(b"q" if way == "q" else b"\x03")
        assert terminal.end() == 0
        assert terminal.restored()


@processes
def test_top_survives_a_daemon_that_goes_and_comes_back(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as first:
        first.wait_ready()
        with top(first.socket) as terminal:
            terminal.until("kvsidecar ready")
            first.process.kill()
            first.process.wait()
            terminal.until("No answer for")
            with DaemonProcess(short_dir) as second:
                second.wait_ready()
                terminal.until("restarted 1x since top started")
                assert "No answer" not in terminal.until("Jobs")
                with second.client() as client:
                    rank = Rank(second, client=client, instance="newcomer")
                    wait_until_ready(client)
                    terminal.until("newcomer")
                    rank.close()
            terminal.press(b"q")
            assert terminal.end() == 0


@processes
def test_top_shows_the_pin(short_dir: Path, gate: Gate) -> None:
    gate.let_pass(3)
    held = f"pool.pin_chunk={gate}"
    flags = ["--pool-size", "4MiB", "--chunk-size", "64KiB", "--slab-size", "64KiB"]
    with DaemonProcess(short_dir, *flags, KVSIDECAR_FAILPOINTS=held) as daemon, top(daemon.socket) as terminal:
        terminal.until("kvsidecar pinning")
        assert "%" in terminal.until("left")
        terminal.press(b"q")
        assert terminal.end() == 0


# -- doctor ------------------------------------------------------------------------------------------------------


def test_the_doctors_exit_code_says_whether_there_is_a_problem(daemon: DaemonProcess) -> None:
    flags = ("--device", "host", "--pool-size", "1MiB", "--socket", daemon.socket)
    well = run("doctor", *flags, COLUMNS="120")
    assert well.returncode == 0, well.stdout
    assert "ready: " in well.stdout
    assert well.stdout.splitlines()[-1].startswith("no problems, ")
    ill = run("doctor", *flags, "--pid", str(2**22 + 1), COLUMNS="120")
    assert ill.returncode == 1
    assert "fix: " in ill.stdout
    body = json.loads(run("doctor", *flags, "--json").stdout)
    assert body["problems"] == 0
    assert {each["verdict"] for each in body["findings"]} <= {"ok", "warning", "problem", "not checked"}
