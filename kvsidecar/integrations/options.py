"""Reads an integration's options from the engine's JSON. Engine-independent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII)


def read_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("it must be a text that is not empty")
    return value


def read_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")  # noqa: TRY004 - one kind of error for a bad value
    return value


def read_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("it must be a whole number, 0 or more")
    return value


def read_token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError("it must be a list of token ids")  # noqa: TRY004 - one kind of error for a bad value
    return tuple(map(read_count, value))


def read_seconds(value: Any) -> float:
    seconds: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (found := _DURATION.fullmatch(value)):
        unit = _SECONDS.get(found[2] or "s")
        seconds = None if unit is None else float(found[1]) * unit
    if seconds is None or not 0 < seconds < 1e9:
        raise ValueError("it must be a time above 0 such as 5ms or 30s, or a number of seconds")
    return seconds


def option(default: Any, read: Any, text: str) -> Any:
    return field(default=default, metadata={"read": read, "help": text})


def read_options(kind: Any, extra: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The values of a dataclass of `option` fields.

    Args:
        place: where the user has set them, for the error's text.

    Raises:
        ValueError: an option is unknown or has a bad value.
    """
    known = {each.name: each.metadata["read"] for each in fields(kind)}
    values = {}
    for name, value in extra.items():
        if name not in known:
            raise ValueError(f"{place}.{name} is unknown: the options are {', '.join(known)}")
        try:
            values[name] = known[name](value)
        except ValueError as error:
            raise ValueError(f"{place}.{name} is {value!r}: {error}") from None
    return values
