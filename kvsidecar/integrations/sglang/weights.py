"""Notices that SGLang's weights change, and gives blocks of each version keys of their own.

SGLang tells a linker nothing of an update: it calls `reset`, as it does for ``flush_cache`` alone, and with
``flush_cache=False`` not even that. So the methods of its scheduler that update weights are wrapped: each call begins a
version that no other engine shares. The reset that follows takes the new ``weight_version``, if there is one.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

from kvsidecar.integrations.weights_version import WeightsVersion

_log = logging.getLogger("kvsidecar.sglang")

UNNAMED = "default"
"""SGLang's ``--weight-version`` where nobody has set one."""
METHODS = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc", "begin_weight_update",
)  # fmt: skip
"""Of SGLang's class that updates weights for the scheduler. Its ``end_weight_update`` comes after the flush."""


class Weights:
    """The version of one rank's weights. Every rank goes through the same versions.

    Args:
        current: SGLang's ``weight_version`` of now.
        token: unique to this engine, the same for all of its ranks.
    """

    def __init__(self, hash_bytes: int, current: Callable[[], str | None], token: str) -> None:
        self._current = current
        numbers = itertools.count()
        self._seen = current()
        name = None if self._seen == UNNAMED else self._seen
        self._version = WeightsVersion(hash_bytes, name, token=lambda: f"{token} {next(numbers)}")
        self._changed = False
        self.unnamed = 0
        """Changes of the weights without a new name until now."""

    @property
    def keys(self) -> Callable[[bytes], bytes]:
        return self._version.keys

    def changing(self) -> None:
        """The weights are about to change: from now on blocks are this engine's alone."""
        self._version.advance()
        self._changed = True

    def reset(self) -> None:
        """SGLang has forgotten its KV: blocks are of the new weights now, and shared under their name."""
        now = self._current()
        if now != self._seen:
            self._seen = now
            self._changed = not self._version.advance(now)
        if self._changed:
            self._changed = False
            self.unnamed += 1
            _log.warning(
                "kvsidecar: the weights were changed without a new weight_version: until they get one with their next "
                "change, this engine shares its cache with no other"
            )


def watch(updater: Any, changing: Callable[[], None]) -> Callable[[], None]:
    """Call ``changing`` at the start of each method of SGLang's class that changes weights.

    Returns:
        A function that ends this.

    Raises:
        ValueError: this version has none of these methods.
    """
    originals = {name: getattr(updater, name) for name in METHODS if hasattr(updater, name)}
    if not originals:
        raise ValueError(f"{updater.__name__} of this SGLang has no method that is known to update weights")
    wrapped = {}
    for name, original in originals.items():
        wrapped[name] = _announced(original, changing)
        setattr(updater, name, wrapped[name])

    def end() -> None:
        for name, original in originals.items():
            if getattr(updater, name) is wrapped[name]:  # else somebody has wrapped it again
                setattr(updater, name, original)

    return end


def _announced(original: Callable[..., Any], changing: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def announced(*arguments: Any, **options: Any) -> Any:
        changing()
        return original(*arguments, **options)

    return announced
