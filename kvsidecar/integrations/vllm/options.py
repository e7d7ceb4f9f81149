"""The connector's options in ``kv_connector_extra_config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("it must be a text that is not empty")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")  # noqa: TRY004 - one kind of error for a bad value
    return value


def _store_mode(value: Any) -> str:
    if value not in ("eager", "lazy"):
        raise ValueError('it must be "eager" or "lazy"')
    return str(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("it must be a whole number, 0 or more")
    return value


def _seconds(value: Any) -> float:
    seconds: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (found := _DURATION.fullmatch(value)):
        unit = _SECONDS.get(found[2] or "s")
        seconds = None if unit is None else float(found[1]) * unit
    if seconds is None or not 0 < seconds < 1e9:
        raise ValueError("it must be a time above 0 such as 5ms or 30s, or a number of seconds")
    return seconds


def _option(default: Any, read: Any, text: str) -> Any:
    return field(default=default, metadata={"read": read, "help": text})


@dataclass(frozen=True, slots=True)
class Options:
    """Every option with its default. Times are in seconds."""

    socket: str | None = _option(
        None, _text, "path of the daemon's socket; default: $KVSIDECAR_SOCKET, otherwise the daemon's default"
    )
    instance: str = _option("vllm", _text, "name of this engine deployment in the daemon's log and status")
    model_name: str | None = _option(
        None,
        _text,
        "name of the model in `status` and policies; engines share blocks only if their names are equal",
    )
    store_mode: str = _option(
        "eager",
        _store_mode,
        "eager: store blocks when their tokens are confirmed; lazy: store them when they are hit, when the engine is "
        "idle, or when the GPU is about to evict them",
    )
    store_interval: float = _option(
        0.25, _seconds, "eager mode: longest time that blocks of running requests wait to be stored together"
    )
    store_prompt_only: bool = _option(False, _flag, "eager mode: store only the blocks of prompts, not of answers")
    lazy_watermark: int = _option(
        0,
        _count,
        "lazy mode: how many of the blocks next in line for eviction are stored ahead; 0: twice what one step can need",
    )
    lookup_budget: float = _option(0.005, _seconds, "longest time that one scheduler step may wait for the daemon")
    lookup_patience: float = _option(
        0.1,
        _seconds,
        "longest time that a request is held back while the daemon does not answer; then it runs without a hit",
    )
    fetch_patience: float = _option(
        1.0,
        _seconds,
        "longest time that a request waits for blocks that the daemon fetches from a slower tier, such as a disk",
    )
    prefill_rate: int = _option(
        0,
        _count,
        "tokens that this engine computes in a second, to tell which blocks are worth fetching; 0: the daemon's guess",
    )
    lease_seconds: float = _option(
        60.0, _seconds, "duration of the lease that protects the blocks of a hit from eviction until they are loaded"
    )
    load_timeout: float = _option(30.0, _seconds, "a load that has not started after this time fails")
    weights_version: str | None = _option(
        None, _text, "name of the weights at the start; engines share blocks only if their names are equal"
    )
    weights_version_file: str | None = _option(
        None, _text, "file that contains the name of the weights; it is read at each reset"
    )
    local_protocol: bool = _option(True, _flag, "use the local protocol instead of gRPC, if the daemon offers it")

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Options:
        """Read ``kv_connector_extra_config``.

        Raises:
            ValueError: an option is unknown or has a bad value.
        """
        known = {each.name: each.metadata["read"] for each in fields(cls)}
        values = {}
        for name, value in extra.items():
            if name not in known:
                raise ValueError(f"kv_connector_extra_config.{name} is unknown: the options are {', '.join(known)}")
            try:
                values[name] = known[name](value)
            except ValueError as error:
                raise ValueError(f"kv_connector_extra_config.{name} is {value!r}: {error}") from None
        options = cls(**values)
        if options.lease_seconds < options.load_timeout:
            raise ValueError(
                f"kv_connector_extra_config.lease_seconds is {options.lease_seconds!r}: it must not be less than "
                f"load_timeout ({options.load_timeout:g} s), or the blocks could be evicted before they are loaded"
            )
        return options
