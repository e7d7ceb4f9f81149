"""Finds, reads and writes shards in a Mooncake Store. Bytes go straight between the pool and the network.

Each shard is stored with a trailer that names the shard and its checksum: every read verifies it.

A call may hang for a minute, and the library may end the process: use it in the process of a tier only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

from kvsidecar.errors import TierFailed
from kvsidecar.support import extras, log
from kvsidecar.tiers.backend import Backend, BackendStats, ReadEnd, ShardSpace, WriteEnd, namespace_digest
from kvsidecar.tiers.shard_bytes import TRAILER_BYTES, checksum_of, trailer_of
from kvsidecar.types import Namespace

BATCH: Final = 32
"""Shards of one call of the client."""
CALLS: Final = 32
"""Calls of the client at a time; others wait."""
CONNECT_SECONDS: Final = 5.0
"""Time for a first connection to the master. The client itself takes a minute and more to give up."""
PREFIX: Final = "kvs1-"
"""Prefix of all keys. Its number changes with the format of the trailer."""
PROBE_PREFIX: Final = "kvsprobe-"

_MISSES: Final = {-703, -704, -712}
"""Being written, not there, and gone."""
_FULL: Final = {-200, -1700}
_PRESENT: Final = {-705}
_MEANINGS: Final = {
    -1: "the client has failed; its log says why",
    -101: "no node of the cluster gives memory",
    -200: "the cluster has no room",
    -600: "what is stored is larger than the shard",
    -707: "the lease ran out during the read",
    -800: "the transfer has failed; a storage node may be down",
    -900: "the master does not answer",
    -1010: "the master is not in service",
    -1700: "the tenant's quota is used up",
}

_log = log.get("cluster tier")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How the store is reached."""

    master: str
    """``host:port``, or the address of a group of masters, such as ``etcd://host:port``."""
    segment_bytes: int = 0
    """Memory that this node gives to the cluster; it is lost with the process."""
    protocol: str = "tcp"
    """``tcp`` or ``rdma``."""
    devices: str = ""
    """RDMA devices, separated by commas; empty: the client chooses."""
    hostname: str = ""
    """Address by which other nodes reach this one; empty: that from which this one reaches the master."""
    replicas: int = 1
    soft_pin_seconds: float = 0.0
    """How long written shards are evicted only after those that are not pinned; 0: they are not pinned."""
    tenant: str = "default"


