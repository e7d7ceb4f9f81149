"""Reports requests that have ended: their blocks then count as used in the daemon's order of eviction."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvsidecar.errors import ClientError
from kvsidecar.integrations.vllm import hits
from kvsidecar.integrations.vllm.scheduler_client import SchedulerClient
from kvsidecar.integrations.vllm.shared import SchedulerState

AFTER_SECONDS = 0.5
"""Delay after the end of a request: its last blocks should be stored by then."""
MAX_WAITING = 1024
"""Most requests that wait. Beyond it, those that ended first are not touched."""
MAX_HASHES = 65536
"""Most blocks of a request that are touched, in all groups together, from its head on: a million tokens with blocks of
16."""


class Touches:
    """Makes the daemon count all blocks of a request as used when it has ended.

    A prompt is stored in pieces, step by step, so its head is older than its tail, and would be evicted first: without
    it, all the rest is useless. Blocks that the GPU's own cache had are not looked up at all. One touch of the whole
    request, head last, fixes both.

    In groups that do not need every block, only those count as used that a request needs to continue after the prompt
    or after the answer. Blocks that were needed at the end of an earlier turn are evicted before those that still are.
    """

    def __init__(self, shared: SchedulerState, client: SchedulerClient) -> None:
        self._groups, self._client = shared.engine.groups, client
        self._counters, self._clock = shared.counters, shared.clock
        self._waiting: deque[tuple[float, Sequence[Any], tuple[int, int], float | None]] = deque(maxlen=MAX_WAITING)
        """Time of each touch, the block hashes, the tokens of the prompt and of all, and the pause that follows."""

    def ended(self, request: Any, pause: float | None) -> None:
        """Note the end of a request.

        Args:
            pause: seconds until its prompt is expected to be used again; infinity: it will not be; None: not known.
        """
        self._counters.unsent_touches += len(self._waiting) == MAX_WAITING
        tokens = request.num_prompt_tokens, request.num_tokens
        self._waiting.append((self._clock() + AFTER_SECONDS, request.block_hashes, tokens, pause))

    def forget_all(self) -> None:
        self._waiting.clear()

    def step(self) -> bool:
        """Touch at most one request, which takes at most two milliseconds. Returns whether there was one. Never waits,
        never raises."""
        if not self._waiting or self._waiting[0][0] > self._clock():
            return False
        _, block_hashes, tokens, pause = self._waiting.popleft()
        most = MAX_HASHES // len(self._groups)
        found = hits.hashes_to_go_on(self._groups, block_hashes, tokens, most)
        packed = {index: b"".join(hashes) for index, hashes in found.items() if hashes}
        try:
            sent = not packed or self._client.touch_nowait(packed, pause)
        except ClientError:
            sent = False  # lookups log the reason
        self._counters.unsent_touches += not sent
        return True
