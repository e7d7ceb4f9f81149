"""Faults of an engine and of a device, injected into real processes. The numbers are those of docs/faults.md."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvsidecar.client import Blocks, GroupLayout, HostBuffer, Region
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.leftovers import engine, holders, nothing_is_left_of, only_copiers_hold, open_fds
from tests.e2e.wire import framed, hello, register, stub, welcome
from tests.harness import FIRST, NAMESPACE, SECONDS, DaemonProcess, Gate, Rank, done, eventually, hashes
from tests.marks import promise


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_for_metric(daemon: DaemonProcess, name: str, value: float) -> None:
    eventually(lambda: daemon.metric(name) == value, lambda: f"{name} is {daemon.metric(name)}, not {value}")


@promise("the copy completes, or the block never becomes readable")
@pytest.mark.parametrize("point", [f"store.in_flight@{FIRST}", "store.before_copy@0", "store.before_seal@0"])
def test_1_an_engine_killed_mid_store_leaves_nothing(short_dir: Path, gate: Gate, point: str) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"{point}={gate}") as daemon:
        daemon.wait_ready()
        with engine(daemon, "store") as victim:
            daemon.wait_log("failpoint")
            victim.kill()
            victim.wait()
            if "in_flight" in point:
                only_copiers_hold(daemon)
            gate.let_pass()
            daemon.wait_log("rank detached")
            assert holders(daemon) == set(), "somebody has the dead engine's memory behind the last copy"
        nothing_is_left_of(daemon)
        rank = Rank(daemon)
        if rank.hits("victim"):  # its copy was not dropped, so it must have been finished
            done(rank.load("victim", at=[1]))
            assert rank.holds(1, "victim")
        rank.close()


@promise("references and mappings are released, other engines continue")
def test_2_an_engine_killed_mid_load_leaves_nothing_and_harms_no_other(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"load.in_flight@{FIRST}={gate}") as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        done(rank.store("shared"))
        with engine(daemon, "load") as victim:
            daemon.wait_log("failpoint")
            victim.kill()
            done(rank.store("meanwhile"))
            assert daemon.mapped_buffers() == 2, "unmapped under a copy that runs"
            gate.let_pass()
            daemon.wait_log("rank detached")
        assert daemon.mapped_buffers() == 1
        done(rank.load("shared", at=[3]))
        assert rank.holds(3, "shared")
        rank.close()
        nothing_is_left_of(daemon)


def until_unmapped(daemon: DaemonProcess) -> None:
    eventually(lambda: not daemon.mapped_buffers(), "memory of a rank that is not attached is still mapped")


@promise("the memory just imported is unmapped")
def test_3_an_engine_killed_while_it_attaches_leaves_nothing(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"attach.after_import@0={gate}") as daemon:
        daemon.wait_ready()
        with engine(daemon, "nothing") as victim:
            daemon.wait_log("failpoint")
            assert daemon.mapped_buffers() == 1
            victim.kill()
            victim.wait()
            gate.let_pass()
            until_unmapped(daemon)
        nothing_is_left_of(daemon)


def test_3_an_attach_that_its_client_gives_up_leaves_nothing(short_dir: Path, gate: Gate) -> None:
    """The process lives on, and so does its attach connection: nothing but the end of the stream tells."""
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"attach.after_import@0={gate}") as daemon:
        daemon.wait_ready()
        buffer = HostBuffer(1 << 20)
        with (
            hello(daemon, framed(pb.Hello(protocol=PROTOCOL, num_fds=1)), [buffer.fd]) as connection,
            stub(daemon) as sidecar,
        ):
            request = pb.AttachRequest(register=register(welcome(connection).token, buffer))
            attaching = sidecar.Attach(iter([request]), timeout=SECONDS)
            daemon.wait_log("failpoint")
            attaching.cancel()
            assert daemon.mapped_buffers() == 1, "the registration was over before it was given up"
            gate.let_pass()
            until_unmapped(daemon)
            nothing_is_left_of(daemon)
        buffer.close()


def test_4_an_engine_killed_before_its_first_store_leaves_nothing(daemon: DaemonProcess) -> None:
    with engine(daemon, "nothing") as victim:
        assert [read(victim), read(victim)] == ["begun", "attached"]
        victim.kill()
        daemon.wait_log("rank detached")
    nothing_is_left_of(daemon)


def test_5_a_paused_engine_is_not_dead_and_its_leases_end_by_time(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("shared"))
        with engine(daemon, "lease") as paused:
            assert [read(paused), read(paused)] == ["begun", "attached"]
            assert int(read(paused)) > 0
            paused.send_signal(signal.SIGSTOP)
            wait_for_metric(daemon, "kvsidecar_leases", 0)
            assert daemon.metric("kvsidecar_attached_ranks") == 2
            assert daemon.mapped_buffers() == 2
            paused.send_signal(signal.SIGCONT)
            assert daemon.refused("lease_expired") == 1
        rank.close()


def test_12_a_pin_that_hangs_keeps_the_daemon_alive_and_says_so(short_dir: Path) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS="pool.pin_chunk=delay(600)") as daemon:
        daemon.wait_log("failpoint")
        assert daemon.get("/health")[0] == 200
        code, ready = daemon.get("/ready")
        assert (code, ready["state"], ready["pinned_bytes"]) == (503, "pinning", 0)


def test_17_one_process_may_register_the_same_memory_twice(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    again = daemon.client()
    again.attach(instance="twin", namespace=NAMESPACE, buffers=rank.buffer.kv_buffers(), groups=[rank.layout])
    assert daemon.metric('kvsidecar_imported_gpu_bytes{device="host"}') == rank.buffer.nbytes
    assert daemon.mapped_buffers() == 1
    again.close()
    assert daemon.mapped_buffers() == 1, "the first registration lost its memory"
    done(rank.store("a"))
    rank.close()
    assert daemon.mapped_buffers() == 0


OTHER_USER = """
import os, sys
from kvsidecar.client import Allocation, AttachRefused, KVBuffers
from tests import harness
os.setgid(0)
os.setuid(int(sys.argv[3]))
daemon = object.__new__(harness.DaemonProcess)
daemon.socket = sys.argv[1]
client = daemon.client()
try:
    client.attach(
        instance="other",
        namespace=harness.NAMESPACE,
        buffers=KVBuffers("host", (Allocation(harness.NUM_BLOCKS * harness.SHARD_BYTES, fd=int(sys.argv[2])),)),
        groups=[harness.layout()],
    )
    print("attached")
