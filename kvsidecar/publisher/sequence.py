"""Numbers what is published, and keeps the latest for routers that have missed some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from kvsidecar.publisher.engine_dialects import Event

MAX_KEPT = 10_000
"""Most messages that are kept, the same as vLLM's ``buffer_steps``."""
MAX_KEPT_BYTES = 64 * 1024 * 1024
END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends a replay."""

Message = tuple[bytes, bytes, bytes]
"""Topic, sequence number, payload."""


class Sequence:
    """The published messages, numbered from 0, of which the latest are kept."""

    def __init__(self, max_kept: int = MAX_KEPT, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._max_kept, self._max_bytes = max_kept, max_bytes
        self._kept: deque[Message] = deque()
        self.nbytes = 0
        """Total size of the kept payloads."""
        self.next = 0

    def add(self, topic: str, events: list[Event], now: float) -> Message:
        """
        Args:
            now: seconds since 1970.
        """
        # vLLM's EventBatch: time, events, data-parallel rank.
        payload = self._encoder.encode([now, events, 0])
        message = topic.encode(), self.next.to_bytes(8, "big"), payload
        self.next += 1
        self._kept.append(message)
        self.nbytes += len(payload)
        while len(self._kept) > self._max_kept or (self.nbytes > self._max_bytes and len(self._kept) > 1):
            self.nbytes -= len(self._kept.popleft()[2])
        return message

    def has(self, first: int) -> bool:
        """Whether nothing from this number on is lost."""
        return self.next - len(self._kept) <= first <= self.next

    def since(self, first: int) -> Iterator[Message]:
        """The messages from this number on that are still kept when the iterator reaches them."""
        number = max(first, self.next - len(self._kept))
        end = self.next
        while number < end:
            oldest = self.next - len(self._kept)
            number = max(number, oldest)
            if number < end:
                yield self._kept[number - oldest]
                number += 1
