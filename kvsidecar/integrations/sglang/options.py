"""The linker's options in ``linker_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsidecar.integrations.options import (
    option,
    read_count,
    read_flag,
    read_options,
    read_seconds,
    read_text,
    read_token_ids,
)

PLACE = "linker_extra_config"


@dataclass(frozen=True, slots=True)
class Options:
    """Every option with its default. Times are in seconds."""

    socket: str | None = option(
        None, read_text, "path of the daemon's socket; default: $KVSIDECAR_SOCKET, otherwise the daemon's default"
    )
    instance: str = option("sglang", read_text, "name of this engine deployment in the daemon's log and status")
    model_name: str | None = option(
        None,
        read_text,
        "name of the model in `status` and policies; engines share blocks only if their names are equal",
    )
    load_chunks: int = option(
        2,
        read_count,
        "number of jobs, by layers, in which KV is loaded: the forward begins when the first part is there",
    )
    lookup_budget: float = option(
        0.005,
        read_seconds,
        "longest time that a lookup of up to 2,048 hashes may keep the scheduler's thread waiting; then it misses. "
        "Longer ones get proportionally more",
    )
    lease_seconds: float = option(
        30.0, read_seconds, "duration of the lease that protects the blocks of a queued load from eviction"
    )
    load_timeout: float = option(
        10.0,
        read_seconds,
        "longest time that a forward waits for a load; then the load has failed, and SGLang aborts its requests",
    )
    reset_timeout: float = option(
        30.0,
        read_seconds,
        "longest time that flush_cache and a weight update wait for stores; then the daemon counts as hung and is "
        "given up",
    )
    tool_tokens: tuple[int, ...] = option(
        (),
        read_token_ids,
        "ids of the tokens that begin a call of a tool, such as [151657] for Qwen's <tool_call>; after an answer with "
        "one of them, a request's tool_pause counts instead of its pause",
    )
    residency: bool = option(
        True,
        read_flag,
        "with KV events: announce the pages that the daemon holds, whichever engine stored them, and its evictions",
    )
    publisher: bool = option(
        False,
        read_flag,
        "`kvsidecar publish` tells routers about the daemon's pages: send it the tokens as notes, which needs KV "
        "events, and announce none of these pages in them",
    )
    local_protocol: bool = option(True, read_flag, "use the local protocol instead of gRPC, if the daemon offers it")

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Options:
        """Read ``linker_extra_config``.

        Raises:
            ValueError: an option is unknown or has a bad value.
        """
        options = cls(**read_options(cls, extra, PLACE))
        if options.load_chunks < 1:
            raise ValueError(f"{PLACE}.load_chunks is {options.load_chunks!r}: it must be 1 or more")
        if options.lease_seconds < options.load_timeout:
            raise ValueError(
                f"{PLACE}.lease_seconds is {options.lease_seconds!r}: it must not be less than load_timeout "
                f"({options.load_timeout:g} s), or the blocks could be evicted before they are loaded"
            )
        return options
