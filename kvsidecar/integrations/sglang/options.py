"""The linker's options in ``linker_extra_config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvsidecar.integrations.options import CommonOptions, option, read_count, read_flag, read_seconds, read_text
from kvsidecar.support.units import parse_size


def _load_chunks(value: Any) -> int:
    if (chunks := read_count(value)) < 1:
        raise ValueError("it must be 1 or more")
    return chunks


@dataclass(frozen=True, slots=True)
class LinkerOptions(CommonOptions):
    """The options of all engines, and the linker's own."""

    PLACE: ClassVar = "linker_extra_config"

    instance: str = option("sglang", read_text, "name of this engine deployment in the daemon's log and status")
    load_chunks: int = option(
        6,
        _load_chunks,
        "number of jobs, by layers, in which KV is loaded: the forward begins when the first part is there, which is "
        "the smallest",
    )
    staging: int | None = option(
        None,
        parse_size,
        "GPU memory, such as 512MiB, by way of which pages are loaded whose pieces are small: those of one token, and "
        "those of 64 with several ranks, for example; 0: none, they are loaded directly, which is slower. By default "
        "1GiB where it helps, and at most an eighth of the GPU's free memory",
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
