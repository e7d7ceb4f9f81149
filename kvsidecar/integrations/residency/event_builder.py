"""Builds KV cache events for routers, one for each chain of blocks, from an engine's own classes or as maps.

The other fields of an event, besides names, parent and tokens, come from each engine's ``events.py``, and from
`kvsidecar.publisher.events`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Event = TypeVar("_Event")


class EventBuilder(Generic[_Event]):
    """Builds events, and keeps them until they are taken.

    Args:
        stored: makes a ``BlockStored`` from its fields. It must keep the lists that it is given: a block whose parent
            is the last one of the last event is added to them.
        removed: makes a ``BlockRemoved`` from its fields.
        most_blocks: most blocks in one event.
        most_tokens: most tokens in one event, unless a single block has more.
    """

    def __init__(
        self,
        stored: Callable[..., _Event],
        removed: Callable[..., _Event],
        most_blocks: int = 1,
        most_tokens: int = 1 << 30,
    ) -> None:
        self._stored, self._removed = stored, removed
        self._most_blocks, self._most_tokens = most_blocks, most_tokens
        self._events: list[_Event] = []
        self._last: tuple[list[Any], list[int], dict[str, Any]] | None = None
        """Blocks, tokens and further fields of the last event, if it stores."""

    def __bool__(self) -> bool:
        return bool(self._events)

    def store(self, block: Any, parent: Any, tokens: list[int], **fields: Any) -> None:
        """Add a stored block: its name, its parent's name or None, its tokens, and the other fields of its event."""
        if self._last is not None:
            blocks, before, same = self._last
            has_room = len(blocks) < self._most_blocks and len(before) + len(tokens) <= self._most_tokens
            if has_room and blocks[-1] == parent and same == fields:
                blocks.append(block)
                before.extend(tokens)
                return
        blocks = [block]
        self._last = blocks, tokens, fields
        self._events.append(self._stored(block_hashes=blocks, parent_block_hash=parent, token_ids=tokens, **fields))

    def remove(self, blocks: list[Any], **fields: Any) -> None:
        self._last = None
        self._events.append(self._removed(block_hashes=blocks, **fields))

    def restart(self, *events: _Event) -> None:
        """Replace all events that were not taken."""
        self._events, self._last = [*events], None

    def take(self) -> list[_Event]:
        events = self._events
        self.restart()
        return events
