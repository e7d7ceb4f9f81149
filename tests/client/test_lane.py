"""The client's end of the fast lane: what it does with a daemon that is late, full, or out of its mind."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from kvsidecar.client import BreakerState, Client, DaemonUnreachable
from kvsidecar.client.lane import LaneStream, Replies
from kvsidecar.client.link import connect
from kvsidecar.client.messages import CarrierError
from kvsidecar.protocol.framing import frame
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.client.fake_daemon import FakeDaemon, send
from tests.client.fake_link import FakeLink, lookup_reply
from tests.harness import NAMESPACE, SECONDS, hashes

# -- the Attach stream -----------------------------------------------------------------------------------------------


def test_more_than_the_socket_holds_is_sent_in_order_and_nobody_waits_for_it() -> None:
    link = FakeLink()

    def fill(item: int, message: pb.AttachRequest) -> bool:
        message.store.job = item
        message.store.blocks.add(hashes=bytes(item % 7 * 10_000))
        return item % 10 != 0  # some have ended when their turn comes

    stream = LaneStream(link, fill, ignore, threading.RLock())  # type: ignore[arg-type]
    reader = threading.Thread(target=read_until_error, args=(stream,))
    reader.start()
    arrived: list[int] = []

    def take() -> None:
        for request in link.requests():
            if request.WhichOneof("message") == "detach":
                break
            arrived.append(request.attach.store.job)

    taking = threading.Thread(target=take)
    for item in range(1, 2001, 2):
        stream.put(item, item + 1)
        if item == 999:  # 30 MB: returns although nobody reads; from now on somebody does, while more is put
            assert not arrived
            taking.start()
    stream.finish()
    taking.join(SECONDS)
    assert arrived == [item for item in range(1, 2001) if item % 10]
    send(link.far, ended=pb.Ended())
    reader.join(SECONDS)
    assert stream.settled
    assert not [thread for thread in threading.enumerate() if thread.name == "kvsidecar-flush"]
    link.far.close()


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
    link, lock, numbers = FakeLink(), NosyLock(), itertools.count(1)

    def fill(item: int, message: pb.AttachRequest) -> bool:
        message.store.job = item
        message.store.blocks.add(hashes=bytes(30_000))
        return True

    def put_another() -> None:
        if (number := next(numbers)) <= 60:
            stream.put(number)

    stream = LaneStream(link, fill, ignore, lock)  # type: ignore[arg-type]
    for _ in range(30):
        stream.put(next(numbers))
    lock.between = put_another
    arrived = [request.attach.store.job for _, request in zip(range(60), link.requests(), strict=False)]
    assert arrived == list(range(1, 61))
    stream.cancel()
    read_until_error(stream)
    link.far.close()


def read_until_error(stream: LaneStream) -> None:
    with suppress(CarrierError):
        stream.read()


def ignore(_: pb.AttachReply) -> None:
    pass


def test_whoever_waits_reads_the_answers_itself_and_each_is_taken_once_and_in_order() -> None:
    link, taken = FakeLink(), []
    stream = LaneStream(link, lambda *_: True, lambda reply: taken.append(reply.done.job), threading.RLock())  # type: ignore[arg-type]
    stop = threading.Event()

    def wait() -> None:
        while not stop.is_set():
            stream.wait_readable(1e-3)
            stream.read_now()

    threads = [
        threading.Thread(target=read_until_error, args=(stream,)),
        *(threading.Thread(target=wait) for _ in range(3)),
    ]
    for thread in threads:
        thread.start()
    for job in range(1, 3001):
        send(link.far, attach=pb.AttachReply(done=pb.JobDone(job=job)))
    send(link.far, ended=pb.Ended())
    threads[0].join(SECONDS)  # also if another thread has read the end
    assert not threads[0].is_alive()
    stop.set()
    for thread in threads[1:]:
        thread.join(SECONDS)
    assert taken == list(range(1, 3001))
    assert stream.settled
    link.far.close()


def test_an_answer_is_taken_without_the_reading_thread() -> None:
    link, taken = FakeLink(), []
    stream = LaneStream(link, lambda *_: True, lambda reply: taken.append(reply.done.job), threading.RLock())  # type: ignore[arg-type]
    stream.read_now()
    assert not taken
    send(link.far, attach=pb.AttachReply(done=pb.JobDone(job=7)))
    stream.read_now()
    assert taken == [7]
    link.far.close()


def test_answers_are_taken_while_somebody_sends_on_and_on_and_never_reads() -> None:
    link, taken = FakeLink(), threading.Event()

    def fill(item: int, message: pb.AttachRequest) -> bool:
        message.store.job = item
        return True

    stream = LaneStream(link, fill, lambda _: taken.set(), threading.RLock())  # type: ignore[arg-type]
    reader = threading.Thread(target=read_until_error, args=(stream,))
    reader.start()
    for item in range(1, 5000):  # the socket holds them all
        stream.put(item)
        if item == 10:
            send(link.far, attach=pb.AttachReply(done=pb.JobDone(job=1)))
        if taken.wait(1e-4):
            break
    assert taken.is_set()
    stream.cancel()
    reader.join(SECONDS)
    link.far.close()


@pytest.mark.parametrize("reader_first", [True, False])
def test_cancelling_a_stream_with_a_backlog_ends_its_threads(reader_first: bool) -> None:
    link = FakeLink()

    def fill(_: int, message: pb.AttachRequest) -> bool:
        message.store.blocks.add(hashes=bytes(1_000_000))
        return True

    stream = LaneStream(link, fill, ignore, threading.RLock())  # type: ignore[arg-type]
    for item in range(10):
        stream.put(item)
    if reader_first:
        reader = threading.Thread(target=read_until_error, args=(stream,))
        reader.start()
        stream.cancel()
        reader.join(SECONDS)
        assert not reader.is_alive()
    else:
        stream.cancel()
        read_until_error(stream)
    assert not stream.settled
    assert not [thread for thread in threading.enumerate() if thread.name == "kvsidecar-flush"]


def test_only_the_daemons_own_word_settles_a_stream() -> None:
    for reply, settled, code in (
        (pb.LaneReply(ended=pb.Ended()), True, None),
        (pb.LaneReply(ended=pb.Ended(error=pb.LaneError(code=14, text="x"))), True, grpc.StatusCode.UNAVAILABLE),
        (pb.LaneReply(error=pb.LaneError(code=3, text="x")), False, grpc.StatusCode.INVALID_ARGUMENT),
        (pb.LaneReply(error=pb.LaneError(code=99, text="x")), False, grpc.StatusCode.UNKNOWN),
        (None, False, grpc.StatusCode.UNAVAILABLE),
    ):
        link = FakeLink()
        stream = LaneStream(link, lambda *_: True, ignore, threading.RLock())  # type: ignore[arg-type]
        payload = reply.SerializeToString() if reply else b"\xff"
        link.far.sendall(frame(payload))
        link.far.shutdown(socket.SHUT_WR)
        if code is None:
            stream.read()
        else:
            with pytest.raises(CarrierError) as caught:
                stream.read()
            assert caught.value.code is code
        assert stream.settled is settled


def test_replies_are_cut_wherever_the_bytes_are() -> None:
    data = b"".join(lookup_reply(call, call) for call in range(1, 5))
    for size in (1, 2, 5, 7, len(data)):
        replies, calls = Replies(), []
        for start in range(0, len(data), size):
            replies.feed(data[start : start + size])
            while (each := replies.next()) is not None:
                calls.append(each.call)
        assert calls == [1, 2, 3, 4]


# -- connecting ------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(short_dir: Path) -> Iterator[SimpleNamespace]:
    """A daemon whose queue of connections is full."""
    path = str(short_dir / "full.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(0)
    waiting = []
    while True:
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        waiting.append(one)
        try:
            one.connect(path)
        except BlockingIOError:
            break
    yield SimpleNamespace(path=path, listener=listener)
    for each in (*waiting, listener):
        each.close()


def test_a_full_queue_of_connections_is_waited_for(full: SimpleNamespace) -> None:
    def serve() -> None:
        while True:
            link, _ = full.listener.accept()
            if link.recv(4096):
                payload = pb.Welcome(token=b"t", epoch=3).SerializeToString()
                link.sendall(frame(payload))
                return

    def close_those_before() -> None:
        for link in [full.listener.accept()[0]]:
            link.close()
        serve()

    threading.Timer(0.05, close_those_before).start()
    link = connect(full.path, fds=(), client="", timeout=SECONDS)
    assert link.epoch == 3
    link.close()


def test_a_queue_that_stays_full_is_an_unreachable_daemon(full: SimpleNamespace) -> None:
    with pytest.raises(DaemonUnreachable, match="queue"):
        connect(full.path, fds=(), client="", timeout=0.05)


def test_waiting_for_a_full_queue_can_be_given_up(full: SimpleNamespace) -> None:
    cancel = os.eventfd(1)
    with pytest.raises(DaemonUnreachable, match="being closed"):
        connect(full.path, fds=(), client="", timeout=SECONDS, cancel=cancel)
    os.close(cancel)


def test_hits_of_a_bitmap_are_flags_per_hash(short_dir: Path) -> None:
    from kvsidecar.client import LookupMode

    with FakeDaemon(short_dir) as daemon:
        bitmap = bytes((0b10110001, 0b1))
        daemon.on_lookup = lambda _: pb.LookupReply(ready=True, groups=[pb.GroupHits(group=0, hits=5, bitmap=bitmap)])
        client = Client(daemon.socket, step_budget=SECONDS)
        expected = tuple(bool(bitmap[i // 8] >> i % 8 & 1) for i in range(10))
        for asked in (hashes(*range(10)), b"".join(hashes(*range(10)))):
            result = client.lookup(NAMESPACE, {0: asked}, mode=LookupMode.BITMAP)
            assert result.groups[0].found == expected
        client.close()


def test_a_scheduler_at_a_daemon_that_hangs_in_the_greeting_pays_three_budgets(full: SimpleNamespace) -> None:
    os.symlink(full.path, full.path + ".attach")
    client = Client(full.path, step_budget=0.02, timeout=SECONDS)
    for _ in range(3):
        assert client.lookup(NAMESPACE, {0: hashes("a")}).reason == "daemon_lost"
    assert client.breaker_state is not BreakerState.CLOSED
    assert client.lookup(NAMESPACE, {0: hashes("a")}, timeout=SECONDS).reason == "daemon_lost"
    client.close()
