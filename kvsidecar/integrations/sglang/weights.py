"""Notices that SGLang's weights change, and gives blocks of each version keys of their own.

SGLang does not report an update to a linker: it calls `reset`, as it does for ``flush_cache`` alone. It does not even
do that with ``flush_cache=False``, or if it refuses the flush because requests run. Its prefix tree then keeps KV of
the old weights, and requests append KV of the new ones to it, which depends on both. None of that may be a hit later.
So we wrap the methods of SGLang's scheduler that update weights. From the start of such a call until SGLang holds no KV
any more, nothing is stored and nothing looked up; then a new version begins.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from kvsidecar.integrations.weights_version import WeightsVersion
from kvsidecar.integrations.wrapping import End, wrap

_log = logging.getLogger("kvsidecar.sglang")

UNNAMED = "default"
"""SGLang's ``--weight-version`` if it is not set."""
BEGIN, END = "begin_weight_update", "end_weight_update"
"""The methods of a session: an update in several parts, after which SGLang may still convert the weights."""
METHODS = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc", BEGIN, END,
)  # fmt: skip
"""The methods that change weights, in SGLang's class that updates weights for the scheduler."""


class Weights:
    """The version of one rank's weights. Every rank goes through the same versions.

    Args:
        current: returns SGLang's current ``weight_version``.
        token: a text unique to this engine, the same for all of its ranks.
    """

    def __init__(self, hash_bytes: int, current: Callable[[], str | None], token: str) -> None:
        self._current = current
        numbers = itertools.count()
        self._seen = current()
        name = None if self._seen == UNNAMED else self._seen
        self._version = WeightsVersion(hash_bytes, name, token=lambda: f"{token} {next(numbers)}")
        self.keys = self._version.keys
        self._in_session = False
        self._warned = False
        self.mixed = False
        """Whether SGLang may hold KV that was not computed with the current weights alone: it must not be stored, and
        no other added to it."""
        self.unnamed = 0
        """How many changes of the weights came without a new name."""

    def changing(self, method: str) -> None:
        """Note that the weights are about to change, by this method of SGLang's."""
        if method == END and not self._in_session:
            return  # SGLang refuses it
        self._in_session = method == BEGIN or (self._in_session and method != END)
        if not self.mixed:
            self.mixed = True
            self._version.advance()  # until the end nothing has these keys

    def changed(self, empty: Callable[[], bool]) -> None:
        """Note that a method that changes weights has ended.

        Args:
            empty: whether SGLang holds no KV. Called only if the mixture would end then, on all ranks.
        """
        if not self.mixed or self._in_session:
            return
        if empty():
            self._begin_version()
        elif not self._warned:
            self._warned = True
            _log.warning(
                "kvsidecar: the weights were changed, but SGLang's cache was not flushed: nothing is offloaded and "
                "nothing looked up until it is (/flush_cache)"
            )

    def reset(self) -> None:
        """Note that SGLang has forgotten its KV."""
        if self._in_session:
            return  # the weights may change once more
        if self.mixed or self._current() != self._seen:  # the latter: another name for the same weights
            self._begin_version()

    def _begin_version(self) -> None:
        """From now on all KV belongs to the current weights: shared under their name, if they have a new one."""
        self.mixed = self._warned = False
        before, self._seen = self._seen, self._current()
        if not self._version.advance(self._seen if self._seen != before else None):
            self.unnamed += 1
            _log.warning(
                "kvsidecar: the weights were changed without a new weight_version: until they get one with their next "
                "change, this engine shares its cache with no other"
            )


def holds_no_kv(updater: Any, allocator: Any) -> bool:
    """Whether nothing that SGLang has computed is left: no request has begun, and no page is taken. False if unknown.
    Never raises.

    Args:
        updater: the object whose methods update weights.
        allocator: SGLang's allocator of pages.
    """
    try:
        # An allocator of several pools has a size for each: no KV is without pages of full attention.
        free = getattr(allocator, "full_available_size", allocator.available_size)()
        pages = allocator.size_full // allocator.page_size
        return bool(updater.is_fully_idle(ignore_waiting=True)) and free >= pages * allocator.page_size
    except Exception:  # noqa: BLE001 - an error would end SGLang's scheduler
        _log.exception("kvsidecar: it is unknown whether SGLang holds KV")
        return False


def watch(updater: Any, changing: Callable[[str], None], changed: Callable[[Any], None]) -> End:
    """Watch each method of SGLang's class that changes weights.

    Args:
        changing: called before, with the method's name.
        changed: called after, with the object, also if the method raises.

    Raises:
        ValueError: this version has none of these methods.
    """
    names = [name for name in METHODS if hasattr(updater, name)]
    if not names:
        raise ValueError(f"{updater.__name__} of this SGLang has no method that is known to update weights")

    def announced(name: str, original: Callable[..., Any], updater: Any, *arguments: Any, **options: Any) -> Any:
        changing(name)
        try:
            return original(updater, *arguments, **options)
        finally:
            changed(updater)

    ends = ExitStack()
    for name in names:
        ends.callback(wrap(updater, name, partial(announced, name)))
    return ends.close
