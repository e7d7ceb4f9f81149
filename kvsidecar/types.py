"""The types that the daemon, its clients and the integrations share. docs/concepts.md says what the words mean."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from enum import Enum, IntEnum, StrEnum

PROTOCOL = 2
"""Version of the wire protocol, which proto/ and docs/ name too. A client with another version is refused at Attach."""

MAX_DESCRIPTORS = 4096
"""Descriptors that one rank may share. torch's expandable segments take one for each 20 MiB."""

TOKEN_METADATA = "kvsidecar-token-bin"
"""gRPC metadata key for the token from the attach socket. It identifies the sender of a unary call."""

UNASSIGNED = "unassigned"
"""Name of the share of all namespaces that no other share covers. It is guaranteed nothing."""

HASH_BYTES_MIN = 16
"""Shorter hashes collide by accident or by intent (CVE-2025-25183: Python's 8-byte ``hash()`` as block hash)."""
HASH_BYTES_MAX = 64

MAX_IDLE_SECONDS = (1 << 22) - 1
"""Most seconds without a use after which a store may let its blocks expire (48 days): a block's record has no more
bits for it."""

NO_NEXT_USE = (1 << 32) - 1
"""Value in place of the seconds until a prompt is used again: it never will be."""

MAX_TEXT_BYTES = 1024
"""Longest text from a client that the daemon keeps, in bytes of UTF-8. Namespaces outlive their engines, and every
lookup, status and log line carries such texts."""


class Direction(StrEnum):
    """Direction of a copy, named after the job that asks for it."""

    STORE = "store"
    """Device to host (D2H)."""
    LOAD = "load"
    """Host to device (H2D)."""


class Priority(IntEnum):
    """How long the blocks of a store are worth keeping, compared with others of their share. The numbers are those on
    the wire and in the records."""

    NORMAL = 0
    LOW = 1
    """They are evicted before others."""
    HIGH = 2
    """They are evicted after others."""


EVICTION_ORDER = (Priority.LOW, Priority.NORMAL, Priority.HIGH)
"""The priorities in the order in which a share's blocks are evicted."""


class Eviction(StrEnum):
    """The policy by which a full pool chooses the blocks of a priority to evict first."""

    LRU = "lru"
    """The least recently used ones."""
    RHYTHM = "rhythm"
    """The blocks whose next use is the farthest, by the time between their uses so far."""


class State(StrEnum):
    """Readiness of the daemon."""

    STARTING = "starting"
    PINNING = "pinning"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Readiness:
    """What the daemon reports about itself. Bytes and seconds."""

    state: State
    pool_bytes: int = 0
    pinned_bytes: int = 0
    pin_bytes_per_second: float = 0.0
    eta_seconds: float | None = None
    reason: str = ""
    """Why the daemon is not ready, or which devices do not work."""
    serves_kept: bool = False
    """Whether blocks of an earlier daemon can be looked up and loaded although this one is not ready: those in memory
    that is pinned."""

    @property
    def ready(self) -> bool:
        return self.state is State.READY


class Outcome(StrEnum):
    """How a job ended."""

    DONE = "done"
    """Every block was copied, or was already present."""
    DECLINED = "declined"
    """Nothing was copied; the reason says why."""
    FAILED = "failed"
    """The copy failed; the error says how."""


class Verify(StrEnum):
    """The choice of blocks that are checked against the checksums of their slots."""

    OFF = "off"
    SAMPLE = "sample"
    ALWAYS = "always"


class Residency(Enum):
    """A change to the blocks of a namespace, as its watchers receive it."""

    STORED = "stored"
    """They can be looked up."""
    REMOVED = "removed"
    """They can no longer be looked up."""
    CLEARED = "cleared"
    """No block of the group can be looked up any longer."""
    NOTES = "notes"
    """A client's notes about them."""
    TIER_STORED = "tier_stored"
    """The node's disk has them."""
    TIER_REMOVED = "tier_removed"
    """The disk no longer has them."""
    TIER_CLEARED = "tier_cleared"
    """The disk has no more blocks of the group, or is not used."""
    RESET = "reset"
    """A snapshot begins: everything received before may be wrong."""
    COMPLETE = "complete"
    """The snapshot ends: the blocks received since the reset are all there are."""
    LOST = "lost"
    """The daemon is lost, and with it every block until the next reset."""

    @property
    def is_change(self) -> bool:
        """Whether this concerns certain blocks, and is a change on the wire."""
        return self not in (Residency.RESET, Residency.COMPLETE, Residency.LOST)


