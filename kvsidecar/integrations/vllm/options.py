"""The connector's options in ``kv_connector_extra_config``."""

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


def _store_mode(value: Any) -> str:
    if value not in ("eager", "lazy"):
        raise ValueError('it must be "eager" or "lazy"')
    return str(value)


@dataclass(frozen=True, slots=True)
class Options:
    """Every option with its default. Times are in seconds."""

    socket: str | None = option(
        None, read_text, "path of the daemon's socket; default: $KVSIDECAR_SOCKET, otherwise the daemon's default"
    )
    instance: str = option("vllm", read_text, "name of this engine deployment in the daemon's log and status")
    model_name: str | None = option(
        None,
        read_text,
        "name of the model in `status` and policies; engines share blocks only if their names are equal",
    )
    store_mode: str = option(
        "eager",
        _store_mode,
        "eager: store blocks when their tokens are confirmed; lazy: store them when they are hit, when the engine is "
        "idle, or when the GPU is about to evict them",
    )
    store_interval: float = option(
        0.25, read_seconds, "eager mode: longest time that blocks of running requests wait to be stored together"
    )
    store_prompt_only: bool = option(False, read_flag, "eager mode: store only the blocks of prompts, not of answers")
    kv_hints: bool = option(
        True, read_flag, "follow the KV hints that routers send with a request: retain, pin and demote its blocks"
    )
    tool_tokens: tuple[int, ...] = option(
        (),
        read_token_ids,
        "ids of the tokens that begin a tool call, such as [151657] for Qwen's <tool_call>; after an answer with "
        "one of them, a request's tool_pause counts instead of its pause",
    )
    request_priority: bool = option(
        False,
        read_flag,
        "blocks of requests whose priority is below 0 are evicted after, and above 0 before, others of their share",
    )
    lazy_watermark: int = option(
        0,
        read_count,
        "lazy mode: how many of the blocks next in line for eviction are stored ahead; 0: twice what one step can need",
    )
    lookup_budget: float = option(0.005, read_seconds, "longest time that one scheduler step may wait for the daemon")
    lookup_patience: float = option(
        0.1,
        read_seconds,
        "longest time that a request is held back while the daemon does not answer; then it runs without a hit. "
        "Lookups of more than 2,048 hashes get proportionally more",
    )
    fetch_patience: float = option(
        1.0,
        read_seconds,
        "longest time that a request waits for blocks that the daemon fetches from a slower tier, such as a disk",
    )
    prefill_rate: int = option(
        0,
        read_count,
        "tokens that this engine computes per second, to decide which blocks are worth fetching; 0: the daemon's "
        "estimate",
    )
    lease_seconds: float = option(
        60.0,
        read_seconds,
        "duration of the lease that protects the blocks of a hit from eviction until they are loaded",
    )
    load_timeout: float = option(30.0, read_seconds, "a load that has not started after this time fails")
    weights_version: str | None = option(
        None, read_text, "name of the weights at the start; engines share blocks only if their names are equal"
    )
    weights_version_file: str | None = option(
        None, read_text, "file that contains the name of the weights; it is read at each reset"
    )
    residency: bool = option(
        True,
        read_flag,
        "with KV events: announce the blocks that the daemon holds, whichever engine stored them, and its evictions",
    )
    publisher: bool = option(
        False,
        read_flag,
        "`kvsidecar publish` tells routers about the daemon's blocks: send it the tokens as notes, and announce none "
        "of these blocks in this engine's own KV events",
    )
    local_protocol: bool = option(True, read_flag, "use the local protocol instead of gRPC, if the daemon offers it")

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Options:
        """Read ``kv_connector_extra_config``.

        Raises:
            ValueError: an option is unknown or has a bad value.
        """
        options = cls(**read_options(cls, extra, "kv_connector_extra_config"))
        if options.lease_seconds < options.load_timeout:
            raise ValueError(
                f"kv_connector_extra_config.lease_seconds is {options.lease_seconds!r}: it must not be less than "
                f"load_timeout ({options.load_timeout:g} s), or the blocks could be evicted before they are loaded"
            )
        return options
