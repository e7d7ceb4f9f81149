"""How many KV heads a model's layers have, so that ranks that share one can be told. Engine-independent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = re.compile(r"kv_(n_)?heads|key_value_heads|head_kv|multi_query_group|attention_groups|heads_in_group")


def kv_heads_of(config: Mapping[str, Any], total: int) -> int | None:
    """KV heads of every layer; None: layers may differ, or nobody says.

    A rank has one head where there are fewer heads than ranks, whichever it is, and its engine does not tell how many a
    layer has. So a configuration with more than one such number is not trusted.

    Args:
        config: the model's ``config.json``, of its text part.
        total: what the engine takes from it.
    """
    found = list(_numbers(config))
    if len(set(map(repr, found))) != 1 or not isinstance(found[0], int):
        return None
    return found[0] if found[0] == total else None


def ranks_per_head(kv_heads: int | None, ranks: int) -> int:
    """So many consecutive ranks have the same KV head; 1: each rank has heads of its own, or it is not known.

    Args:
        kv_heads: of a layer.
        ranks: over which the heads are split.
    """
    return ranks // kv_heads if kv_heads and kv_heads < ranks and ranks % kv_heads == 0 else 1


def _numbers(config: Any) -> Iterator[Any]:
    """All that a configuration says of KV heads, for whichever layers."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if value is not None and _NAMES.search(str(name)):
                yield value
            else:
                yield from _numbers(value)
    elif isinstance(config, (list, tuple)):
        for each in config:
            yield from _numbers(each)
