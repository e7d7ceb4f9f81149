"""Keeps the pauses of the event loop short, and the long ones rare, that Python's garbage collector makes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final

SECONDS: Final = 0.02
"""Time between two looks at how many young objects there are: a look takes some 10 ns of each."""
MANY: Final = 300
COLLECT: Final = (100, 2, 1 << 30)
"""Arguments of `gc.set_threshold`: few objects in one go. All, which takes 13 ms with a thousand connections, only when
`YoungObjects` asks for it: jobs, clients and connections leave hardly any garbage, and gRPC's calls young one."""
FULL_SECONDS: Final = 600.0
"""Time between full collections, each of which takes 7 ms or more. Python begins them by the number of younger ones:
with many clients every 50 to 100 s, to find some 20 objects for each second."""


class YoungObjects:
    """Collects young objects before there are many, and all of them only once in `FULL_SECONDS`.

    Python begins a collection when more objects have been made than freed since the last one, whichever were freed.
    Where connections and calls come and go, about as many old ones are freed as young ones are made, and the young ones
    become thousands, whose collection takes up to 0.8 ms (measured, Python 3.11). Called at the end of each iteration
    in which there was work. With `COLLECT`, Python begins no full collections by itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._look_at = 0.0
        self._full_at = clock() + FULL_SECONDS

    def __call__(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + SECONDS
        if now >= self._full_at:
            self._full_at = now + FULL_SECONDS
            gc.collect()
        elif len(gc.get_objects(generation=0)) > MANY:
            gc.collect(0)
