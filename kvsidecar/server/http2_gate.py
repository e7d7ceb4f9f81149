"""The gate in front of gRPC: reads the frames of one HTTP/2 connection, and decides what may pass. Does no I/O.

gRPC takes a header block of 14 KB for 2 MiB of headers, and keeps a call whose message never ends for ever; it limits
both, if at all, for all clients together. So each user's connections pass here before gRPC sees them. A call beyond a
limit is answered by the gate, and its connection stays; a client that breaks the rules of HTTP/2 or floods loses it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvsidecar.core.quota import Quota
from kvsidecar.errors import InvalidRequest, KVSidecarError, LimitExceeded, Unfinished
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.server import http2_frames as h2
from kvsidecar.server.header_block import BadHeaderBlock, count_fields

MAX_BLOCK_BYTES = 8192
"""Limit of a header block as it is sent; gRPC takes no more metadata than that either."""
MAX_FIELDS = 64
"""Limit of a header block's fields. A field of the dynamic table, named by one byte, has up to 4 KiB."""
MAX_CONTROL_FRAMES = 256
"""Limit of a connection on frames that carry neither calls nor messages, such as PING, SETTINGS and RST_STREAM. Each
second gives `CONTROL_FRAMES_PER_SECOND` of them back."""
CONTROL_FRAMES_PER_SECOND = 64
FRAMES_AT_ONCE = 64
"""Frames to read before others have their turn: about 0.2 ms."""
CALLS_AT_ONCE = 16
"""Calls to begin, or to end, before others have their turn. gRPC wakes a task for each in the same iteration, some
25 µs each."""
MESSAGE_SECONDS = 10
"""Time limit of the start of a connection, of the first message of a call, and from the first byte of a message to its
last. Counted in `Gate.second`, so that a daemon that stood still does not count its own pause."""

_PREFIX_BYTES = 5
"""Bytes before each message of gRPC: 1 for compression, 4 for its length."""


@dataclass(frozen=True, slots=True)
class CallQuotas:
    """Limits of all connections together, each per user and in all."""

    calls: Quota
    """Open calls."""
    nbytes: Quota
    """Bytes of messages that have not arrived as a whole, or whose call has not been answered."""


@dataclass(slots=True)
class _Call:
    prefix: bytes = b""
    """What has arrived of the next message's prefix."""
    missing: int = 0
    """Bytes of the current message that have not arrived."""
    held: int = 0
    """Bytes taken from the quota."""
    begun: bool = False
    """Whether a message has arrived as a whole."""
    answered: bool = False
    half_closed: bool = False
    """Whether the client sends nothing more."""
    seconds: int = 0
    """How long it has been waited for."""

    @property
    def awaited(self) -> bool:
        """Whether the client must send more soon. Between two messages of a stream it may be silent for days."""
        return not self.half_closed and bool(self.missing or self.prefix or not self.begun)


@dataclass(slots=True)
class GateResult:
    """The effects of bytes from the client."""

    to_server: bytes = b""
    to_client: bytes = b""
    calls: int = 0
    """How many calls began, were given up by the client, or were ended because they are late."""
    given_up: int = 0
    """How many of them were given up."""
    refused: list[KVSidecarError] = field(default_factory=list)
    """Why calls, or in the end the connection, were refused."""


