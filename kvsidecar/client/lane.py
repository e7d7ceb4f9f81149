"""The fast lane: the messages of gRPC, length-prefixed, on connections of the attach socket.

A blocking round trip takes 41 us where gRPC takes 190 on an open stream and 520 for a unary call (Python on both
sides, measured). Sending is a system call of the caller's own thread: handing a message to another thread costs more,
and waits for the GIL.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvsidecar.client.link import Link
from kvsidecar.client.messages import CarrierError
from kvsidecar.client.waiting import wait_readable
from kvsidecar.protocol.framing import FrameReader, FrameTooLong, frame
from kvsidecar.v1 import sidecar_pb2 as pb

_CODES = {code.value[0]: code for code in grpc.StatusCode}
RECEIVE_BYTES = 64 * 1024
STEP_ASIDE_SECONDS = 0.002
"""The reading thread leaves the answers to the one that waits for them, if that has just read some."""

Fill = Callable[[Any, pb.AttachRequest], bool]
"""Makes an item into a message, when it is its turn. False: there is nothing to send."""
Take = Callable[[pb.AttachReply], None]


class Replies:
    """Cuts what arrives into replies."""

    def __init__(self) -> None:
        self._frames = FrameReader()
        self.feed = self._frames.feed

    def next(self) -> pb.LaneReply | None:
        """The next complete reply, None if there is none yet. Raises ConnectionError if these are no replies."""
        try:
            payload = self._frames.next()
            return None if payload is None else pb.LaneReply.FromString(payload)
        except FrameTooLong as error:
            raise ConnectionError(f"the daemon announced a reply of {error.length} bytes") from error
        except DecodeError as error:
            raise ConnectionError(f"a reply of the daemon does not parse: {error}") from error


class LaneStream:
    """The Attach stream of a connection. Implements `kvsidecar.client.connection.AttachCarrier`.

    Args:
        link: of the rank; its socket is this stream's from now on.
        take: is given what the daemon says, one after the other, in the thread that reads it.
        lock: is held while the stream's own state changes; ``fill`` may take it.
    """

    def __init__(self, link: Link, fill: Fill, take: Take, lock: threading.RLock) -> None:
        self.settled = False
        self._link = link
        self._socket = link.connection
        self._fill = fill
        self._take = take
        self._lock = lock
        self._reading = threading.Lock()
        # Of what has arrived; under _reading, so that it is taken in order.
        self._arrived = Replies()
        self._end: CarrierError | None = None
        self._ended = False
        self._used_until = 0.0
        """So long another thread sends and reads, as far as is known; monotonic seconds."""
        self._reads = 0
        """Of that thread, that found something."""
        # Of what the daemon has not taken yet; under the lock.
        self._rest = b""
        self._waiting: deque[Any] = deque()
        self._flusher: threading.Thread | None = None
        self._has_waiting = threading.Event()
        self._over = False

    def finish(self) -> None:
        self.put(None)

    def cancel(self) -> None:
        self._link.shut_down()

    def read(self) -> None:
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        try:
            while not self._ended:
                readable.poll()
                if time.monotonic() < self._used_until:
                    # Every wake-up of this thread holds up that one, which needs the GIL again after a system call.
                    reads = self._reads
                    time.sleep(STEP_ASIDE_SECONDS)
                    if self._reads != reads:
                        continue
                with self._reading:
                    self._read()
        finally:
            self._stop_flusher()
        if self._end is not None:
            raise self._end

    def read_now(self) -> None:
        if self._reading.acquire(blocking=False):
            try:
                if self._read():
                    self._reads += 1
                    self._used_until = time.monotonic() + STEP_ASIDE_SECONDS
                if self._ended:  # the reader waits for the socket
                    with suppress(OSError):
                        self._socket.shutdown(socket.SHUT_RD)
            finally:
                self._reading.release()

    def wait_readable(self, seconds: float) -> bool:
        wait_readable(self._socket.fileno(), seconds)
        return True

    def _read(self) -> bool:
        """Whether something had arrived."""
        if self._ended:
            return False
        try:
            data = self._socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("the daemon closed it")
            self._arrived.feed(data)
            while (reply := self._arrived.next()) is not None:
                match reply.WhichOneof("message"):
                    case "attach":
                        self._take(reply.attach)
                    case "ended":
                        self.settled = self._ended = True
                        self._end = error_of(reply.ended.error) if reply.ended.HasField("error") else None
                        break
                    case "error":
                        self._ended, self._end = True, error_of(reply.error)
                        break
        except BlockingIOError:
            return False
        except OSError as error:
            self._ended, self._end = True, no_answer(error)
        return True

    # -- up ----------------------------------------------------------------------------------------------------------

    def put(self, *items: Any) -> None:
        self._used_until = time.monotonic() + STEP_ASIDE_SECONDS
        with self._lock:
            if self._rest or self._waiting:
                self._waiting += items
            elif not self._send(*items) and not self._over:
                if self._flusher is None:
                    self._flusher = threading.Thread(target=self._flush, name="kvsidecar-flush", daemon=True)
                    self._flusher.start()
                self._has_waiting.set()

    def _send(self, *items: Any) -> bool:
        """False: a rest of them is left."""
        data = b""
        for item in items:
            request = pb.LaneRequest()
            if item is None:
                request.detach.SetInParent()
            elif not self._fill(item, request.attach):
                continue
            data += frame(request.SerializeToString())
        return not data or self._write(data)

    def _write(self, data: bytes) -> bool:
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(data)  # the reader hears of it
        self._rest = data[sent:]
        return not self._rest

    def _flush(self) -> None:
        """In a thread: send what the socket's buffer had no room for. It starts with the first such message."""
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while True:
            self._has_waiting.wait()
            writable.poll()
            with self._lock:  # for one message at a time: an engine's thread may wait for it
                if self._over:
                    return
                gone = self._write(self._rest) if self._rest else self._send(self._waiting.popleft())
                if gone and not self._waiting:
                    self._has_waiting.clear()

    def _stop_flusher(self) -> None:
        with self._lock:
            self._over = True
        self._has_waiting.set()
        if self._flusher is not None:
            self.cancel()  # it may wait for room in the socket
            self._flusher.join()


def kind_of(request: pb.LaneRequest) -> str:
    """Name of the message that is in it; of the answer, too."""
    return str(request.WhichOneof("message"))


def no_answer(error: BaseException) -> CarrierError:
    if isinstance(error, TimeoutError):
        return CarrierError(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    return CarrierError(grpc.StatusCode.UNAVAILABLE, f"the connection ended: {error}")


def error_of(error: pb.LaneError) -> CarrierError:
    return CarrierError(_CODES.get(error.code, grpc.StatusCode.UNKNOWN), error.text)
