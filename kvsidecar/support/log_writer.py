"""Writes log lines to standard error in a separate thread: logging never waits for a reader and never fails.

write(2) to a pipe whose reader is stuck blocks without limit; to a closed pipe or a full disk it fails. In both cases
lines are dropped, counted by reason, and reported in the log as soon as writes succeed again. O_NONBLOCK is not an
option: it applies to the open file, which is shared with the shell or the service manager.
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
"""Limit of the lines that wait for a slow reader; a kernel pipe holds another 64 KiB."""
REPORT_SECONDS: Final = 1.0
"""Shortest interval between reports of losses while the reader is too slow."""
_CLEAR: Final = "\r\x1b[K"


class Loss(StrEnum):
    """Why a line of the log was lost."""

    CLOSED = "closed"
    """The other end of the pipe or terminal is closed."""
    FULL = "full"
    """The file system is full, or the file has reached its size limit."""
    BEHIND = "behind"
    """The reader is slow or stuck, and `MAX_WAITING_BYTES` of lines are waiting."""
    FAILED = "failed"
    """The write failed for another reason."""


_LOSSES: Final[Mapping[int, Loss]] = {
    **dict.fromkeys((errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET, errno.ENOTCONN), Loss.CLOSED),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Loss.FULL),
}


class LogWriter:
    """Owns the writer thread. Thread-safe; no method raises.

    Args:
        describe: returns the text that reports lost lines.
        max_waiting: maximum bytes of waiting lines; a single line may exceed it.
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
        """Bytes of these lines and of the one that is being written."""
        self._lost = dict.fromkeys(Loss, 0)
        self._reported = dict(self._lost)
        """Losses that have been reported."""
        self._reported_at = -REPORT_SECONDS
        self._partial_line = False
        """Whether only a part of the last line was written."""
        self._status = self._drawn = b""
        """The wanted status line below the log of a terminal, and the one that is shown."""
        threading.Thread(target=self._run, name="kvsidecar-log", daemon=True).start()

    def write(self, line: bytes) -> None:
        """Queue a line, including its newline, or drop it."""
        with self._changed:
            if self._waiting and self._waiting + len(line) > self._max_waiting:
                self._lost[Loss.BEHIND] += 1
                return
            self._lines.append(line)
            self._waiting += len(line)
            self._changed.notify_all()

    def show(self, status: bytes) -> None:
        """See `kvsidecar.support.log.show`."""
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def lost(self) -> dict[Loss, int]:
        """Number of lost lines so far, by reason."""
        with self._changed:
            return dict(self._lost)

    def flush(self, timeout: float) -> bool:
        """Wait until every line is written or lost. False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._status == self._drawn, timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._status != self._drawn)
                line = self._lines.popleft() if self._lines else b""
                status, last = self._status, not self._lines
            reported = None
            try:
                text, reported = self._losses(last=last) if line else (b"", None)
                text += line
                if status or self._drawn:
                    text = _CLEAR.encode() + text + status
                loss = self._put(b"\n" + text if self._partial_line else text)
            except Exception:  # noqa: BLE001 - counted as a loss; without this thread there would be no log
                loss = Loss.FAILED
            with self._changed:
                self._drawn = status
                self._waiting -= len(line)
                if loss is None:
                    self._reported = reported or self._reported
                elif line:
                    self._lost[loss] += 1
                self._changed.notify_all()

    def _losses(self, *, last: bool) -> tuple[bytes, dict[Loss, int] | None]:
        """The report to write before the next line, and the losses after which it is complete."""
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
        """Write all of it. Returns the reason of a failure, or None."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # another process has set O_NONBLOCK on the shared open file
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
    """Replaces ``sys.stderr``, because Python's own messages must not wait for a reader either.

    Args:
        behind: the stream that this one replaces.
        errors: error handler for characters that its encoding lacks.
    """

    def __init__(self, writer: LogWriter, behind: TextIO, errors: str) -> None:
        self.writer = writer
        self._behind = behind
        self._errors = errors
        self._begun = threading.local()
        """The unfinished line of each thread: print() writes the newline separately."""

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
            self.writer.write(self.encode(lines + end))  # in one piece: lines of threads do not mix
        return len(text)

    def encode(self, text: str) -> bytes:
        return text.encode(self.encoding, self._errors)
