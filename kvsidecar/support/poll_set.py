"""Watches many descriptors for the event loop, which looks at all that have news in each of its iterations: hundreds of
connections with something to read would hold up everything else, though each is only lined up for later."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Final

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT
EVENTS: Final = 8
"""Descriptors with news in one iteration: about a tenth of a millisecond. The others wait for the next ones."""


class PollSet:
    """Used from the event loop. One descriptor of it stands for all that are watched."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[int], None]] = {}
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._look)

    def watch(self, fd: int, events: int, call: Callable[[int], None]) -> None:
        """Call ``call`` again and again while there is news.

        Args:
            events: `READABLE`, `WRITABLE` or both. 0: watch it no more, which the caller does before it closes ``fd``.
            call: gets the events, perhaps also EPOLLHUP and EPOLLERR. It must bear a call without news: another
                descriptor may have had the number when the loop looked.
        """
        known = fd in self._calls
        if events:
            self._calls[fd] = call
            (self._epoll.modify if known else self._epoll.register)(fd, events)
        elif known:
            del self._calls[fd]
            self._epoll.unregister(fd)

    def close(self) -> None:
        if not self._epoll.closed:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._calls.clear()

    def _look(self) -> None:
        for fd, events in self._epoll.poll(0, EVENTS):
            if (call := self._calls.get(fd)) is not None:
                call(events)
            if self._epoll.closed:
                return
