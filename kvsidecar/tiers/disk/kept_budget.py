"""Keeps the rest of the budget of writes beside what was written: a start does not fill it up again.

It is written down before the bytes are, so that a kill at any instant loses none that were spent. Nothing is
synchronised: after a power failure what was spent in the last half minute may be missing.

Within a boot the time since then is the time since the boot, which nobody can set. Across a boot there is
only the wall clock; whatever it shows, no more than a day's budget is left.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvsidecar.errors import TierFailed
from kvsidecar.support import log, private_files
from kvsidecar.support.boot import boot_id, boot_time
from kvsidecar.tiers.policy import WriteBudget

BUDGET: Final = "kvsidecar-disk-budget"
_BYTES: Final = 4096

_log = log.get("disk tier")


class Now(NamedTuple):
    """An instant on every clock that there is. Seconds."""

    boot: str
    since_boot: float
    wall: float


def read_clocks() -> Now:
    return Now(boot_id(), boot_time(), time.time())


class KeptBudget:
    """The budget of one directory, which this process alone uses. May be used in any thread.

    Args:
        directory: descriptor; it must stay open.
        path: of the directory, for people.
        per_day: bytes.

    Raises:
        TierFailed: it cannot be kept.
    """

    def __init__(self, directory: int, path: Path, per_day: int, clocks: Callable[[], Now] = read_clocks) -> None:
        self._lock, self._clocks = threading.Lock(), clocks
        now = clocks()
        try:
            self._fd, left, since = self._open(directory, path, now)
            # Filled up until now, from the instant at which so much was left.
            self._budget = WriteBudget(per_day, now.since_boot - since)
            self._budget.at_most(per_day if left is None else left)
            self._write(now)
        except OSError as error:
            raise TierFailed(f"the write budget cannot be recorded in {path}: {error.strerror}") from error

    @staticmethod
    def _open(directory: int, path: Path, now: Now) -> tuple[int, int | None, float]:
        """The file, what was left of the budget, and how many seconds ago. None: all of it, because none was kept."""
        reason = "it is damaged"
        try:
            fd = private_files.open_file(BUDGET, directory)
        except FileNotFoundError:
            return _make(directory), None, 0.0
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            kept = _parsed(os.pread(fd, _BYTES, 0))
            if kept is not None:
                left, then = kept
                same_boot = then.boot == now.boot
                since = now.since_boot - then.since_boot if same_boot else now.wall - then.wall
                return fd, left, max(0.0, since)
            os.close(fd)
        _log.warning("the disk tier's write budget starts empty", directory=str(path), reason=reason)
        return _make(directory), 0, 0.0

    def left(self) -> int:
        """Bytes that may be written now."""
        with self._lock:
            return self._budget.left(self._clocks().since_boot) or 0

    def spend(self, nbytes: int) -> None:
        """Spend bytes that are going to be written. Raises OSError: this cannot be kept, so they must not be."""
        with self._lock:
            now = self._clocks()
            self._budget.spend(nbytes, now.since_boot)
            self._write(now)

    def _write(self, now: Now) -> None:
        text = json.dumps([self._budget.left(now.since_boot), *now]).encode()
        os.pwrite(self._fd, f"{zlib.crc32(text):08x} ".encode() + text + b"\n" + bytes(_BYTES - len(text) - 10), 0)

    def close(self) -> None:
        os.close(self._fd)


def _make(directory: int) -> int:
    with suppress(FileNotFoundError):
        os.unlink(BUDGET, dir_fd=directory)
    return private_files.make_file(BUDGET, directory, _BYTES)


def _parsed(page: bytes) -> tuple[int, Now] | None:
    crc, _, text = page.partition(b"\n")[0].partition(b" ")
    try:
        if int(crc, 16) != zlib.crc32(text):
            return None
        left, boot, since_boot, wall = json.loads(text)
        return int(left), Now(str(boot), float(since_boot), float(wall))
    except (ValueError, TypeError):
        return None
