"""Jobs as the wire has them: deadlines, flushes and events in raw messages, on both carriers."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import grpc
import pytest

from kvsidecar.client import Blocks, HostBuffer
from kvsidecar.protocol.framing import frame
from kvsidecar.protocol.wire import layout_to_wire, namespace_to_wire, pack_ids
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from tests.frames import frames, receive
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Gate, Rank, done, eventually, hashes, layout
from tests.marks import both_protocols

pytestmark = both_protocols

FIRST_STORE = "store.in_flight@2"
"""The first store that is not the self-test's: what comes behind it waits in the worker's queue."""
MINUTES = 600_000
"""Milliseconds: a time that is not up within a test."""


NO_JOB = 4711


class RawRank:
    """An Attach stream in the test's hands."""

    def __init__(self, daemon: DaemonProcess, channel: grpc.Channel, events: list[bytes]) -> None:
        self.buffer = HostBuffer(1 << 20)
        self.link = socket.socket(socket.AF_UNIX)
        self.link.settimeout(SECONDS)
        self.link.connect(daemon.socket + ".attach")
        hello = pb.Hello(protocol=PROTOCOL, num_fds=1).SerializeToString()
        socket.send_fds(self.link, [frame(hello)], [self.buffer.fd])
        welcome = pb.Welcome.FromString(receive(self.link))
        self._requests: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[pb.AttachReply] = queue.SimpleQueue()
        self._kept: list[pb.AttachReply] = []
        register = pb.Register(
            protocol=PROTOCOL,
            token=welcome.token,
            instance="raw",
            namespace=namespace_to_wire(NAMESPACE),
            world_size=1,
            device="host",
            allocations=[pb.Allocation(fd_index=0, size=self.buffer.nbytes)],
            groups=[layout_to_wire(layout())],
            event_handles=events,
        )
        self._requests.put(pb.AttachRequest(register=register))
        requests: Iterator[pb.AttachRequest] = iter(self._requests.get, None)
        if daemon.local:
            assert welcome.local_protocol
            threading.Thread(target=self._write_local, args=(requests,), daemon=True).start()
            replies = self._read_local()
        else:
            replies = pb_grpc.SidecarStub(channel).Attach(requests, timeout=SECONDS)
        self._reader = threading.Thread(target=self._read, args=(replies,))
        self._reader.start()
        self.registered = self.next("registered").registered

    def _read(self, replies: Iterator[pb.AttachReply]) -> None:
        for reply in replies:
            self._replies.put(reply)

    def _write_local(self, requests: Iterator[pb.AttachRequest]) -> None:
        for message in chain(
            (pb.LocalRequest(attach=each) for each in requests), [pb.LocalRequest(detach=pb.Detach())]
        ):
            self.link.sendall(frame(message.SerializeToString()))

    def _read_local(self) -> Iterator[pb.AttachReply]:
        for payload in frames(self.link):
            reply = pb.LocalReply.FromString(payload)
            if reply.HasField("ended"):
                assert not reply.ended.HasField("error"), reply
                return
            yield reply.attach
        pytest.fail("the daemon closed the connection")

    def send(self, request: pb.AttachRequest) -> None:
        self._requests.put(request)

    def store(self, job: int, *, deadline_ms: int = 0, event: int = 0) -> None:
        """Block ``job`` under the hash of ``job``."""
        blocks = [pb.Blocks(group=0, hashes=hashes(job)[0], block_ids=pack_ids([job]))]
        self.send(pb.AttachRequest(store=pb.Store(job=job, blocks=blocks, deadline_ms=deadline_ms, event=event)))

    def flush(self, *jobs: int, mode: pb.Flush.Mode, timeout_ms: int = MINUTES) -> pb.Flushed:
        self.ask_flush(*jobs, mode=mode, timeout_ms=timeout_ms)
        return self.next("flushed").flushed

    def ask_flush(self, *jobs: int, mode: pb.Flush.Mode, timeout_ms: int = MINUTES) -> None:
        self.send(pb.AttachRequest(flush=pb.Flush(flush=1, jobs=jobs, timeout_ms=timeout_ms, mode=mode)))

    def until_taken(self) -> None:
        """Until the daemon has taken everything that was sent: it takes in order, and refuses this at once."""
        self.send(pb.AttachRequest(store=pb.Store(job=NO_JOB, blocks=[pb.Blocks(group=99)])))
        assert self.next("done").done.job == NO_JOB

    def next(self, kind: str) -> pb.AttachReply:
        """The next reply of this kind; others are kept."""
        for reply in self._kept:
            if reply.WhichOneof("message") == kind:
                self._kept.remove(reply)
                return reply
        while (reply := self._replies.get(timeout=SECONDS)).WhichOneof("message") != kind:
            self._kept.append(reply)
        return reply

    def silent(self) -> bool:
        """Whether nothing has come for a moment."""
        try:
            self._kept.append(self._replies.get(timeout=0.05))
        except queue.Empty:
            return True
        return False

    def ended(self, count: int) -> list[tuple[int, str]]:
        """Job and reason ("" if it was done) of the next ends, in their order."""
        ends = [self.next("done").done for _ in range(count)]
        return [(end.job, end.reason) for end in ends]

    def close(self) -> None:
        self._requests.put(None)
        self._reader.join(SECONDS)
        self.link.close()


