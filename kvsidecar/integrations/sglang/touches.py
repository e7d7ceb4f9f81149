"""Reports requests and sessions that have ended: their pages then count as used in the daemon's order of eviction. The
report includes when they are used next, if that is known. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from kvsidecar.errors import ClientError
from kvsidecar.integrations.sglang.shared import RankState
from kvsidecar.integrations.sglang.transfers import HASH_BYTES

AFTER_SECONDS = 0.5
"""Delay after the end of a request: its last pages should be stored by then."""
MAX_HASHES = 65536
"""Most pages of a request that are reported, from its head on."""
MAX_WAITING_BYTES = MAX_SESSIONS_BYTES = 16 << 20
"""Memory for the keys of requests that have just ended, and of the last requests of open sessions. Beyond it, the
oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class _Touch:
    due: float
    keys: bytes
    pause: float | None


class PageTouches:
    """Makes the daemon count all pages of a request as used when it has ended.

    SGLang asks a linker only for pages that are not on the GPU. So those of a conversation's beginning, which the GPU
    keeps, would look unused to the daemon, and would be evicted there first: without them, all others are useless.

    Args:
        trailing: how many pages at the end of a request a hit needs, by pool; it needs all pages of other pools.
    """

    def __init__(self, shared: RankState, trailing: Mapping[str, int]) -> None:
        self._client, self._namespace, self._keys = shared.jobs.client, shared.namespace, shared.keys
        self._groups, self._counters, self._clock = shared.groups, shared.counters, shared.clock
        self._trailing = trailing
        self._waiting: deque[_Touch] = deque()
        self._waiting_bytes = 0
        self._sessions: dict[str, bytes] = {}
        """Keys of the last request of each session; the latest last."""
        self._sessions_bytes = 0

    def request_ended(self, hashes: Sequence[str], session: str | None, pause: float | None) -> None:
        """Note the end of a request.

        Args:
            hashes: the hashes of all its pages in SGLang's tree.
            session: the session to which it belongs, if any.
            pause: seconds until its prompt is expected to be used again; infinity: it will not be; None: not known.

        Raises:
            ValueError: see `kvsidecar.integrations.sglang.transfers.hashes_of`.
        """
        if not hashes:
            return
        keys = self._keys(hashes[:MAX_HASHES])
        self._put(keys, pause)
        if session is not None:
            self._forget_session(session)
            self._sessions[session] = keys
            self._sessions_bytes += len(keys)
            while self._sessions_bytes > MAX_SESSIONS_BYTES:
                self._forget_session(next(iter(self._sessions)))

    def session_ended(self, session: str) -> None:
        """Note the end of a session: no request will continue its last one."""
        if keys := self._forget_session(session):
            self._put(keys, inf)

    def _put(self, keys: bytes, pause: float | None) -> None:
        self._waiting.append(_Touch(self._clock() + AFTER_SECONDS, keys, pause))
        self._waiting_bytes += len(keys)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._take()
            self._counters.unsent_touches += 1

    def _take(self) -> _Touch:
        touch = self._waiting.popleft()
        self._waiting_bytes -= len(touch.keys)
        return touch

    def _forget_session(self, session: str) -> bytes:
        keys = self._sessions.pop(session, b"")
        self._sessions_bytes -= len(keys)
        return keys

    def step(self) -> None:
        """Touch at most one request, which takes at most two milliseconds. Never waits, never raises."""
        if not self._waiting or self._waiting[0].due > self._clock():
            return
        touch = self._take()
        groups = {
            group.index: touch.keys[-self._trailing.get(group.pool, 0) * HASH_BYTES :] for group in self._groups.all
        }
        try:
            sent = self._client.touch_nowait(self._namespace, groups, touch.pause)
        except ClientError:
            sent = False  # lookups log the reason
        self._counters.touches += sent
        self._counters.unsent_touches += not sent
