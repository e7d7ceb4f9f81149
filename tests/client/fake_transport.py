"""A transport and an Attach stream without a daemon: the test says what arrives, and sees what is sent."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvsidecar.client.messages import TransportError
from kvsidecar.client.send_queue import SendQueue
from kvsidecar.client.transport import DaemonStream, OnAnswer, Transport
from kvsidecar.client.waiting import Monitor
from kvsidecar.support.fence import Fence
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import SECONDS


class FakeStream(DaemonStream):
    """Takes everything out of the send_queue at once, unless it is ``full``."""

    def __init__(self, send_queue: SendQueue) -> None:
        self.ended = False
        self.error: TransportError | None = None
        self.quiesced = False
        self.full = False
        self.cancelled = False
        self.finished = threading.Event()
        self.said: queue.SimpleQueue[pb.AttachRequest] = queue.SimpleQueue()
        self._send_queue = send_queue
        self._coming: queue.SimpleQueue[pb.AttachReply | None] = queue.SimpleQueue()
        self._arrived: list[pb.AttachReply] = []
        self._end: tuple[TransportError | None, bool] = None, False

    def next(self) -> pb.AttachRequest:
        """The next message of the session."""
        return self.said.get(timeout=SECONDS)

    def reply(self, **message: Any) -> None:
        self._coming.put(pb.AttachReply(**message))

    def done(self, job: int, **fields: Any) -> None:
        self.reply(done=pb.JobDone(job=job, outcome=pb.JobDone.OUTCOME_DONE, **fields))

    def end(self, error: TransportError | None = None, *, quiesced: bool = False) -> None:
        """Behind what was replied before."""
        self._end = error, quiesced
        self._coming.put(None)

    def pump(self) -> None:
        while self._send_queue.waiting and not self.full:
            message = pb.AttachRequest()
            if self._send_queue.take(message):
                self.said.put(message)
            elif self._send_queue.is_finished:
                self.finished.set()

    def wait(self) -> None:
        if (reply := self._coming.get()) is None:
            self.error, self.quiesced = self._end
            self.ended = True
        else:
            self._arrived.append(reply)

    def receive(self, *, helping: bool = False) -> list[pb.AttachReply]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def wait_readable(self, seconds: float) -> bool:
        return False

    def wake_reader(self) -> None: ...

    def cancel(self) -> None:
        self.cancelled = True
        self._coming.put(None)

    def close(self) -> None: ...


class FakeTransport(Transport):
    """Of one run of a daemon. `registers` answers the registration by itself."""

    is_local = False

    def __init__(self, *, epoch: int = 7, session: int = 11, fence: Fence | None = None) -> None:
        near, self.far = socket.socketpair()
        self.epoch, self.session = epoch, session
        self.gone = threading.Event()
        self.closed = threading.Event()
        self.streams: list[FakeStream] = []
        self.questions: queue.SimpleQueue[tuple[Any, OnAnswer]] = queue.SimpleQueue()
        process: Any = SimpleNamespace(fds=(), gone=lambda seconds=0.0: self.gone.wait(seconds), close=lambda: None)
        process.duplicate = lambda: process
        self.connection: Any = SimpleNamespace(
            sock=near, process=process, token=b"t", epoch=epoch, fence=fence, ended=lambda: self.far.fileno() < 0
        )

    @property
    def stream(self) -> FakeStream:
        return self.streams[-1]

    def open_stream(self, send_queue: SendQueue, monitor: Monitor) -> DaemonStream:
        self.streams.append(FakeStream(send_queue))
        self.stream.reply(registered=pb.Registered(epoch=self.epoch, session=self.session))
        return self.stream

    def query(self, request: Any, seconds: float, on_answer: OnAnswer) -> Callable[[], None]:
        self.questions.put((request, on_answer))
        return lambda: None

    def asked(self) -> tuple[Any, OnAnswer]:
        """The next question, and what takes its answer."""
        return self.questions.get(timeout=SECONDS)

    def call(self, request: pb.LocalRequest, seconds: float, on_late: OnAnswer | None = None) -> Any:
        raise NotImplementedError

    def post(self, request: pb.LocalRequest, on_answer: OnAnswer | None) -> bool:
        return False

    def post_in_background(self, request: pb.LocalRequest, on_answer: OnAnswer | None) -> bool:
        return False

    def collect(self, is_done: Callable[[], object] | None = None, seconds: float = 0.0) -> None:
        pass

    def going_down(self) -> bool:
        return bool(self.connection.ended())

    def close(self) -> None:
        self.connection.sock.close()
        self.closed.set()
