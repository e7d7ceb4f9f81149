"""The processes that may write to the pool, in the first bytes of its table."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Final

from kvsidecar.support.process_ids import ProcessId

MAX_OWNERS: Final = 64
_ENTRY: Final = struct.Struct("<QQ")
NUM_BYTES: Final = MAX_OWNERS * _ENTRY.size


def read_owners(fd: int) -> list[ProcessId]:
    entries = _ENTRY.iter_unpack(os.pread(fd, NUM_BYTES, 0))
    return [ProcessId(*entry) for entry in entries if entry[0]]


def write_owners(fd: int, owners: Sequence[ProcessId]) -> None:
    os.pwrite(fd, b"".join(_ENTRY.pack(*each) for each in owners).ljust(NUM_BYTES, b"\0"), 0)
