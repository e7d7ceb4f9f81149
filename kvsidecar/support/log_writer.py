"""Writes lines to standard error from a thread of its own: logging never waits for a reader, and never fails.

write(2) to a pipe without a reader blocks without limit, and one to a closed pipe or a full disk fails. In both cases
lines are lost here, counted by reason, and reported in the log as soon as it takes lines again. O_NONBLOCK would not
do: it belongs to the open file, which is shared with the shell or the service manager.
"""

from __future__ import annotations

import collections
import errno
import io
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, TextIO

MAX_WAITING_BYTES: Final = 1 << 20
"""Lines that wait for a slow reader; a pipe of the kernel takes 64 KiB more."""
REPORT_SECONDS: Final = 1.0
"""While the reader stays too slow, losses are reported at most this often."""
_CLEAR: Final = "\r\x1b[K"


class Loss(StrEnum):
    """Why a line of the log was lost."""

    CLOSED = "closed"
    """The other end of the pipe or terminal is closed."""
    FULL = "full"
    """The file system is full, or the file has reached a limit of its size."""
    BEHIND = "behind"
    """The reader is slow or stuck, and `MAX_WAITING_BYTES` are waiting."""
    FAILED = "failed"
    """The write failed for another reason."""


_LOSSES: Final[Mapping[int, Loss]] = {
    **dict.fromkeys((errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET, errno.ENOTCONN), Loss.CLOSED),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Loss.FULL),
}


class LogWriter:
    """Owns the thread. All methods may be called from any thread, and none raises.

    Args:
        fd: where lines go.
        describe: the line, without its end, that says how many were lost.
        max_waiting: bytes of lines that wait at most; one line may exceed it.
    """

    def __init__(
        self, fd: int, describe: Callable[[Mapping[Loss, int]], str], *, max_waiting: int = MAX_WAITING_BYTES
    ) -> None:
        self.describe = describe
        self._fd = fd
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._lines: collections.deque[bytes] = collections.deque()
        self._waiting = 0
        """Bytes of them, with the one that is being written."""
        self._lost = dict.fromkeys(Loss, 0)
        self._reported = dict(self._lost)
        """Losses that the log has reported."""
        self._reported_at = -REPORT_SECONDS
        self._partial_line = False
        """Only a part of the last line was written."""
        self._status = self._drawn = b""
        """The line that a terminal is to show below the log, and the one that it shows."""
        threading.Thread(target=self._run, name="kvsidecar-log", daemon=True).start()

    def write(self, line: bytes) -> None:
        """Write a line, with its end, or lose it."""
        with self._changed:
            if self._waiting and self._waiting + len(line) > self._max_waiting:
                self._lost[Loss.BEHIND] += 1
                return
            self._lines.append(line)
            self._waiting += len(line)
            self._changed.notify_all()

    def show(self, status: bytes) -> None:
        """Keep a line below the log of a terminal until the next call; an empty line removes it."""
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def lost(self) -> dict[Loss, int]:
        """Lines so far, by reason."""
        with self._changed:
            return dict(self._lost)

    def flush(self, timeout: float) -> bool:
        """Wait until every line is written or lost. False if that took longer than ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._status == self._drawn, timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._status != self._drawn)
                line = self._lines.popleft() if self._lines else b""
                status, last = self._status, not self._lines
            text, told = self._losses(last=last) if line else (b"", None)
            text += line
            if status or self._drawn:
                text = _CLEAR.encode() + text + status
            loss = self._put(b"\n" + text if self._partial_line else text)
            with self._changed:
                self._drawn = status
                self._waiting -= len(line)
                if loss is None:
                    self._reported = told or self._reported
                elif line:
                    self._lost[loss] += 1
                self._changed.notify_all()

    def _losses(self, *, last: bool) -> tuple[bytes, dict[Loss, int] | None]:
        """The report of lost lines to write before the next line, and the losses that are reported with it."""
        lost = self.lost()
        new = {
            reason: count - self._reported[reason] for reason, count in lost.items() if count > self._reported[reason]
        }
        now = time.monotonic()
        if not new or (not last and now - self._reported_at < REPORT_SECONDS):
            return b"", None
        self._reported_at = now
        return self.describe(new).encode(errors="backslashreplace") + b"\n", lost

    def _put(self, data: bytes) -> Loss | None:
        """Write all of it. Returns why that failed, or None."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # another process that shares the open file has set O_NONBLOCK
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError as error:
                if written := len(data) - len(left):
                    self._partial_line = data[written - 1 : written] != b"\n"
                return _LOSSES.get(error.errno or 0, Loss.FAILED)
        self._partial_line = False
        return None


class LogStream(io.TextIOBase):
    """Stands in for ``sys.stderr``: Python's own messages must not wait for a reader either.

    Args:
        behind: the stream that this one replaces.
        errors: error handler for characters that its encoding lacks.
    """

    def __init__(self, writer: LogWriter, behind: TextIO, errors: str) -> None:
        self.writer = writer
        self._behind = behind
        self._errors = errors
        self._begun = threading.local()
        """The line that each thread has begun: print() writes the end of a line by itself."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._behind.encoding

    def fileno(self) -> int:
        return self._behind.fileno()

    def isatty(self) -> bool:
        return self._behind.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        lines, end, rest = (getattr(self._begun, "text", "") + text).rpartition("\n")
        self._begun.text = rest
        if end:
            self.writer.write(self.encode(lines + end))  # whole, so that lines of other threads do not come between
        return len(text)

    def encode(self, text: str) -> bytes:
        return text.encode(self.encoding, self._errors)
