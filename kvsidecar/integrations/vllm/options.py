"""The connector's options in ``kv_connector_extra_config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvsidecar.integrations.options import CommonOptions, option, read_count, read_flag, read_seconds, read_text


def _store_mode(value: Any) -> str:
    if value not in ("eager", "lazy"):
        raise ValueError('it must be "eager" or "lazy"')
    return str(value)


@dataclass(frozen=True, slots=True)
class ConnectorOptions(CommonOptions):
    """The options of all engines, and the connector's own."""

    PLACE: ClassVar = "kv_connector_extra_config"

    instance: str = option("vllm", read_text, "name of this engine deployment in the daemon's log and status")
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
    load_chunks: int = option(
        4,
        read_count,
        "number of jobs, by layers, in which an engine with nothing else to do loads a hit while it computes; 0: it "
        "computes a request after its load",
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
