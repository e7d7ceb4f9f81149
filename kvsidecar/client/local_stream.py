"""The Attach stream of the local protocol.

Sending is a system call of the caller's own thread: handing a message to another thread costs more, and waits for the
GIL.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress

import grpc
from google.protobuf.message import DecodeError

from kvsidecar.client.link import Link
from kvsidecar.client.messages import CarrierError
from kvsidecar.client.outbox import Outbox
from kvsidecar.client.transport import AttachStream
from kvsidecar.client.waiting import Monitor, wait_readable
from kvsidecar.protocol.framing import FrameReader, FrameTooLong, frame
from kvsidecar.v1 import sidecar_pb2 as pb

_CODES = {code.value[0]: code for code in grpc.StatusCode}
RECEIVE_BYTES = 64 * 1024
STEP_ASIDE_SECONDS = 0.002
"""The reading thread leaves the answers to the one that waits for them, if that has just read some."""


class Replies:
    """Cuts what arrives into replies."""

    def __init__(self) -> None:
        self._frames = FrameReader()
        self.feed = self._frames.feed

    def next(self) -> pb.LocalReply | None:
        """The next complete reply, None if there is none yet. Raises ConnectionError if these are no replies."""
        try:
            payload = self._frames.next()
            return None if payload is None else pb.LocalReply.FromString(payload)
        except FrameTooLong as error:
            raise ConnectionError(f"the daemon announced a reply of {error.length} bytes") from error
        except DecodeError as error:
            raise ConnectionError(f"a reply of the daemon does not parse: {error}") from error


class LocalStream(AttachStream):
    """On the rank's link, whose socket is this stream's from now on.

    A thread of its own, which starts when it is first needed, sends what the socket had no room for.
    """

    def __init__(self, link: Link, outbox: Outbox, monitor: Monitor) -> None:
        self.ended = False
        self.error: CarrierError | None = None
        self.quiesced = False
        self._link = link
        self._socket = link.connection
        self._outbox = outbox
        self._monitor = monitor
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._arrived = Replies()
        self._used_until = 0.0
        """So long another thread sends and receives, as far as is known; monotonic seconds."""
        self._helped = 0
        """Receipts of other threads that found something."""
        # Of what the daemon has not taken yet; under the lock.
        self._rest = b""
        self._has_backlog = threading.Event()
        """Set while the other thread sends: nobody overtakes it."""
        self._flusher: threading.Thread | None = None
        self._closed = False

    # -- down --------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        while True:
            self._readable.poll()
            if self.ended or time.monotonic() >= self._used_until:
                return
            # Every wake-up of this thread holds up that one, which needs the GIL again after a system call.
            helped = self._helped
            time.sleep(STEP_ASIDE_SECONDS)
            if self._helped == helped:
                return

    def receive(self, *, helping: bool = False) -> list[pb.AttachReply]:
        replies: list[pb.AttachReply] = []
        if self.ended:
            return replies
        try:
            data = self._socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("the daemon closed it")
            self._arrived.feed(data)
            while not self.ended and (reply := self._arrived.next()) is not None:
                match reply.WhichOneof("message"):
                    case "attach":
                        replies.append(reply.attach)
                    case "ended":
                        self.error = error_of(reply.ended.error) if reply.ended.HasField("error") else None
                        self.quiesced = self.ended = True
                    case "error":
                        self.error = error_of(reply.error)
                        self.ended = True
        except BlockingIOError:
            return replies
        except OSError as error:
            self.error = no_answer(error)
            self.ended = True
        if helping:
            self._helped += 1
            self._used_until = time.monotonic() + STEP_ASIDE_SECONDS
        return replies

    def wait_readable(self, seconds: float) -> bool:
        wait_readable(self._socket.fileno(), seconds)
        return True

    def wake_reader(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def cancel(self) -> None:
        self._link.shut_down()

    def close(self) -> None:
        with self._monitor.lock:
            self._closed = True
        self._has_backlog.set()
        if self._flusher is not None:
            self.cancel()  # it may wait for room in the socket
            self._flusher.join()

    # -- up ----------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        self._used_until = time.monotonic() + STEP_ASIDE_SECONDS
        if self._has_backlog.is_set():
            return
        data = b""
        while self._outbox.waiting:
            data += self._next_frame()
        if data and not self._write(data) and not self._closed:
            self._has_backlog.set()
            if self._flusher is None:
                self._flusher = threading.Thread(target=self._flush, name="kvsidecar-flush", daemon=True)
                self._flusher.start()

    def _next_frame(self) -> bytes:
        """The frame of the next item in the outbox; empty if there is nothing to say."""
        request = pb.LocalRequest()
        if not self._outbox.take(request.attach):
            if not self._outbox.is_finished:
                return b""
            request.detach.SetInParent()
        return frame(request.SerializeToString())

    def _write(self, data: bytes) -> bool:
        """False: a rest of it is left."""
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(data)  # the reader hears of it
        self._rest = data[sent:]
        return not self._rest

    def _flush(self) -> None:
        """In a thread: send what the socket's buffer had no room for, and what is put meanwhile."""
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while True:
            self._has_backlog.wait()
            writable.poll()
            with self._monitor.lock:  # for one message at a time: an engine's thread may wait for it
                if self._closed:
                    return
                if self._write(self._rest or self._next_frame()) and not self._outbox.waiting:
                    self._has_backlog.clear()
                self._monitor.changed.notify_all()


def no_answer(error: BaseException) -> CarrierError:
    if isinstance(error, TimeoutError):
        return CarrierError(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    return CarrierError(grpc.StatusCode.UNAVAILABLE, f"the connection ended: {error}")


def error_of(error: pb.LocalError) -> CarrierError:
    return CarrierError(_CODES.get(error.code, grpc.StatusCode.UNKNOWN), error.text)
