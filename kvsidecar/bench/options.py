"""The options of `kvsidecar bench`, validated before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvsidecar.bench.errors import BadOption
from kvsidecar.bench.layouts import ALL_LAYOUTS
from kvsidecar.support.units import MiB, parse_size

MEASUREMENTS = {
    "limit": "the bulk limit: one large copy each way, and both at once",
    "verify": "every layout stored, loaded elsewhere, and compared byte for byte",
    "bandwidth": "store and load of each layout, by blocks and jobs in flight, one and both directions",
    "lookup": "lookup latency by number of hashes",
    "submit": "what a store, a load and an empty poll cost the engine's thread",
    "jobs": "one-block jobs per second, 1 to 8 ranks",
    "scaling": "all GPUs together, stores and loads at once: GB/s by number of GPUs",
    "token": "an engine's 4 KiB device-to-host copy while the daemon stores and loads",
    "pin": "an engine's steps while a daemon pins its pool, and how fast it pins",
}
"""Name and subject of each measurement, in the order in which they run."""

USUAL_SECONDS: Mapping[tuple[str, bool], Mapping[str, float]] = {
    ("cuda", False): {  # benchmarks/results: H200 of 2026-11-21; scaling with two of them of 2026-11-22
        "limit": 1, "verify": 8, "bandwidth": 87, "lookup": 3, "submit": 3, "jobs": 26, "scaling": 37, "token": 12,
        "pin": 21,
    },
    ("host", False): {  # two cores, busy with other work
        "limit": 10, "verify": 21, "bandwidth": 151, "lookup": 26, "submit": 24, "jobs": 42, "scaling": 69,
        "token": 12, "pin": 12,
    },
    ("host", True): {
        "limit": 1, "verify": 6, "bandwidth": 43, "lookup": 1, "submit": 1, "jobs": 16, "scaling": 15, "token": 7,
        "pin": 7,
    },
}  # fmt: skip
"""How long each measurement took, by device and ``--quick``, to announce before a run how long it may take."""

MIN_POOL = 4 * MiB


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of ``kvsidecar bench``; see its ``--help``. Sizes in bytes."""

    device: str = "auto"
    socket: str | None = None
    pool_bytes: int | None = None
    pin_bytes: int | None = None
    only: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    """Names of the layouts; empty: those of the default run."""
    quick: bool = False
    repeat: int | None = None
    seed: int = 0
    json: str | None = None
    serve_flags: tuple[str, ...] = ()

    @classmethod
    def checked(
        cls, *, only: str | None, layouts: str | None = None, pool_size: str | None, pin_size: str | None = None,
        serve_flags: Iterable[str], measurements: Collection[str] = tuple(MEASUREMENTS), **rest: Any,
    ) -> BenchOptions:  # fmt: skip
        """The options from the command line, where ``only`` may name these measurements. Raises BadOption."""
        return cls(
            only=_names("--only", "measurement", only, measurements),
            layouts=_names("--layouts", "layout", layouts, [each.name for each in ALL_LAYOUTS]),
            pool_bytes=_size("--pool-size", pool_size),
            pin_bytes=_size("--pin-size", pin_size),
            serve_flags=tuple(serve_flags),
            **rest,
        )

    def __post_init__(self) -> None:
        if self.repeat is not None and not 1 <= self.repeat <= 1000:
            raise BadOption(f"--repeat={self.repeat} is not between 1 and 1000")
        if self.socket is not None:
            if self.pool_bytes is not None:
                raise BadOption("--pool-size is for a daemon that the benchmark starts: leave out --socket")
            if self.serve_flags:
                raise BadOption(
                    f"{self.serve_flags[0]!r} is for a daemon that the benchmark starts: leave out --socket"
                )
        if self.json not in (None, "-") and not Path(self.json or "").absolute().parent.is_dir():
            raise BadOption(f"--json={self.json!r}: there is no such directory")

    def to_json(self) -> dict[str, Any]:
        """The options that affect the results. The output file and the socket say something only about the machine."""
        fields = asdict(self)
        for name in ("json", "socket"):
            del fields[name]
        return {**fields, "private_daemon": self.socket is None}


def _names(flag: str, noun: str, text: str | None, known: Collection[str]) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise BadOption(f"{flag} names no {noun}")
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use some of {', '.join(known)}"
            raise BadOption(f"{flag}={name!r} is not a {noun}: {hint}")
    return names


def _size(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise BadOption(f"{flag}={error}") from None
    if nbytes < MIN_POOL:
        raise BadOption(f"{flag}={text!r} is less than {MIN_POOL >> 20} MiB, too little to measure with")
    return nbytes