OF_TIER = {
    Residency.STORED: Residency.TIER_STORED,
    Residency.REMOVED: Residency.TIER_REMOVED,
    Residency.CLEARED: Residency.TIER_CLEARED,
}
"""The changes that watchers receive about the node's disk, by the changes that the disk reports."""


class LookupMode(Enum):
    PREFIX = "prefix"
    """The longest run of readable blocks from the first."""
    BITMAP = "bitmap"
    """Each block on its own."""


def text_problem(name: str, text: str) -> str | None:
    """What is wrong with a client's text that the daemon would keep, or None."""
    length = len(text.encode())
    return f"{name} has {length} bytes; it may have {MAX_TEXT_BYTES}" if length > MAX_TEXT_BYTES else None


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for two instances to share blocks. A missing field would corrupt silently.

    Block hashes of engines do not cover model, dtype, parallel sizes or layout (vLLM: ``extra_keys`` hold LoRA,
    multimodal and salt only), so these are part of every key here. All fields but ``extra`` are required.
    """

    model: str
    dtype: str
    kv_layout: str
    block_size: int
    """Tokens per block."""
    tp_size: int
    pp_size: int
    hash_algorithm: str
    hash_bytes: int = 32
    """Width of one block hash in bytes, 16 to 64."""
    extra: str = ""

    def problem(self) -> str | None:
        """One sentence on what is wrong with this namespace, or None."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "extra" and not value:
                return f"namespace.{field.name} is missing: engines that differ in it would share KV silently"
            if isinstance(value, str) and (problem := text_problem(f"namespace.{field.name}", value)):
                return f"{problem}; put a hash of it there"
        if not HASH_BYTES_MIN <= self.hash_bytes <= HASH_BYTES_MAX:
            return f"namespace.hash_bytes is {self.hash_bytes}; it must be {HASH_BYTES_MIN} to {HASH_BYTES_MAX}"
        return None

    @property
    def digest(self) -> str:
        """Six digits by which people distinguish namespaces of the same name."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:6]

    def __str__(self) -> str:
        text = f"{self.model} {self.dtype} {self.kv_layout} b{self.block_size} tp{self.tp_size} pp{self.pp_size}"
        return f"{text} {self.hash_algorithm}{' ' + self.extra if self.extra else ''}"


@dataclass(frozen=True, slots=True)
class Region:
    """One strided piece of an engine's allocation, in bytes.

    Row ``r`` of block ``b`` begins at ``offset + r * row_stride + b * block_stride`` and is ``row_bytes`` wide.
    Rows are layers, or layers x K/V.
    """

    allocation: int
    """Index of the allocation in the registration."""
    offset: int
    row_stride: int
    block_stride: int
    row_bytes: int
    num_rows: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this region, without the gaps between its rows."""
        return self.row_bytes * self.num_rows

    def end(self, num_blocks: int) -> int:
        """First byte after the last row of the last of ``num_blocks`` blocks, from the allocation's base."""
        last_row = (self.num_rows - 1) * self.row_stride
        return self.offset + last_row + (num_blocks - 1) * self.block_stride + self.row_bytes


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group as one rank holds it."""

    group: int
    num_blocks: int
    """Block ids are ``0 .. num_blocks - 1``."""
    shard: int
    """Index of the shard of each block that this rank holds."""
    num_shards: int
    """A block is readable when this many shards are sealed; 1 for replicated KV (MLA), whatever the TP size."""
    regions: tuple[Region, ...]
    slices: tuple[int, ...] = ()
    """Numbers of regions, which split ``regions``, in order and completely, into slices: a load may copy one of them.
    Empty: there are none."""

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shard of one block: what one slot must hold."""
        return sum(region.block_bytes for region in self.regions)

    def most_blocks(self, nbytes: int) -> int:
        """Most whole blocks, of all their shards, that a pool of ``nbytes`` bytes can hold."""
        return nbytes // max(1, self.shard_bytes * self.num_shards)
