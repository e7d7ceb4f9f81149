"""The Attach stream of the local protocol.

The caller's own thread makes the system call that sends: to hand a message to another thread costs more, and waits for
the GIL.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from contextlib import suppress

import grpc
from google.protobuf.message import DecodeError

from kvsidecar.client.connection import Connection
from kvsidecar.client.messages import TransportError
from kvsidecar.client.send_queue import SendQueue
from kvsidecar.client.transport import DaemonStream
from kvsidecar.client.waiting import Monitor
from kvsidecar.protocol.framing import FrameReader, FrameTooLong, frame
from kvsidecar.support.polling import wait_readable
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")

_CODES = {code.value[0]: code for code in grpc.StatusCode}
RECEIVE_BYTES = 64 * 1024
STEP_ASIDE_SECONDS = 0.002
"""How long the reading thread leaves the answers to a thread that waits for them and has just read some."""


class ReplyReader:
    """Splits the received bytes into replies."""

    def __init__(self) -> None:
        self._frames = FrameReader()
        self.feed = self._frames.feed

    def next(self) -> pb.LocalReply | None:
        """The next complete reply, None if there is none yet. Raises ConnectionError if the bytes are invalid."""
        try:
            payload = self._frames.next()
            return None if payload is None else pb.LocalReply.FromString(payload)
        except FrameTooLong as error:
            raise ConnectionError(f"the daemon announced a reply of {error.length} bytes") from error
        except DecodeError as error:
            raise ConnectionError(f"a reply of the daemon does not parse: {error}") from error


class LocalStream(DaemonStream):
    """Takes over the socket of the rank's connection.

    A thread, started when it is first needed, sends what the socket has no room for.
    """

    def __init__(self, connection: Connection, send_queue: SendQueue, monitor: Monitor) -> None:
        self.ended = False
        self.error: TransportError | None = None
        self.quiesced = False
        self._connection = connection
        self._socket = connection.sock
        self._send_queue = send_queue
        self._monitor = monitor
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._replies = ReplyReader()
        self._used_until = 0.0
        """Until then another thread is assumed to send and receive; monotonic seconds."""
        self._helped = 0
        """How many times another thread has received something."""
        # What the socket had no room for; guarded by the client's lock.
        self._rest = b""
        self._has_backlog = threading.Event()
        """Set while the thread sends: nothing may overtake it."""
        self._flusher: threading.Thread | None = None
        self._closed = False

    # -- receiving ---------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        while True:
            self._readable.poll()
            if self.ended or time.monotonic() >= self._used_until:
                return
            # Each wake-up of this thread delays the other one, which needs the GIL again after a system call.
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
            self._replies.feed(data)
            while not self.ended and (reply := self._replies.next()) is not None:
                match reply.WhichOneof("message"):
                    case "attach":
                        replies.append(reply.attach)
                    case "ended":
                        self.error = error_from(reply.ended.error) if reply.ended.HasField("error") else None
                        self.quiesced = self.ended = True
                    case "error":
                        self.error = error_from(reply.error)
                        self.ended = True
        except BlockingIOError:
            return replies
        except OSError as error:
            self.error = connection_error(error)
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
        self._connection.shut_down()

    def close(self) -> None:
        with self._monitor.lock:
            self._closed = True
        self._has_backlog.set()
        if self._flusher is not None:
            self.cancel()  # it may wait for room in the socket
            self._flusher.join()

    # -- sending ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        self._used_until = time.monotonic() + STEP_ASIDE_SECONDS
        if self._has_backlog.is_set():
            return
        data = b""
        while self._send_queue.waiting:
            data += self._next_frame()
        if data and not self._write(data) and not self._closed:
            self._has_backlog.set()
            if self._flusher is None:
                self._flusher = threading.Thread(target=self._flush, name="kvsidecar-flush", daemon=True)
                self._flusher.start()

    def _next_frame(self) -> bytes:
        """The frame of the next item in the send queue; empty if it needs none."""
        request = pb.LocalRequest()
        if not self._send_queue.take(request.attach):
            if not self._send_queue.is_finished:
                return b""
            request.detach.SetInParent()
        return frame(request.SerializeToString())

    def _write(self, data: bytes) -> bool:
        """Send a frame. False: a part of it is left in ``_rest``."""
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(data)  # the reading thread receives the error
        self._rest = data[sent:]
        return not self._rest

    def _flush(self) -> None:
        """Send, in a thread, what the socket had no room for and what is queued meanwhile."""
        try:
            self._send_backlog()
        except Exception:  # noqa: BLE001 - nothing is sent without this thread
            _log.exception("kvsidecar: jobs were not sent because of an unexpected error: the session ends")
            self.cancel()

    def _send_backlog(self) -> None:
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while True:
            self._has_backlog.wait()
            writable.poll()
            with self._monitor.lock:  # released after each message: an engine's thread may wait for it
                if self._closed:
                    return
                if self._write(self._rest or self._next_frame()) and not self._send_queue.waiting:
                    self._has_backlog.clear()
                self._monitor.changed.notify_all()


def connection_error(error: BaseException) -> TransportError:
    if isinstance(error, TimeoutError):
        return TransportError(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    return TransportError(grpc.StatusCode.UNAVAILABLE, f"the connection ended: {error}")


def error_from(error: pb.LocalError) -> TransportError:
    return TransportError(_CODES.get(error.code, grpc.StatusCode.UNKNOWN), error.text)
