"""Whether constants of ``--eviction rhythm`` that are chosen by some sessions hold for others.

    python -m benchmarks.fleet.cross_validate --agentic FILE [--seeds 0,1] [--json FILE] [--jobs 1]

Each setting, the shipped one, others in which one constant differs, and others in which all do, replays each half of a
file's sessions, as `python -m benchmarks.fleet --agentic FILE --half H --store-tokens 8192 --policy rhythm` does, with
all numbers of sessions and pools of --cells and all --seeds. By the mean of these hits a setting is chosen on each half
and judged on the other, beside the one that is best there, the shipped one, LRU, and what is possible. No session is in
both halves. With --json the hits are written as they come, and what the file has is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Final
from unittest.mock import patch

from benchmarks.fleet.__main__ import counts, tokens
from benchmarks.fleet.policies import CLAIRVOYANT, Prefill, Task, run_policy
from kvsidecar.cache import eviction_rhythm
from kvsidecar.cache.eviction_rhythm import CLEARLY, FIRST_GAP, PATIENCE, STEPS
from kvsidecar.cli.size.agentic import SessionReplay
from kvsidecar.cli.size.hits import STEP_TOKENS
from kvsidecar.types import Eviction

LRU: Final = str(Eviction.LRU)
SHIPPED: Final = "as shipped"
USUAL_GAP: Final = FIRST_GAP / STEPS
"""In classes: where all slopes of the patience meet."""


def patience(slope: float, scale: float = 1.0) -> tuple[float, ...]:
    """Patiences that grow with this power of the gap; that of a usual gap is so many times as long as it is."""
    return tuple(scale * each * 2.0 ** ((slope - 0.5) * (number - USUAL_GAP)) for number, each in enumerate(PATIENCE))


def corner(patient: int, steep: int, clearly: int) -> dict[str, Any]:
    """A setting of which no constant has the shipped value: of each 0 is a low one, and 1 a high one."""
    until = (0.9, 0.75)[patient ^ steep]
    return {
        "PATIENCE": patience((0.35, 0.65)[steep], (0.7, 1.4)[patient]),
        "CLEARLY": (1.15, 1.6)[clearly],
        "ENOUGH": until,
        "TOO_LITTLE": until - 0.05,
        "LATE_POOLS": (4.0, 16.0)[patient ^ clearly],
    }


ONE_DIFFERS: Final[dict[str, dict[str, Any]]] = {
    SHIPPED: {"CLEARLY": CLEARLY},
    "patience halved": {"PATIENCE": patience(0.5, 0.5)},
    "patience doubled": {"PATIENCE": patience(0.5, 2.0)},
    "patience by gap^0.35": {"PATIENCE": patience(0.35)},
    "patience by gap^0.65": {"PATIENCE": patience(0.65)},
    "LRU from 0.75 to 0.7": {"ENOUGH": 0.75, "TOO_LITTLE": 0.7},
    "LRU from 0.95 to 0.9": {"ENOUGH": 0.95, "TOO_LITTLE": 0.9},
    "CLEARLY 1.1": {"CLEARLY": 1.1},
    "CLEARLY 2": {"CLEARLY": 2.0},
    "LATE_POOLS 4": {"LATE_POOLS": 4.0},
    "LATE_POOLS 16": {"LATE_POOLS": 16.0},
}
ALL_DIFFER: Final = {f"corner {''.join(map(str, levels))}": corner(*levels) for levels in product((0, 1), repeat=3)}
SETTINGS: Final = {**ONE_DIFFERS, **ALL_DIFFER}
"""The constants that are set."""
GROUPS: Final = {"of all settings": SETTINGS, "of those in which all constants differ": ALL_DIFFER}
"""Of each, one setting is chosen. In the first most constants have values that were chosen on all sessions."""
Run = tuple[int, int, str, str]
"""Seed, half, cell, and the setting, or another policy."""


def hits(run: Run, path: Path, hours: float) -> float:
    """Of one run. For a process of its own."""
    seed, half, cell, name = run
    sessions, pool = cell.split("/")
    policy = str(Eviction.RHYTHM) if name in SETTINGS else name
    source = SessionReplay(path, int(sessions), hours, seed, half)
    with patch.multiple(eviction_rhythm, **SETTINGS.get(name, SETTINGS[SHIPPED])):
        found: float = run_policy(Task(source, policy, tokens(pool), Prefill(1.0, 1.0), STEP_TOKENS))["hits"]
    return found


def report(found: dict[Run, float], cells: Iterable[str]) -> Iterable[str]:
    """What is printed. All runs of all settings are there."""

    def on(half: int, name: str, cell: str = "") -> float:
        return mean(each for key, each in found.items() if key[1::2] == (half, name) and cell in ("", key[2]))

    for name in (LRU, *SETTINGS, CLAIRVOYANT):
        yield f"{name:22}" + "".join(f"  half {half}: {on(half, name):.4f}" for half in (1, 2))
    for (among, names), (half, other) in product(GROUPS.items(), ((1, 2), (2, 1))):
        chosen, best = (max(names, key=lambda name, by=by: on(by, name)) for by in (half, other))  # type: ignore[misc]
        yield f"\n{among}: chosen by half {half}: {chosen}; best on half {other}: {best}\non half {other}:"
        for cell in (*cells, ""):
            row = {"LRU": LRU, "shipped": SHIPPED, "chosen": chosen, "best": best, "possible": CLAIRVOYANT}
            yield f"{cell or 'mean':8}" + "".join(f"  {key} {on(other, name, cell):.4f}" for key, name in row.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agentic", type=Path, required=True, help="a file of recorded sessions")
    parser.add_argument("--cells", default="16/0.5M,32/1M,16/1M,32/2M", help="sessions at once / tokens of the pool")
    parser.add_argument("--hours", type=float, default=SessionReplay.hours)
    parser.add_argument("--seeds", type=counts, default="0,1")
    parser.add_argument("--json", type=Path, help="file for the hits of each run")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    cells = options.cells.split(",")
    runs = list(product(options.seeds, (1, 2), cells, (*SETTINGS, LRU, CLAIRVOYANT)))
    rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    found: dict[Run, float] = {(*run,): each for *run, each in rows}
    left = [run for run in runs if run not in found]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as processes:
        files, hours = [options.agentic] * len(left), [options.hours] * len(left)
        for run, each in zip(left, processes.map(hits, left, files, hours), strict=True):
            found[run] = each
            if options.json:
                lines = ",\n".join(json.dumps([*key, value]) for key, value in found.items())
                options.json.write_text(f"[\n{lines}\n]\n")
    print(*report({run: found[run] for run in runs}, cells), sep="\n")


if __name__ == "__main__":
    main()