class Gate:
    """One connection.

    Args:
        user: the connection's user, for the quotas.
    """

    def __init__(self, user: Hashable, quotas: CallQuotas) -> None:
        self._user, self._quotas = user, quotas
        self._buffer = bytearray()
        self._read = 0
        """Bytes of the buffer that were looked at; what precedes an unfinished header block has passed."""
        self._block: bytearray | None = None
        """The header block that CONTINUATION frames are going to complete."""
        self._block_flags = 0
        self._begun = False
        """Whether the preface and the client's settings have arrived."""
        self._seconds = 0
        self._control_frames = 0
        self._last = 0
        """The newest stream."""
        self._ended = 0
        """A stream that gRPC has seen begin and end; 0: none."""
        self._calls: dict[int, _Call] = {}
        self._out: list[bytes] = []
        self._passed = GateResult()
        self._injected = bytearray()
        """Bytes for the client, once no frame of the server is under way."""
        self._from_server = _ServerFrames()
        self.over = False
        """Whether the connection has been refused, or `close` was called: nothing passes any more."""

    @property
    def calls(self) -> int:
        """Number of open calls."""
        return len(self._calls)

    @property
    def injected(self) -> int:
        """Bytes of its own that wait until the server has sent a whole frame."""
        return len(self._injected)

    # -- from the client -------------------------------------------------------------------------------------------

    def from_client(self, data: bytes) -> GateResult:
        """Take bytes of the client. At most `FRAMES_AT_ONCE` of the arrived frames are looked at, and at most
        `CALLS_AT_ONCE` calls begin or end; if there `is_more`, call it again without any bytes."""
        self._buffer += data
        if not self.over:
            try:
                self._take_frames()
            except KVSidecarError as error:
                self._refuse_connection(error)
        return self._result()

    @property
    def is_more(self) -> bool:
        """Whether a whole frame waits to be looked at."""
        rest = len(self._buffer) - self._read
        return not self.over and rest >= h2.HEAD_BYTES and rest >= h2.HEAD_BYTES + self._payload_bytes(self._read)

    def _payload_bytes(self, at: int) -> int:
        return int.from_bytes(self._buffer[at : at + 3], "big")

    def _take_frames(self) -> None:
        buffer, at = self._buffer, self._read
        if not self._begun and not at:
            preface = h2.PREFACE[: len(buffer)]
            if not buffer.startswith(preface):
                raise InvalidRequest("a connection to the gRPC socket does not speak HTTP/2")
            if len(preface) < len(h2.PREFACE):
                return
            at = len(h2.PREFACE)
        passed = complete = 0
        for _ in range(FRAMES_AT_ONCE):
            if len(buffer) - at < h2.HEAD_BYTES or self._passed.calls == CALLS_AT_ONCE:
                break
            length = self._payload_bytes(at)
            if length > h2.MAX_PAYLOAD_BYTES:
                raise InvalidRequest(f"an HTTP/2 frame of {length} bytes is over the limit of {h2.MAX_PAYLOAD_BYTES}")
            end = at + h2.HEAD_BYTES + length
            if end > len(buffer):
                break
            stream = int.from_bytes(buffer[at + 5 : at + 9], "big") & 0x7FFFFFFF
            refused = self._take(buffer[at + 3], buffer[at + 4], stream, at + h2.HEAD_BYTES, end)
            at = end
            if self._block is None:
                begin, complete = complete, at
                if refused is not None:
                    hidden = self._hide(stream, begin, at)
                    self._out.append(bytes(buffer[passed:at]))
                    passed = at
                    self._refuse_call(stream, refused, hidden=hidden)
        if complete > passed:
            self._out.append(bytes(buffer[passed:complete]))
        del buffer[:complete]
        self._read = at - complete

    def _take(self, kind: int, flags: int, stream: int, start: int, end: int) -> KVSidecarError | None:
        """Look at one frame. Returns why its call is refused, or None.

        Args:
            start, end: place of its payload in the buffer.

        Raises:
            KVSidecarError: the connection is refused.
        """
        if not self._begun and kind != h2.SETTINGS:
            raise InvalidRequest("the first HTTP/2 frame of a connection must be SETTINGS")
        self._begun = True
        if (self._block is not None) != (kind == h2.CONTINUATION):
            raise InvalidRequest("HTTP/2 frames in a wrong order: a header block must be completed first")
        if kind in (h2.DATA, h2.HEADERS) and flags & h2.PADDED:
            if start == end or self._buffer[start] >= end - start:
                raise InvalidRequest("an HTTP/2 frame has more padding than bytes")
            start, end = start + 1, end - self._buffer[start]
        if kind == h2.DATA:
            return self._take_data(stream, flags, start, end)
        if kind == h2.HEADERS:
            return self._take_headers(stream, flags, start, end)
        if kind == h2.CONTINUATION:
            self._count_control()
            return self._extend_block(stream, flags, start, end)
        if kind == h2.PUSH_PROMISE:
            raise InvalidRequest("a client must not send PUSH_PROMISE")
        if kind != h2.WINDOW_UPDATE:
            self._count_control()
        if kind == h2.RST_STREAM:
            given_up = stream in self._calls
            self._passed.calls += given_up
            self._passed.given_up += given_up
            self._end(stream)
        return None

    def _count_control(self) -> None:
        self._control_frames += 1
        if self._control_frames > MAX_CONTROL_FRAMES:
            raise LimitExceeded(
                f"a connection may send {MAX_CONTROL_FRAMES} HTTP/2 frames at once that carry neither calls nor "
                f"messages, and {CONTROL_FRAMES_PER_SECOND} a second"
            )

    # -- header blocks ---------------------------------------------------------------------------------------------

    def _take_headers(self, stream: int, flags: int, start: int, end: int) -> KVSidecarError | None:
        if stream & 1 == 0 or (stream <= self._last and stream not in self._calls):
            raise InvalidRequest(f"HTTP/2 headers on stream {stream}, which is not new")
        self._block_flags = flags
        self._block = bytearray()
        return self._extend_block(stream, flags, start + 5 if flags & h2.WITH_PRIORITY else start, end)

    def _extend_block(self, stream: int, flags: int, start: int, end: int) -> KVSidecarError | None:
        assert self._block is not None
        self._block += self._buffer[start:end]
        if len(self._block) > MAX_BLOCK_BYTES:
            raise LimitExceeded(f"a header block of more than {MAX_BLOCK_BYTES} bytes")
        if not flags & h2.END_HEADERS:
            return None
        block, self._block = bytes(self._block), None
        try:
            if count_fields(block, MAX_FIELDS) > MAX_FIELDS:
                raise LimitExceeded(f"a header block of more than {MAX_FIELDS} fields")
        except BadHeaderBlock as error:
            raise InvalidRequest(str(error)) from error
        ends = bool(self._block_flags & h2.END_STREAM)
        if (call := self._calls.get(stream)) is None:
            return self._begin(stream, ends)
        if call.half_closed or not ends:
            raise InvalidRequest(f"a second header block on stream {stream}")
        call.half_closed = True
        return None

    def _begin(self, stream: int, ends: bool) -> KVSidecarError | None:
        self._last = stream
        self._passed.calls += 1
        try:
            self._quotas.calls.take(self._user)
        except LimitExceeded as error:
            return error
        self._calls[stream] = _Call(half_closed=ends)
        return None

    # -- messages --------------------------------------------------------------------------------------------------

    def _take_data(self, stream: int, flags: int, start: int, end: int) -> KVSidecarError | None:
        if stream & 1 == 0 or stream > self._last:
            raise InvalidRequest(f"HTTP/2 data on stream {stream}, which has not begun")
        if start == end and not flags & h2.END_STREAM:
            self._count_control()
        if (call := self._calls.get(stream)) is None:
            return None  # it has ended; gRPC still counts the bytes for flow control
        try:
            self._take_messages(call, start, end)
        except KVSidecarError as error:
            return error
        if flags & h2.END_STREAM:
            call.half_closed = True
        return None

    def _take_messages(self, call: _Call, at: int, end: int) -> None:
        while at < end:
            if call.missing:
                part = min(call.missing, end - at)
                call.missing -= part
                at += part
            else:
                part = min(_PREFIX_BYTES - len(call.prefix), end - at)
                call.prefix += self._buffer[at : at + part]
                at += part
                if len(call.prefix) < _PREFIX_BYTES:
                    return
                self._begin_message(call)
            if not call.missing:
                call.begun, call.seconds = True, 0
                if call.answered:
                    self._give_back(call)

    def _begin_message(self, call: _Call) -> None:
        nbytes = int.from_bytes(call.prefix[1:], "big")
        if nbytes > MAX_MESSAGE_BYTES:
            raise LimitExceeded(f"a message of {nbytes} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        # A compressed one may become as large as any.
        held = MAX_MESSAGE_BYTES if call.prefix[0] else nbytes
        self._quotas.nbytes.take(self._user, held)
        call.held += held
        call.prefix, call.missing = b"", nbytes
        if call.begun:
            call.seconds = 0

    def _give_back(self, call: _Call) -> None:
        if call.held:
            self._quotas.nbytes.give_back(self._user, call.held)
            call.held = 0

    # -- the end of calls and of the connection --------------------------------------------------------------------

    def _end(self, stream: int) -> None:
        if (call := self._calls.pop(stream, None)) is not None:
            self._give_back(call)
            self._quotas.calls.give_back(self._user)

    def _hide(self, stream: int, at: int, end: int) -> bool:
        """Let gRPC take the frames of a call that is refused as it begins for late ones of a call that has ended, if
        there is one and the call has not begun.

        It must see them, since its table of headers depends on them, but it keeps a call that it has once taken until
        Python has asked for it, and drops others when there are too many.
        """
        if stream in self._calls or self._ended == 0:
            return False
        while at < end:
            self._buffer[at + 5 : at + 9] = self._ended.to_bytes(4, "big")
            at += h2.HEAD_BYTES + self._payload_bytes(at)
        return True

    def _refuse_call(self, stream: int, error: KVSidecarError, *, hidden: bool = False) -> None:
        call = self._calls.get(stream)
        self._end(stream)
        self._passed.refused.append(error)
        if not hidden:
            self._out.append(h2.reset(stream, h2.CANCEL))
            self._ended = stream
        self._injected += h2.refusal(stream, error, answered=call is not None and call.answered)

    def _refuse_connection(self, error: KVSidecarError) -> None:
        self._passed.refused.append(error)
        if not self._begun:
            self._injected += h2.frame(h2.SETTINGS, 0)
        self._injected += h2.goaway(self._last, error)
        self.close()

    def close(self) -> None:
        """End the connection. `end_calls` ends its open calls."""
        self.over = True
        self._buffer.clear()
        self._read = 0

    def end_calls(self, most: int = CALLS_AT_ONCE) -> bytes:
        """End open calls of a connection that is over: give back what they held. Returns the frames that end them in
        gRPC."""
        streams = list(self._calls)[:most]
        for stream in streams:
            self._end(stream)
        return b"".join([h2.reset(stream, h2.CANCEL) for stream in streams])

    def second(self) -> GateResult:
        """Count a second: refuse a connection that has been waited for too long. `end_late` ends calls."""
        self._control_frames = max(0, self._control_frames - CONTROL_FRAMES_PER_SECOND)
        if not self.over and (not self._begun or self._block is not None):
            self._seconds += 1
            if self._seconds > MESSAGE_SECONDS:
                what = "a header block" if self._begun else "the start of a connection"
                self._refuse_connection(Unfinished(f"{what} was not complete within {MESSAGE_SECONDS} s"))
        else:
            self._seconds = 0
        for call in self._calls.values():
            call.seconds += call.awaited
        return self._result()

    def end_late(self) -> GateResult:
        """End some of the calls that have been waited for too long; none if there are no more."""
        late = [stream for stream, call in self._calls.items() if call.awaited and call.seconds > MESSAGE_SECONDS]
        for stream in late[:CALLS_AT_ONCE]:
            self._passed.calls += 1
            error = Unfinished(f"a message of a call was not complete within {MESSAGE_SECONDS} s")
            self._refuse_call(stream, error)
        return self._result()

    def _result(self) -> GateResult:
        passed, self._passed = self._passed, GateResult()
        passed.to_server = b"".join(self._out)
        self._out.clear()
        passed.to_client = self._inject()
        return passed

    def _inject(self) -> bytes:
        if not self._injected or not self._from_server.between_frames:
            return b""
        injected = bytes(self._injected)
        self._injected.clear()
        return injected

    # -- from the server -------------------------------------------------------------------------------------------

    def from_server(self, data: bytes) -> bytes:
        """Take bytes of the server. Returns the bytes for the client."""
        for kind, flags, stream in self._from_server.read(data):
            if (call := self._calls.get(stream)) is None:
                continue
            if kind == h2.RST_STREAM or flags & h2.END_STREAM:
                self._end(stream)
            elif kind == h2.HEADERS:
                call.answered = True
                if not call.missing:
                    self._give_back(call)
        return data + self._inject() if self._injected else data


class _ServerFrames:
    """Finds the frames that open or end an answer in what gRPC sends; gRPC is trusted."""

    def __init__(self) -> None:
        self._head = b""
        self._payload = 0
        """Bytes of the current frame's payload that have not arrived."""
        self._block_open = False

    @property
    def between_frames(self) -> bool:
        return not self._head and not self._payload and not self._block_open

    def read(self, data: bytes) -> list[tuple[int, int, int]]:
        """Kind, flags and stream of each DATA, HEADERS and RST_STREAM frame whose head was completed."""
        found, at, length = [], 0, len(data)
        while at < length:
            if self._payload:
                part = min(self._payload, length - at)
                self._payload -= part
                at += part
                continue
            part = h2.HEAD_BYTES - len(self._head)
            head = self._head + data[at : at + part]
            at += part
            if len(head) < h2.HEAD_BYTES:
                self._head = head
                break
            self._head, self._payload = b"", int.from_bytes(head[:3], "big")
            kind, flags = head[3], head[4]
            if kind in (h2.HEADERS, h2.CONTINUATION):
                self._block_open = not flags & h2.END_HEADERS
            if kind in (h2.DATA, h2.HEADERS, h2.RST_STREAM):
                found.append((kind, flags, int.from_bytes(head[5:], "big") & 0x7FFFFFFF))
        return found
