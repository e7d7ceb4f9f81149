"""The process of one tier: maps the pool, and lets a backend read into its slots and write from them.

It speaks with the daemon alone, over the socket that it inherits. It ends when the daemon closes the socket, and at the
latest when the daemon dies. The end of this process is the proof that it writes to no slot any more.

The main thread takes requests; threads of their own find, read and write, because a backend's calls may block.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Final

from kvsidecar.errors import KVSidecarError, TierFailed
from kvsidecar.protocol.framing import FrameReader
from kvsidecar.support import failpoints, host_memory, log
from kvsidecar.support.child_side import EXIT_FAILED, Control, run
from kvsidecar.tiers.backend import Backend, ShardSpace, WriteEnd, open_backend
from kvsidecar.tiers.key_filter import KeyFilter, first_words
from kvsidecar.tiers.messages import (
    MAX_FRAME,
    REPORT,
    REPORTED,
    Do,
    Reply,
    Request,
    namespace_of,
    shares_of,
    space_of,
    split,
)
from kvsidecar.tiers.residency_report import ResidencyReporter
from kvsidecar.tiers.space_numbers import KnownSpaces
from kvsidecar.types import Residency

READS: Final = 8
WRITES: Final = 4
"""Reads, and writes, of the backend at a time."""
FILTER_EVICTED: Final = 1024
"""The filter is rebuilt when more blocks than this have gone, and more than half as many as there are."""

_log = log.get("tier")


class TierProcess:
    """Answers the daemon's requests."""

    def __init__(self, connection: socket.socket, pool: memoryview, backend: Backend, key_filter: KeyFilter) -> None:
        self._connection, self._pool, self._backend, self._filter = connection, pool, backend, key_filter
        self._filtered_evicted = 0
        """Blocks that had been evicted when the filter was last made."""
        self._spaces = KnownSpaces()
        self._sending = threading.Lock()
        self._reporter = ResidencyReporter(backend, self._send_report)
        others = ThreadPoolExecutor(2, "other")
        self._threads = {
            Do.FIND: ThreadPoolExecutor(1, "find"),
            Do.READ: ThreadPoolExecutor(READS, "read"),
            Do.WRITE: ThreadPoolExecutor(WRITES, "write"),
            Do.FORGET: others,
            Do.PROBE: others,
            Do.STATS: others,
        }

    def serve(self) -> None:
        """Answer until the daemon has gone."""
        threading.Thread(target=_to_the_end, args=(self._reporter.run,), name="tell", daemon=True).start()
        frames = FrameReader(MAX_FRAME)
        while data := self._connection.recv(1 << 18):
            frames.feed(data)
            while (payload := frames.next()) is not None:
                self._take(Request.unpack(payload))

    def _take(self, request: Request) -> None:
        if request.do is Do.SPACE:
            self._spaces.add(request.space, space_of(request))
            return
        if request.do is Do.SHARES:
            self._backend.set_shares(shares_of(request))
            return
        if request.do is Do.WATCH:
            watched = self._spaces.get(request.space)
            assert watched is not None
            self._reporter.watch(request.space, watched)
            return
        if request.do is Do.UNWATCH:
            self._reporter.unwatch(request.space)
            return
        space = self._spaces.get(request.space)
        call = self._threads[request.do].submit(self._answer, request, space)
        call.add_done_callback(_heard)

    def _answer(self, request: Request, space: ShardSpace | None) -> None:
        began = time.monotonic()
        try:
            body, failed = self._do(request, space), False
        except (KVSidecarError, OSError, failpoints.FailpointError) as error:
            body, failed = str(error).encode(), True
        except Exception as error:  # noqa: BLE001 - the daemon must get an answer; a defect of the backend is a failure
            _log.exception("the tier's backend failed unexpectedly", request=request.do.name.lower())
            body, failed = f"{type(error).__name__}: {error}".encode(), True
        self._send(Reply(request.number, failed, time.monotonic() - began, body))

    def _send_report(self, space: int, kind: Residency, hashes: bytes) -> None:
        self._send(Reply(REPORT | space, False, 0.0, bytes([REPORTED.index(kind)]) + hashes))

    def _send(self, reply: Reply) -> None:
        data = reply.pack()
        with self._sending:
            self._connection.sendall(data)

    def _do(self, request: Request, space: ShardSpace | None) -> bytes:
        backend = self._backend
        match request.do:
            case Do.PROBE:
                backend.probe()
                return b""
            case Do.STATS:
                stats = backend.stats()
                if stats.evicted_blocks - self._filtered_evicted > max(FILTER_EVICTED, stats.blocks // 2):
                    self.fill_filter()
                return json.dumps(asdict(stats)).encode()
            case Do.FORGET:
                backend.forget(namespace_of(request.hashes))
                return b""
        if space is None:
            raise TierFailed(f"space {request.space} is unknown")
        hashes = split(request.hashes, space.namespace.hash_bytes)
        if request.do is Do.FIND:
            failpoints.hit("tier.before_find")
            return bytes(backend.find(space, hashes))
        assert request.slots is not None
        memory = self._memory(request.slots.tolist(), space.shard_bytes)
        if request.do is Do.READ:
            failpoints.hit("tier.before_read")
            return bytes(backend.read(space, hashes, memory))
        assert request.checksums is not None
        failpoints.hit("tier.before_write")
        sums, known = (each.tolist() for each in request.checksums)
        checksums = [value if is_known else None for value, is_known in zip(sums, known, strict=True)]
        ends = backend.write(space, hashes, memory, checksums)
        there = b"".join([each for each, end in zip(hashes, ends, strict=True) if end is not WriteEnd.FULL])
        self._filter.add(space.digest, first_words(there, space.namespace.hash_bytes))
        return bytes(ends)

    def fill_filter(self) -> None:
        """Start the filter over, with what is there."""
        self._filtered_evicted = self._backend.stats().evicted_blocks
        keys = self._backend.keys()
        if keys is None:
            self._filter.replace(None)
        else:
            self._filter.replace((digest, first_words(hashes, width)) for digest, hashes, width in keys)

    def _memory(self, slots: Sequence[int], nbytes: int) -> list[memoryview]:
        for slot in slots:
            if not 0 <= slot <= len(self._pool) - nbytes:
                raise TierFailed(f"slot {slot} of {nbytes} bytes is not in the pool of {len(self._pool)} bytes")
        return [self._pool[slot : slot + nbytes] for slot in slots]


def _to_the_end(run: Callable[[], None]) -> None:
    """Run a thread so that its failure is noticed."""
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - see above
        _log.error("the tier reports nothing more", error=str(error), exc_info=error)
        os._exit(EXIT_FAILED)


def _heard(call: Future[None]) -> None:
    """A reply that cannot be sent: the daemon has gone, and `serve` returns. Anything else is a defect."""
    error = call.exception()
    if error is not None and not isinstance(error, ConnectionError):
        _log.error("an answer of the tier was lost", error=str(error), exc_info=error)
        os._exit(EXIT_FAILED)  # the daemon would wait for ever


def _serve(control: Control) -> None:
    """Open the backend that the daemon names, then take requests of the tier's own."""
    opened: list[TierProcess] = []

    def open_it(request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        pool = host_memory.map_by_facts(fds[0], request["pool"]).data
        try:
            backend = open_backend(request["backend"], request["options"], pool)
        except (KVSidecarError, OSError):
            raise
        except Exception as error:
            _log.exception("the tier does not start")
            raise TierFailed(f"{type(error).__name__}: {error}") from error
        tier = TierProcess(control.connection, pool, backend, KeyFilter(fds[1]))
        tier.fill_filter()
        opened.append(tier)
        return asdict(backend.stats())

    while (reply := control.answer({"open": open_it})) is not None and "error" not in reply:
        if opened:
            opened[0].serve()
            return


if __name__ == "__main__":
    # No backend's step waits for it, whatever the daemon's own priority is: it must not take the cores of backends.
    os.setpriority(os.PRIO_PROCESS, 0, max(0, os.getpriority(os.PRIO_PROCESS, 0)))
    run("tier", _serve)
