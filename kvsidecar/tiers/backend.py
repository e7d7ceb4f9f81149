"""The backends of tiers, and their interface: a backend keeps shards of blocks somewhere, and brings them back."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

from kvsidecar.types import Namespace

if TYPE_CHECKING:
    from kvsidecar.cache.change_log import Outlet

BACKENDS: Final = {
    "cluster": "kvsidecar.tiers.cluster.backend:open_backend",
    "disk": "kvsidecar.tiers.disk.backend:open_backend",
    "shared": "kvsidecar.tiers.shared_directory.backend:open_backend",
}
"""The function that opens each backend, by name: with the options of its tier as keyword arguments, and the pool if it
has an argument of this name."""


@dataclass(frozen=True)
class ShardSpace:
    """The blocks that share keys and a size: one shard of one group of one namespace."""

    namespace: Namespace
    group: int
    shard: int
    num_shards: int
    shard_bytes: int

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that name it on every node and in every run."""
        facts = json.dumps(asdict(self), sort_keys=True).encode()
        return hashlib.blake2b(facts, digest_size=16, person=b"kvs tier space").digest()


@lru_cache(maxsize=4096)
def namespace_digest(namespace: Namespace) -> str:
    """32 hexadecimal digits that name it on every node and in every run."""
    facts = json.dumps(asdict(namespace), sort_keys=True).encode()
    return hashlib.blake2b(facts, digest_size=16, person=b"kvs tier name").hexdigest()


@dataclass(frozen=True, slots=True)
class TierShare:
    """One share of the tenants."""

    name: str
    patterns: tuple[str, ...]
    """Patterns of the namespaces that it covers, unless an earlier share does."""
    most: int | None = None
    """Bytes that it may have of the tier; None for all."""
    guaranteed: int = 0
    """Bytes of the tier that no other share takes."""


@dataclass(frozen=True, slots=True)
class ShareUse:
    """What a share has of a tier, and may have, in bytes; compare `kvsidecar.cache.shares.Share`."""

    name: str
    used: int
    guaranteed: int
    most: int | None
    busy: int
    evicted: int


class ReadEnd(IntEnum):
    """How the read of one shard ended."""

    DONE = 0
    """The memory has the bytes that were written, and they fit their checksum."""
    MISS = 1
    CORRUPT = 2
    """They do not fit their checksum. It is a miss from now on."""


class WriteEnd(IntEnum):
    """How the write of one shard ended."""

    DONE = 0
    PRESENT = 1
    """It is there already, or another call is writing it; nothing was written."""
    FULL = 2
    """There is no room at present."""


@dataclass(frozen=True, slots=True)
class BackendStats:
    capacity_bytes: int
    used_bytes: int
    blocks: int
    """Shards that are there."""
    evicted_blocks: int
    """Shards evicted since the start."""
    kept_blocks: int
    """Shards that an earlier run had left, at the start."""
    dropped_blocks: dict[str, int]
    """Shards of an earlier run that could not be kept, by reason."""
    quota_blocks: int = 0
    """Shards that were not read or written for the sake of other shares' guarantees."""
    shares: Sequence[ShareUse] = ()
    """The tenants' shares, the one of all other namespaces last; empty without any."""
    write_bytes_left: int | None = None
    """Bytes left of the day's budget, less what earlier runs have spent; None: there is no budget."""


class Backend(ABC):
    """Where a tier keeps shards. Its methods are called from several threads at once and may block.

    A shard is named by its space and its block hash; hashes of a call are in prefix order and occur once. Memory is a
    writable view of the pool, ``shard_bytes`` long, at an address that is a multiple of 4096; the bytes up to the next
    multiple of 4096 belong to the same slot and may be read and written too.

    Raises (every method):
        OSError, TierFailed: it did not work; the text says what and where. Nothing wrong was given out. The caller
            counts the failures and stops asking after some.
    """

    @abstractmethod
    def find(self, space: ShardSpace, hashes: Sequence[bytes]) -> list[bool]:
        """One flag per hash: true if its shard is there. Only a hint: a read may still miss."""

    @abstractmethod
    def read(self, space: ShardSpace, hashes: Sequence[bytes], memory: Sequence[memoryview]) -> list[ReadEnd]:
        """Fill memory. What does not end with `ReadEnd.DONE` has undefined bytes."""

    @abstractmethod
    def write(
        self, space: ShardSpace, hashes: Sequence[bytes], memory: Sequence[memoryview], checksums: Sequence[int | None]
    ) -> list[WriteEnd]:
        """Keep shards, and evict others for them.

        Args:
            checksums: XXH3 (64 bits) of the bytes, where one is known; the backend takes the others.
        """

    @abstractmethod
    def forget(self, namespace: Namespace | None) -> int:
        """Forget the shards of one namespace, or all. Returns how many."""

    def keys(self) -> Iterable[tuple[bytes, bytes, int]] | None:
        """Everything that is there: digest, joined block hashes and their width, per shard space. None: unknown."""
        return None

    @abstractmethod
    def probe(self) -> None:
        """Write something small, read it back and compare: whether it works at all."""

    @abstractmethod
    def stats(self) -> BackendStats: ...

    @abstractmethod
    def close(self) -> None:
        """No call may be under way."""

    def set_shares(self, shares: Sequence[TierShare]) -> None:  # noqa: B027 - not every backend limits them
        """Limit the shares from now on. What is there stays; a share that has too much evicts it when it writes."""

    def watch(self, space: ShardSpace, outlet: Outlet | None) -> None:  # noqa: B027 - not every backend knows
        """Report every change to this space's shards to an outlet from now on; None: to nobody."""

    def pieces(self, space: ShardSpace) -> Iterator[bytes]:
        """The known shards of a space, as joined hashes in pieces of 32 KiB at most, some of which may be empty. Each
        piece shows the moment at which it is asked for."""
        return iter(())


def open_backend(name: str, options: dict[str, Any], pool: memoryview) -> Backend:
    """Args: name: a key of `BACKENDS`, or ``module:function`` like its values."""
    module, _, function = BACKENDS.get(name, name).partition(":")
    open_it: Callable[..., Backend] = getattr(importlib.import_module(module), function)
    given = {"pool": pool} if "pool" in inspect.signature(open_it).parameters else {}
    return open_it(**given, **options)
