"""A rank without a client."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import grpc
import pytest

from kvsidecar.client import HostBuffer
from kvsidecar.protocol.framing import frame
from kvsidecar.protocol.wire import layout_to_wire, namespace_to_wire, pack_ids
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from tests.frames import frames, receive
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, hashes, layout

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