except AttachRefused as error:
    print(error)
client.close()
"""


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user; tests/core/test_sessions.py has the rest"
)
def test_18_memory_of_one_user_is_not_given_to_another(short_dir: Path) -> None:
    def attach_as(uid: int) -> str:
        command = [sys.executable, "-c", OTHER_USER, daemon.socket, str(rank.buffer.fd), str(uid)]
        ran = subprocess.run(command, pass_fds=[rank.buffer.fd], capture_output=True, text=True, timeout=SECONDS)
        assert not ran.stderr, ran.stderr
        return ran.stdout.strip()

    short_dir.chmod(0o711)  # so that the other user may come as far as the socket
    with DaemonProcess(short_dir, "--socket-mode", "0660") as daemon:
        rank = Rank(daemon.wait_ready())
        assert attach_as(0) == "attached"
        assert "by a process of another user" in attach_as(65534)
        assert daemon.refused("register_refused") == 1
        assert daemon.metric('kvsidecar_imported_gpu_bytes{device="host"}') == rank.buffer.nbytes
        done(rank.store("a"))
        done(rank.load("a", at=[1]))
        assert rank.holds(1, "a")
        # What the refused one had opened is given back: the last one out unmaps the memory.
        client, rank.client = rank.client, daemon.client()
        client.close()
        assert daemon.mapped_buffers() == 0
        assert attach_as(65534) == "attached", "the first user has gone, and the memory is still refused"
        rank.close()


PIECES = 51_828
"""A job of so many made the driver's batched copy crash (vLLM issue 49276)."""


