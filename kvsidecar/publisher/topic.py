"""The events of one topic: blocks under the names that routers know, and which of them were said."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvsidecar.integrations.residency.known_blocks import BlockInfo
from kvsidecar.integrations.residency.notes import NAME_BYTES

Event = dict[str, Any]
"""As on the wire: a map with its ``type``."""

_CLEARED: Event = {"type": "AllBlocksCleared"}

MAX_CHAIN = 64
"""Most blocks in one event."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an engine's KV cache events name blocks and memory."""

    pool: str
    disk: str | None
    """None: the engine fetches nothing from the node's disk."""
    number: Callable[[bytes], int]
    """What routers call the block with this hash."""
    stored: Event = field(default_factory=dict)
    """Further fields of ``BlockStored``."""


def _last_bytes(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def _first_bytes(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "big", signed=True)


VLLM = Dialect("CPU", "STORAGE", _last_bytes, {"kv_cache_spec_kind": "full_attention"})
"""``maybe_convert_block_hash`` and ``KVCacheSpecKind`` of vLLM."""
SGLANG = Dialect("CPU_PINNED", None, _first_bytes)
"""``hash_str_to_int64`` of SGLang."""


def dialect_of(hash_bytes: int) -> Dialect:
    """Of the engine whose notes have hashes of so many bytes."""
    return SGLANG if hash_bytes == NAME_BYTES else VLLM


@dataclass(slots=True)
class _Said:
    """A block that is announced."""

    dialect: Dialect
    info: BlockInfo
    holders: int = 1
    """Namespaces that hold it."""
    round: int = -1
    """In which it was last said."""


_Key = tuple[str, int, int]
"""Medium, group and number of a block."""


class Topic:
    """Namespaces with one topic may hold the same block: it is said once, and taken back when none holds it.

    Args:
        ownership: of every event; None: it is left out.
    """

    def __init__(self, name: str, ownership: str | None = None) -> None:
        self.name = name
        self._common: Event = {"locality": "LOCAL"} | ({} if ownership is None else {"ownership": ownership})
        self._said: dict[_Key, _Said] = {}
        self._round = 0
        """Goes up when everything is to be said again."""
        self._again: deque[_Key] = deque()
        """What is still to be said again."""
        self._waiting: dict[tuple[int, int], list[_Key]] = {}
        """By group and number of a block that nobody holds: blocks behind it that are not said again without it."""
        # An earlier publisher may have said what has gone since.
        self._events: list[Event] = [_CLEARED.copy()]

    def __len__(self) -> int:
        """How many blocks are announced."""
        return len(self._said)

    def stored(self, dialect: Dialect, medium: str, group: int, block_hash: bytes, info: BlockInfo) -> None:
        key = medium, group, dialect.number(block_hash)
        if (said := self._said.get(key)) is not None:
            said.holders += 1
        else:
            self._said[key] = _Said(dialect, info)
            self._say_chain(key)
            for each in self._waiting.pop(key[1:], ()):
                self._say_chain(each)

    def removed(self, dialect: Dialect, medium: str, group: int, hashes: Iterable[bytes]) -> None:
        gone = []
        for number in map(dialect.number, hashes):
            if (said := self._said.get((medium, group, number))) is None:
                continue
            said.holders -= 1
            if not said.holders:
                del self._said[medium, group, number]
                gone.append(number)
        if gone:
            self._events.append(
                {"type": "BlockRemoved", "block_hashes": gone, "medium": medium, "group_idx": group, **self._common}
            )

    def say_again(self) -> None:
        """Announce every block again, over the next calls of `take`. Routers forget this topic before: whoever has
        missed an event may believe in a block that is gone."""
        self._events = [_CLEARED.copy()]
        self._round += 1
        self._again, self._waiting = deque(self._said), {}

    def take(self, most: int = 512) -> list[Event]:
        """The events since the last call.

        Args:
            most: blocks that are said again, about.
        """
        left = most
        while self._again and left > 0:
            left -= self._say_chain(self._again.popleft())
        events, self._events = self._events, []
        return events

    def _say_chain(self, key: _Key) -> int:
        """Say a block and those before it, unless that was done in this round: a router takes no block whose parent it
        has not heard of. Returns how many were said."""
        chain, wanted = [], key
        while (said := self._said.get(key)) is not None and said.round != self._round:
            chain.append((key, said))
            if said.info.parent is None:
                break
            key = self._find(said, key)
            if key not in self._said:
                self._waiting.setdefault(key[1:], []).append(wanted)
                return 0
        for each, said in reversed(chain):
            said.round = self._round
            self._say(each, said)
        return len(chain)

    def _find(self, said: _Said, key: _Key) -> _Key:
        """The parent of a block, in the same medium if it is there."""
        assert said.info.parent is not None
        medium, group, _ = key
        number = said.dialect.number(said.info.parent)
        other = said.dialect.disk if medium == said.dialect.pool else said.dialect.pool
        found = medium, group, number
        return found if found in self._said or other is None else (other, group, number)

    def _say(self, key: _Key, said: _Said) -> None:
        (medium, group, number), info = key, said.info
        parent = None if info.parent is None else said.dialect.number(info.parent)
        last = self._events[-1] if self._events else {}
        if (
            last.get("type") == "BlockStored"
            and last["block_hashes"][-1] == parent
            and (last["medium"], last["group_idx"]) == (medium, group)
            and len(last["block_hashes"]) < MAX_CHAIN
        ):
            last["block_hashes"].append(number)
            last["token_ids"].extend(info.tokens)
            return
        tokens = info.tokens
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [number],
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": len(tokens),
                "lora_id": None,
                "lora_name": None,
                "medium": medium,
                "group_idx": group,
                **said.dialect.stored,
                **self._common,
            }
        )
