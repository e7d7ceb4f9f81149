"""The events of one topic: their fields, blocks under the names that routers know, and which blocks are announced."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from kvsidecar.integrations.residency.event_builder import EventBuilder
from kvsidecar.integrations.residency.known_blocks import BlockInfo
from kvsidecar.publisher.engine_dialects import Dialect, Event

_CLEARED: Event = {"type": "AllBlocksCleared"}

MAX_CHAIN = 64
"""Most blocks in one event."""
MAX_CHAIN_TOKENS = 8192
"""Most tokens in one event, unless a single block has more."""
COUNTED_TOKENS = 64
"""`Topic.take` counts a block once for each this many of its tokens, and at least once."""


@dataclass(slots=True, eq=False)
class Holder:
    """The blocks that one group of a namespace has announced in a topic."""

    dialect: Dialect
    group: int
    blocks: dict[str, dict[bytes, BlockInfo]] = field(default_factory=dict)
    """Announced blocks by medium and hash. A block that is announced twice is here once."""


@dataclass(slots=True)
class _Name:
    """The name by which routers know a block. Hashes may share one, by chance or on purpose: the last one ends it."""

    claims: int = 0
    """Entries of `Holder.blocks` with this name: only `Topic.stored` and `Topic.removed` change both."""
    round: int = -1
    """The round in which it was last announced."""


_Key = tuple[str, int, int]
"""Medium, group and number of a block."""
_Entry = tuple[Holder, str, bytes]
"""A holder, with the medium and hash of one of its blocks."""


class Topic:
    """What is announced under one topic. A block that several namespaces hold is announced once, and retracted when
    none holds it any more.

    Clients choose hashes and parents, so nothing here follows parents: a block is announced when its parent has been,
    and waits in one place until then. Each costs the same, whatever its chain looks like; in a circle, all wait.

    Args:
        ownership: this field of every event; None: it is left out.
    """

    def __init__(self, name: str, ownership: str | None = None) -> None:
        self.name = name
        self._common: Event = {"locality": "LOCAL"} | ({} if ownership is None else {"ownership": ownership})
        self._holders: dict[Holder, None] = {}
        self._names: dict[_Key, _Name] = {}
        self._round = 0
        """Incremented whenever everything has to be announced again."""
        self._walk: Iterator[_Entry] = iter(())
        """Blocks still to be announced again."""
        self.repeats = False
        """Whether blocks are still to be announced again."""
        self._queue: deque[_Entry] = deque()
        """Blocks to be announced before those of the walk."""
        self._released: deque[dict[_Entry, None]] = deque()
        """Blocks to be announced first: their parent was. Clients choose how many share a parent."""
        self._waiting: dict[tuple[int, int], dict[_Entry, None]] = {}
        """Blocks whose parent is not announced, by the parent's group and number."""
        self._events = EventBuilder[Event](
            partial(dict, type="BlockStored"), partial(dict, type="BlockRemoved"), MAX_CHAIN, MAX_CHAIN_TOKENS
        )
        # An earlier publisher may have announced blocks that are gone.
        self._events.restart(_CLEARED.copy())

    def __len__(self) -> int:
        """How many blocks are announced."""
        return len(self._names)

    @property
    def backlog(self) -> int:
        """How many blocks at least are to be announced, not counting repetitions."""
        return len(self._queue) + len(self._released)

    @property
    def pending(self) -> bool:
        return bool(self._events or self._released or self._queue or self.repeats)

    @property
    def unused(self) -> bool:
        return not self._holders

    def hold(self, dialect: Dialect, group: int) -> Holder:
        holder = Holder(dialect, group)
        self._holders[holder] = None
        return holder

    def release(self, holder: Holder) -> None:
        """Drop a holder, and retract all that it has announced."""
        for medium, blocks in holder.blocks.items():
            self.removed(holder, medium, list(blocks))
        self._holders.pop(holder, None)

    def stored(self, holder: Holder, medium: str, block_hash: bytes, info: BlockInfo) -> None:
        blocks = holder.blocks.setdefault(medium, {})
        if block_hash in blocks:
            return
        blocks[block_hash] = info
        name = self._names.setdefault(_key(holder, medium, block_hash), _Name())
        name.claims += 1
        if name.round != self._round:
            self._queue.append((holder, medium, block_hash))

    def removed(self, holder: Holder, medium: str, hashes: Iterable[bytes]) -> None:
        """Retract those of the blocks that the holder has announced."""
        blocks, gone = holder.blocks.get(medium, {}), []
        for each in hashes:
            if (info := blocks.pop(each, None)) is None:
                continue
            self._wait_no_more((holder, medium, each), info)
            key = _key(holder, medium, each)
            name = self._names[key]
            name.claims -= 1
            if not name.claims:
                del self._names[key]
                if name.round == self._round:
                    gone.append(key[2])
        if gone:
            self._events.remove(gone, medium=medium, group_idx=holder.group, **self._common)

    def say_again(self) -> None:
        """Announce every block again, over the next calls of `take`. Routers forget this topic first: one that has
        missed an event may believe in a block that is gone."""
        self._events.restart(_CLEARED.copy())
        self._round += 1
        self._queue.clear()
        self._released.clear()
        self._waiting = {}
        self._walk, self.repeats = self._everything(), True

    def _everything(self) -> Iterator[_Entry]:
        """All blocks of all holders. Those stored during the walk are in the queue."""
        for holder in list(self._holders):
            for medium, blocks in list(holder.blocks.items()):
                for each in list(blocks):
                    yield holder, medium, each

    def take(self, most: int = 512) -> list[Event]:
        """The events since the last call.

        Args:
            most: about how many blocks are looked at; fewer if they are long, see `COUNTED_TOKENS`.
        """
        left = most
        while left > 0 and (self._released or self._queue or self.repeats):
            if self._released:
                left -= self._say_released()
            elif self._queue:
                left -= self._say_if_known(self._queue.popleft())
            elif (entry := next(self._walk, None)) is not None:
                left -= self._say_if_known(entry)
            else:
                self.repeats = False
        return self._events.take()

    def _say_released(self) -> int:
        """Call `_say_if_known` on one released block."""
        entries = self._released[-1]  # a chain becomes one event
        entry, _ = entries.popitem()
        if not entries:
            self._released.pop()
        return self._say_if_known(entry)

    def _say_if_known(self, entry: _Entry) -> int:
        """Announce a block if routers know its parent: they ignore others. Returns its share of `take`'s ``most``."""
        holder, medium, block_hash = entry
        if (info := holder.blocks.get(medium, {}).get(block_hash)) is None:
            return 1
        key = _key(holder, medium, block_hash)
        name = self._names[key]
        if name.round == self._round:
            return 1
        if info.parent is not None and not self._is_said(holder, holder.dialect.number(info.parent)):
            self._waiting.setdefault((holder.group, holder.dialect.number(info.parent)), {})[entry] = None
            return 1
        name.round = self._round
        tokens = info.tokens
        self._events.store(
            key[2],
            None if info.parent is None else holder.dialect.number(info.parent),
            tokens,
            block_size=len(tokens),
            lora_id=None,
            lora_name=None,
            medium=medium,
            group_idx=holder.group,
            **holder.dialect.stored,
            **self._common,
        )
        if waiting := self._waiting.pop(key[1:], None):
            self._released.append(waiting)
        return max(1, len(tokens) // COUNTED_TOKENS)

    def _is_said(self, holder: Holder, number: int) -> bool:
        """Whether the block is announced, in either medium."""
        media = (holder.dialect.pool, holder.dialect.disk or "")
        names = (self._names.get((medium, holder.group, number)) for medium in media)
        return any(name is not None and name.round == self._round for name in names)

    def _wait_no_more(self, entry: _Entry, info: BlockInfo) -> None:
        if info.parent is not None and self._waiting:
            place = entry[0].group, entry[0].dialect.number(info.parent)
            if (waiting := self._waiting.get(place)) is not None:
                waiting.pop(entry, None)
                if not waiting:
                    del self._waiting[place]


def _key(holder: Holder, medium: str, block_hash: bytes) -> _Key:
    return medium, holder.group, holder.dialect.number(block_hash)