def test_22_a_job_of_many_small_pieces_is_right_and_others_go_on(short_dir: Path) -> None:
    rows, row_bytes = 84, 16
    blocks = PIECES // rows
    # No two rows of a block are equally far apart and no two blocks of the job follow each other, so nothing merges.
    places = [row * blocks * row_bytes + row * row * 64 for row in range(rows)]
    regions = tuple(Region(0, place, 0, row_bytes, row_bytes, 1) for place in places)
    many = GroupLayout(0, blocks, 0, 1, regions)
    random = np.random.default_rng(22)
    with DaemonProcess(short_dir, "--pool-size", "4MiB", "--slab-size", "1MiB", "--chunk-size", "1MiB") as daemon:
        daemon.wait_ready()
        other = Rank(daemon, namespace=dataclasses.replace(NAMESPACE, model="other"))
        buffer = HostBuffer(many.regions[-1].end(blocks))
        memory = np.frombuffer(buffer.memory, np.uint8)
        memory[:] = random.integers(0, 256, len(memory), np.uint8)
        stored = memory.copy()
        client = daemon.client()
        client.attach(instance="many", namespace=NAMESPACE, buffers=buffer.kv_buffers(), groups=[many])
        names = hashes(*range(blocks))
        source, target = random.permutation(blocks), random.permutation(blocks)
        jobs = [client.store([Blocks(0, names, source.tolist())])]
        done(other.store("a"))
        result = client.wait(jobs, SECONDS)[jobs[0]]
        assert done(result).nbytes == PIECES * row_bytes
        assert np.array_equal(memory, stored), "a store wrote to its source"
        memory[:] = 0
        jobs = [client.load([Blocks(0, names, target.tolist())])]
        done(other.load("a", at=[1]))
        assert other.holds(1, "a")
        done(client.wait(jobs, SECONDS)[jobs[0]])
        expected = np.zeros_like(stored)
        for place in places:
            rows_of = [
                each[place : place + blocks * row_bytes].reshape(blocks, row_bytes) for each in (expected, stored)
            ]
            rows_of[0][target] = rows_of[1][source]
        assert np.array_equal(memory, expected)
        client.close()
        other.close()
        del memory
        buffer.close()


def test_29_of_two_engines_that_store_the_same_block_one_does(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@{FIRST}={gate}") as daemon:
        daemon.wait_ready()
        ranks = [Rank(daemon, instance=name) for name in ("one", "two")]
        jobs = []
        for rank in ranks:
            rank.fill(0, "same")
            jobs.append(rank.client.store([Blocks(0, hashes("same"), [0])]))
            if len(jobs) == 1:
                daemon.wait_log("failpoint")  # its copy runs, and goes on when the other one was answered
        second = done(ranks[1].finish(jobs[1]))
        gate.let_pass()
        first = done(ranks[0].finish(jobs[0]))
        assert [first.copied_blocks, second.copied_blocks] == [1, 0]
        assert daemon.metric("kvsidecar_pool_used_bytes") == 12288
        for rank in ranks:
            rank.close()


def test_34_a_second_sigterm_ends_without_the_copy(short_dir: Path, gate: Gate) -> None:
    wait = ("--drain-timeout", str(10 * SECONDS))
    with DaemonProcess(short_dir, *wait, KVSIDECAR_FAILPOINTS=f"store.in_flight@{FIRST}={gate}") as daemon:
        rank = Rank(daemon.wait_ready())
        rank.client.store([Blocks(0, hashes("a"), [0])])
        daemon.wait_log("failpoint")
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_log("stopping")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(SECONDS) == 128 + signal.SIGTERM
        rank.close()


def test_40_silent_connections_do_not_keep_engines_out(daemon: DaemonProcess) -> None:
    silent = []
    Rank(daemon).close()  # the loop opens a descriptor of its own with its first connection
    before = open_fds(daemon)
    for _ in range(100):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(daemon.socket + ".attach")
        silent.append(connection)
    rank = Rank(daemon)
    done(rank.store("a"))
    rank.close()
    for connection in silent:
        connection.settimeout(SECONDS)
        assert b"no Hello was complete" in connection.recv(1000)
        assert connection.recv(1) == b"", "a silent connection may stay for ever"
        connection.close()
    eventually(lambda: open_fds(daemon) <= before)
