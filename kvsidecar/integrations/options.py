"""An integration's options in the engine's JSON: how they are read, and those that all engines have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Self

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_SECONDS)})?\s*", re.ASCII)


def read_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("it must be a non-empty text")
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
        seconds = float(found[1]) * _SECONDS[found[2] or "s"]
    if seconds is None or not 0 < seconds < 1e9:
        raise ValueError("it must be a time above 0 such as 5ms or 30s, or a number of seconds")
    return seconds


def option(default: Any, read: Any, text: str) -> Any:
    return field(default=default, metadata={"read": read, "help": text})


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The options of every engine, with their defaults. Times are in seconds."""

    PLACE: ClassVar[str]
    """Where the user sets the options, for error messages."""

    socket: str | None = option(
        None, read_text, "path of the daemon's socket; default: $KVSIDECAR_SOCKET, otherwise the daemon's default"
    )
    instance: str = option("", read_text, "name of this engine deployment in the daemon's log and status")
    model_name: str | None = option(
        None,
        read_text,
        "name of the model in policies, and in `status` and routers' topics instead of the one that requests give it; "
        "engines share blocks only if their names are equal",
    )
    local_protocol: bool = option(True, read_flag, "use the local protocol instead of gRPC, if the daemon offers it")
    tool_tokens: tuple[int, ...] = option(
        (),
        read_token_ids,
        "ids of the tokens that begin a tool call, such as [151657] for Qwen's <tool_call>; after an answer with "
        "one of them, a request's tool_pause counts instead of its pause",
    )
    lease_seconds: float = option(
        60.0,
        read_seconds,
        "duration of the lease that protects the blocks of a hit from eviction until they are loaded",
    )
    load_timeout: float = option(30.0, read_seconds, "a load that has not started after this time fails")

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Self:
        """Read the engine's JSON.

        Raises:
            ValueError: an option is unknown or has a bad value.
        """
        known = {each.name: each.metadata["read"] for each in fields(cls)}
        values = {}
        for name, value in extra.items():
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"
                raise ValueError(f"{cls.PLACE}.{name} is unknown: {hint}")
            try:
                values[name] = known[name](value)
            except ValueError as error:
                raise ValueError(f"{cls.PLACE}.{name} is {value!r}: {error}") from None
        options = cls(**values)
        if options.lease_seconds < options.load_timeout:
            raise ValueError(
                f"{cls.PLACE}.lease_seconds is {options.lease_seconds!r}: it must not be less than load_timeout "
                f"({options.load_timeout:g} s), or the blocks could be evicted before they are loaded"
            )
        return options