class ClusterBackend(Backend):
    """Keeps shards in Mooncake Store.

    The master decides what is there, and other nodes change it at any time: `keys` is unknown, and `stats` reports
    zero.

    Args:
        pool: memory for reads and writes lies in it.

    Raises:
        TierFailed: the package is not installed, or the master is not reached.
    """

    def __init__(self, pool: memoryview, options: ClusterOptions) -> None:
        store_class, config_class, pin = _library()
        reached_from = reach(options.master)
        hostname = options.hostname or reached_from or socket.gethostname()
        self._store: Any = store_class()
        code = self._store.setup(
            hostname,
            "P2PHANDSHAKE",
            options.segment_bytes,
            0,
            options.protocol,
            options.devices,
            options.master,
            tenant_id=options.tenant,
        )
        if code:
            raise _failed(f"the client of {options.master} does not start", code)
        self._config: Any = config_class()
        self._config.replica_num = options.replicas
        if options.soft_pin_seconds:
            self._config.soft_pin_action = pin.ENABLE
            self._config.soft_pin_ttl_ms = int(options.soft_pin_seconds * 1000)
        self._trailers: SimpleQueue[memoryview] = SimpleQueue()
        """Free room for trailers, each piece for the shards of one call."""
        size = BATCH * TRAILER_BYTES
        area = memoryview(mmap.mmap(-1, CALLS * size))
        for at in range(0, len(area), size):
            self._trailers.put(area[at : at + size])
        for each, what in (pool, "pool"), (area, "memory for trailers"):
            if code := self._store.register_buffer(_address(each), len(each)):
                raise _failed(f"the client cannot register the {what} of {len(each)} bytes", code)
        _log.info("cluster tier opened", master=options.master, protocol=options.protocol, hostname=hostname)

    def find(self, space: ShardSpace, hashes: Sequence[bytes]) -> list[bool]:
        codes = self._store.batch_is_exist(_keys(space, hashes))
        for code in codes:
            if code < 0:
                raise _failed("a query for shards failed", code)
        return [code == 1 for code in codes]

    def read(self, space: ShardSpace, hashes: Sequence[bytes], memory: Sequence[memoryview]) -> list[ReadEnd]:
        ends: list[ReadEnd] = []
        for at in range(0, len(hashes), BATCH):
            ends += self._read(space, hashes[at : at + BATCH], memory[at : at + BATCH])
        return ends

    def _read(self, space: ShardSpace, hashes: Sequence[bytes], memory: Sequence[memoryview]) -> list[ReadEnd]:
        keys = _keys(space, hashes)
        with self._room(len(hashes)) as trailers:
            for trailer in trailers:
                trailer[:] = bytes(TRAILER_BYTES)  # that of an earlier shard must not pass for this one's
            codes = self._store.batch_get_into_multi_buffers(keys, *_pieces(memory, trailers))
            _check("a read failed", codes, _MISSES | {-600})
            ends = []
            for code, block_hash, shard, trailer in zip(codes, hashes, memory, trailers, strict=True):
                if code in _MISSES:
                    ends.append(ReadEnd.MISS)
                    continue
                whole = code == space.shard_bytes + TRAILER_BYTES
                right = whole and trailer == trailer_of(space, block_hash, checksum_of(shard))
                ends.append(ReadEnd.DONE if right else ReadEnd.CORRUPT)
        if wrong := [key for key, end in zip(keys, ends, strict=True) if end is ReadEnd.CORRUPT]:
            # Forced: the read itself has taken a lease.
            _check("a corrupt shard cannot be removed", self._store.batch_remove(wrong, True), _MISSES)
        return ends

    def write(
        self, space: ShardSpace, hashes: Sequence[bytes], memory: Sequence[memoryview], checksums: Sequence[int | None]
    ) -> list[WriteEnd]:
        # A write of what is there says that it was done.
        ends = [WriteEnd.PRESENT if there else WriteEnd.FULL for there in self.find(space, hashes)]
        absent = [i for i, end in enumerate(ends) if end is WriteEnd.FULL]
        for at in range(0, len(absent), BATCH):
            which = absent[at : at + BATCH]
            shards = [memory[i] for i in which]
            with self._room(len(which)) as trailers:
                for i, trailer in zip(which, trailers, strict=True):
                    trailer[:] = trailer_of(space, hashes[i], checksum_of(memory[i], checksums[i]))
                keys = _keys(space, [hashes[i] for i in which])
                codes = self._store.batch_put_from_multi_buffers(keys, *_pieces(shards, trailers), self._config)
            _check("a write failed", codes, _FULL | _PRESENT)
            for i, code in zip(which, codes, strict=True):
                ends[i] = WriteEnd.FULL if code in _FULL else WriteEnd.PRESENT if code else WriteEnd.DONE
        return ends

    def forget(self, namespace: Namespace | None) -> int:
        """Forget the shards of one namespace, or all that any node has written as this tenant."""
        which = PREFIX if namespace is None else f"{PREFIX}{namespace_digest(namespace)}-"
        count = int(self._store.remove_by_regex(f"^{which}", True))  # forced: leases do not matter
        if count < 0:
            raise _failed("shards cannot be removed", count)
        return count

    def probe(self) -> None:
        key = PROBE_PREFIX + secrets.token_hex(16)
        with self._room(2) as (sent, back):
            sent[:] = secrets.token_bytes(len(sent))
            args = [[_address(sent)]], [[len(sent)]], self._config
            codes = self._store.batch_put_from_multi_buffers([key], *args)
            _check("the write of a probe failed", codes, _FULL)
            if codes[0] in _FULL:
                return  # the master answers, and shards can be read
            try:
                codes = self._store.batch_get_into_multi_buffers([key], [[_address(back)]], [[len(back)]])
                _check("the read of a probe failed", codes, ())
                if sent != back:
                    raise TierFailed("Mooncake Store does not return what was written to it")
            finally:
                self._store.remove(key, True)

    def stats(self) -> BackendStats:
        return BackendStats(0, 0, 0, 0, 0, {})

    def close(self) -> None:
        self._store.close()

    @contextmanager
    def _room(self, count: int) -> Iterator[list[memoryview]]:
        """Memory for this many trailers, for one call of the client."""
        area = self._trailers.get()
        try:
            yield [area[at : at + TRAILER_BYTES] for at in range(0, count * TRAILER_BYTES, TRAILER_BYTES)]
        finally:
            self._trailers.put(area)


def _library() -> tuple[Any, Any, Any]:
    """The client's class, the class of its options for a write, and its kinds of pins."""
    # Read when the library is loaded. Memory of this node needs no network; a minute of attempts is too long to wait
    # for the address of a master that is not there.
    for name, value in {
        "MC_STORE_MEMCPY": "1",
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
        "MC_LOG_LEVEL": "WARNING",
    }.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction
    except ImportError as error:
        raise TierFailed(
            "the cluster tier needs Mooncake's client, and libibverbs, libnuma and libcurl: "
            f"{extras.install('mooncake')} ({error})"
        ) from error
    return MooncakeDistributedStore, ReplicateConfig, SoftPinAction


def reach(master: str) -> str:
    """The address of this node from which the master is reached; empty for a group of masters."""
    if "://" in master:
        return ""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
            return str(connection.getsockname()[0])
    except (OSError, ValueError) as error:
        raise TierFailed(f"the Mooncake master {master} cannot be reached: {error}") from error


def _keys(space: ShardSpace, hashes: Sequence[bytes]) -> list[str]:
    first = f"{PREFIX}{namespace_digest(space.namespace)}-{space.digest.hex()}-"
    return [first + each.hex() for each in hashes]


def _pieces(shards: Sequence[memoryview], trailers: Sequence[memoryview]) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes, as the client takes them."""
    pairs = list(zip(shards, trailers, strict=True))
    return [list(map(_address, pair)) for pair in pairs], [list(map(len, pair)) for pair in pairs]


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _check(what: str, codes: Sequence[int], allowed: Collection[int]) -> None:
    """Raises TierFailed for the first other code below zero."""
    for code in codes:
        if code < 0 and code not in allowed:
            raise _failed(what, code)


def _failed(what: str, code: int) -> TierFailed:
    return TierFailed(f"{what}: {_MEANINGS.get(code, 'Mooncake Store says')} (code {code})")


def open_backend(pool: memoryview, **options: Any) -> ClusterBackend:
    """Open the backend in the tier's process.

    Args:
        options: fields of `ClusterOptions`.
    """
    return ClusterBackend(pool, ClusterOptions(**options))
