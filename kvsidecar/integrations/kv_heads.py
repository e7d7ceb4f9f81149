"""Finds how many KV heads a model's layers have, and so which ranks share one. Engine-independent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = re.compile(r"kv_(n_)?heads|key_value_heads|head_kv|multi_query_group|attention_groups|heads_in_group")


def kv_heads_of(config: Mapping[str, Any], total: int) -> int | None:
    """KV heads of every layer; None: layers may differ, or the number is unknown.

    A rank has one head if there are fewer heads than ranks, whichever it is, and its engine does not report how many a
    layer has. So a configuration with more than one such number is not trusted.

    Args:
        config: the text part of the model's ``config.json``.
        total: the number that the engine takes from it.
    """
    found = list(_numbers(config))
    if len(set(map(repr, found))) != 1 or not isinstance(found[0], int):
        return None
    return found[0] if found[0] == total else None


def ranks_per_head(kv_heads: int | None, ranks: int) -> int:
    """How many consecutive ranks have the same KV head; 1: each rank has heads of its own, or this is not known.

    Args:
        kv_heads: the number of heads of a layer.
        ranks: the number of ranks over which the heads are split.
    """
    return ranks // kv_heads if kv_heads and kv_heads < ranks and ranks % kv_heads == 0 else 1


def _numbers(config: Any) -> Iterator[Any]:
    """All numbers of KV heads in a configuration, for any layers."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if value is not None and _NAMES.search(str(name)):
                yield value
            else:
                yield from _numbers(value)
    elif isinstance(config, (list, tuple)):
        for each in config:
            yield from _numbers(each)
