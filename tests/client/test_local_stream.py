"""The client's end of the local protocol's Attach stream: with a daemon that is late, full, or out of its mind."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvsidecar.client.ledger import Ledger, Phase, SubmittedJob
from kvsidecar.client.local_stream import LocalStream, ReplyReader
from kvsidecar.client.send_queue import SendQueue
from kvsidecar.client.session import AttachSession
from kvsidecar.client.types import Blocks
from kvsidecar.client.waiting import Monitor
from kvsidecar.protocol.framing import frame
from kvsidecar.types import Direction
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.client.fake_connection import FakeConnection, lookup_reply
from tests.client.fake_daemon import send
from tests.harness import SECONDS


class Stream:
    """A LocalStream to the test, and the send_queue that it sends."""

    def __init__(self, connection: FakeConnection, monitor: Any = None) -> None:
        self.monitor = monitor or Monitor()
        self.ledger = Ledger(10_000)
        self.send_queue = SendQueue(self.ledger)
        self.stream = LocalStream(connection, self.send_queue, self.monitor)  # type: ignore[arg-type]

    def put(self, *numbers: int, nbytes: int = 0) -> None:
        """Stores of so many bytes; those whose number is a multiple of ten have ended."""
        with self.monitor.lock:
            for number in numbers:
                job = SubmittedJob(number, Direction.STORE, [Blocks(0, bytes(nbytes), [])], phase=Phase.QUEUED)
                if number % 10:
                    self.ledger.add(job)
                self.send_queue.put(job)
            self.stream.pump()

    def finish(self) -> None:
        with self.monitor.lock:
            self.send_queue.finish()
            self.stream.pump()

    def read(self) -> None:
        """What a session's thread does."""
        while not self.stream.ended:
            self.stream.wait()
            self.stream.receive()
        self.stream.close()


def flushing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kvsidecar-flush"]


def test_more_than_the_socket_holds_is_sent_in_order_and_nobody_waits_for_it() -> None:
    connection = FakeConnection()
    stream = Stream(connection)
    reader = threading.Thread(target=stream.read)
    reader.start()
    arrived: list[int] = []

    def take() -> None:
        for request in connection.requests():
            if request.WhichOneof("message") == "detach":
                break
            arrived.append(request.attach.store.job)

    taking = threading.Thread(target=take)
    for item in range(1, 2001, 2):
        stream.put(item, item + 1, nbytes=item % 7 * 10_000)
        if item == 999:  # 30 MB: returns although nobody reads; from now on somebody does, while more is put
            assert not arrived
            taking.start()
    stream.finish()
    taking.join(SECONDS)
    assert arrived == [item for item in range(1, 2001) if item % 10], "or one was sent that had ended"
    send(connection.far, ended=pb.Ended())
    reader.join(SECONDS)
    assert stream.stream.quiesced
    assert not flushing_threads()
    connection.far.close()