@contextmanager
def raw_rank(daemon: DaemonProcess, events: list[bytes] | None = None) -> Iterator[RawRank]:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        rank = RawRank(daemon, channel, events or [])
        yield rank
        rank.close()


@pytest.fixture
def held_daemon(short_dir: Path, gate: Gate, local: bool) -> Iterator[DaemonProcess]:
    """The first store runs until `gate` lets it end."""
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"{FIRST_STORE}={gate}", local=local) as process:
        yield process.wait_ready()


def until_running(daemon: DaemonProcess) -> None:
    eventually(lambda: daemon.metric('kvsidecar_jobs_running{direction="store"}'))


def test_a_copy_that_has_not_started_at_its_deadline_never_does(held_daemon: DaemonProcess, gate: Gate) -> None:
    with raw_rank(held_daemon) as rank:
        rank.store(1)
        rank.store(2, deadline_ms=50)
        rank.store(3, deadline_ms=MINUTES)
        assert rank.ended(1) == [(2, "deadline")]
        gate.let_pass()
        assert sorted(rank.ended(2)) == [(1, ""), (3, "")]
        assert held_daemon.metric("kvsidecar_pool_reserved_bytes") == 0
        assert held_daemon.metric('kvsidecar_refusals_total{reason="deadline"}') == 1
        other = Rank(held_daemon)
        assert [other.hits(job) for job in (1, 2, 3)] == [1, 0, 1]
        other.close()


def test_a_copy_that_runs_at_its_deadline_is_finished(short_dir: Path, gate: Gate, local: bool) -> None:
    second_store = "store.in_flight@3"
    with (
        DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"{second_store}={gate}", local=local) as daemon,
        raw_rank(daemon.wait_ready()) as rank,
    ):
        sent = time.monotonic()
        rank.store(1)
        assert rank.ended(1) == [(1, "")]
        # By then it must have started, which took the first one no longer than all of itself, and whoever stands still
        # for a second meanwhile.
        deadline = max(3.0, 20 * (time.monotonic() - sent))
        sent = time.monotonic()
        rank.store(2, deadline_ms=int(deadline * 1000))
        daemon.wait_log("failpoint")
        while time.monotonic() < sent + 1.1 * deadline:
            assert rank.silent()
        gate.let_pass()
        assert rank.ended(1) == [(2, "")]


def test_a_flush_that_cancels_stops_what_has_not_started_and_nothing_else(
    held_daemon: DaemonProcess, gate: Gate
) -> None:
    with raw_rank(held_daemon) as rank:
        rank.store(1)
        until_running(held_daemon)
        for job in (2, 3):
            rank.store(job)
        flushed = rank.flush(2, mode=pb.Flush.MODE_CANCEL)
        assert list(flushed.pending) == []
        assert rank.ended(1) == [(2, "cancelled")]
        gate.let_pass()
        assert rank.ended(2) == [(1, ""), (3, "")]


def test_a_flush_that_finishes_lets_its_jobs_go_first(held_daemon: DaemonProcess, gate: Gate) -> None:
    with raw_rank(held_daemon) as rank:
        rank.store(1)
        until_running(held_daemon)
        for job in (2, 3, 4):
            rank.store(job)
        rank.ask_flush(4, mode=pb.Flush.MODE_FINISH)
        rank.until_taken()
        gate.let_pass()
        assert list(rank.next("flushed").flushed.pending) == []
        assert [job for job, _ in rank.ended(4)] == [1, 4, 2, 3]


def test_a_flush_names_what_still_runs_at_its_deadline(held_daemon: DaemonProcess, gate: Gate) -> None:
    with raw_rank(held_daemon) as rank:
        rank.store(1)
        assert list(rank.flush(mode=pb.Flush.MODE_FINISH, timeout_ms=20).pending) == [1]
        gate.let_pass()
        assert list(rank.flush(mode=pb.Flush.MODE_FINISH).pending) == []


def test_blocks_may_be_overwritten_right_after_a_flush_and_load_as_they_were(
    held_daemon: DaemonProcess, gate: Gate
) -> None:
    rank = Rank(held_daemon)
    jobs = []
    for block in range(4):
        rank.fill(block, ("v", block))
        jobs.append(rank.client.store([Blocks(0, hashes(("v", block)), [block])]))
    assert rank.client.flush(timeout=0.05) == frozenset(jobs), "the first one runs, and the others wait behind it"
    gate.let_pass()
    assert rank.client.flush(timeout=SECONDS) == frozenset()
    rank.kv[:] = 0xEE
    done(rank.load(*[("v", block) for block in range(4)], at=[7, 6, 5, 4]))
    for block in range(4):
        assert rank.holds(7 - block, ("v", block))
    rank.close()


def test_a_device_without_events_orders_on_the_host_and_says_so(daemon: DaemonProcess) -> None:
    with raw_rank(daemon, [bytes(64)]) as rank:
        assert not rank.registered.device_order
        assert "order stores on the host" in rank.registered.device_order_refused
        rank.store(1, event=1)
        end = rank.next("done").done
        assert end.reason == "invalid_request"
        assert "event 1 is not in this rank's ring of 0" in end.error
        rank.store(2)
        assert rank.ended(1) == [(2, "")]