class NosyLock:
    """An RLock that calls ``between`` whenever the flushing thread lets go of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.between: Callable[[], None] = lambda: None
        self._inside = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread().name == "kvsidecar-flush" and not self._inside:
            self._inside = True
            self.between()
            self._inside = False


def test_what_is_put_while_the_backlog_is_sent_goes_behind_it() -> None:
    connection, lock = FakeConnection(), NosyLock()
    numbers = iter([number for number in range(1, 1000) if number % 10])
    stream = Stream(connection, SimpleNamespace(lock=lock, changed=SimpleNamespace(notify_all=lambda: None)))
    expected = [number for number in range(1, 1000) if number % 10][:60]

    def put_another() -> None:
        if (number := next(numbers)) <= expected[-1]:
            stream.put(number, nbytes=30_000)

    for _ in range(30):
        stream.put(next(numbers), nbytes=30_000)
    lock.between = put_another
    arrived = [request.attach.store.job for _, request in zip(range(60), connection.requests(), strict=False)]
    assert arrived == expected
    stream.stream.cancel()
    stream.read()
    connection.far.close()


def test_whoever_waits_reads_the_answers_itself_and_each_is_taken_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection, taken = FakeConnection(), []
    monkeypatch.setattr(AttachSession, "_handle", lambda _, reply: taken.append(reply.done.job))
    transport: Any = SimpleNamespace(open_stream=lambda *args: LocalStream(connection, *args))  # type: ignore[arg-type]
    session = AttachSession(
        transport, pb.AttachRequest(register=pb.Register()), Ledger(1), Monitor(), ring_size=0, wake=lambda: None
    )
    stop = threading.Event()

    def wait() -> None:
        while not stop.is_set():
            session.wait_readable(1e-3)
            session.read_now()

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for job in range(1, 3001):
        send(connection.far, attach=pb.AttachReply(done=pb.JobDone(job=job)))
    send(connection.far, ended=pb.Ended())
    session._thread.join(SECONDS)  # also if another thread has read the end
    assert session.ended
    stop.set()
    for thread in threads:
        thread.join(SECONDS)
    assert taken == list(range(1, 3001))
    assert session.quiesced
    connection.far.close()


def test_an_answer_is_received_without_the_reading_thread() -> None:
    connection = FakeConnection()
    stream = Stream(connection).stream
    assert not stream.receive(helping=True)
    send(connection.far, attach=pb.AttachReply(done=pb.JobDone(job=7)))
    assert [reply.done.job for reply in stream.receive(helping=True)] == [7]
    connection.far.close()


def test_answers_are_taken_while_somebody_sends_on_and_on_and_never_reads() -> None:
    connection, taken = FakeConnection(), threading.Event()
    stream = Stream(connection)

    def read() -> None:
        while not stream.stream.ended:
            stream.stream.wait()
            if stream.stream.receive():
                taken.set()

    reader = threading.Thread(target=read)
    reader.start()
    for item in range(1, 5000):  # the socket holds them all
        stream.put(item)
        if item == 10:
            send(connection.far, attach=pb.AttachReply(done=pb.JobDone(job=1)))
        if taken.wait(1e-4):
            break
    assert taken.is_set()
    stream.stream.cancel()
    reader.join(SECONDS)
    connection.far.close()


@pytest.mark.parametrize("reader_first", [True, False])
def test_cancelling_a_stream_with_a_backlog_ends_its_threads(reader_first: bool) -> None:
    stream = Stream(FakeConnection())
    for item in range(1, 10):
        stream.put(item, nbytes=1_000_000)
    assert flushing_threads()
    if reader_first:
        reader = threading.Thread(target=stream.read)
        reader.start()
        stream.stream.cancel()
        reader.join(SECONDS)
        assert not reader.is_alive()
    else:
        stream.stream.cancel()
        stream.read()
    assert not stream.stream.quiesced
    assert not flushing_threads()


def test_only_the_daemons_own_word_quiesces_a_stream() -> None:
    for reply, quiesced, code in (
        (pb.LocalReply(ended=pb.Ended()), True, None),
        (pb.LocalReply(ended=pb.Ended(error=pb.LocalError(code=14, text="x"))), True, grpc.StatusCode.UNAVAILABLE),
        (pb.LocalReply(error=pb.LocalError(code=3, text="x")), False, grpc.StatusCode.INVALID_ARGUMENT),
        (pb.LocalReply(error=pb.LocalError(code=99, text="x")), False, grpc.StatusCode.UNKNOWN),
        (None, False, grpc.StatusCode.UNAVAILABLE),
    ):
        connection = FakeConnection()
        stream = Stream(connection)
        payload = reply.SerializeToString() if reply else b"\xff"
        connection.far.sendall(frame(payload))
        connection.far.shutdown(socket.SHUT_WR)
        stream.read()
        assert (stream.stream.error and stream.stream.error.code) is code
        assert stream.stream.quiesced is quiesced


def test_replies_are_cut_wherever_the_bytes_are() -> None:
    data = b"".join(lookup_reply(call, call) for call in range(1, 5))
    for size in (1, 2, 5, 7, len(data)):
        replies, calls = ReplyReader(), []
        for start in range(0, len(data), size):
            replies.feed(data[start : start + size])
            while (each := replies.next()) is not None:
                calls.append(each.call)
        assert calls == [1, 2, 3, 4]


def test_a_backlog_that_cannot_be_sent_ends_the_stream_and_is_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connection = FakeConnection()
    stream = Stream(connection)
    reader = threading.Thread(target=stream.read)
    reader.start()
    for item in range(1, 10):
        stream.put(item, nbytes=1_000_000)
    assert flushing_threads()
    monkeypatch.setattr(stream.stream, "_next_frame", lambda: 1 // 0)
    with suppress(OSError):  # the stream is shut meanwhile
        while connection.far.recv(1 << 20):
            pass
    reader.join(SECONDS)
    assert not reader.is_alive(), "nothing is sent any more, and nobody hears of it"
    assert not flushing_threads()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
