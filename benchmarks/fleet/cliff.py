"""How hits fall where sessions no longer fit a pool: by how many run at once, and the picture of it on the README.

    python -m benchmarks.fleet.cliff --agentic agentic.jsonl.xz --json FILE --plot FILE.svg
    python -m benchmarks.fleet.cliff --show FILE --plot FILE.svg

Replays recorded sessions (`kvsidecar.cli.size.agentic` has the format) over a pool of --pool-tokens as
`python -m benchmarks.fleet --agentic --store-tokens 8192` does: with LRU, with --eviction rhythm, and with one that
knows what comes, which no policy can exceed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet.policies import CLAIRVOYANT, POLICIES, Prefill, Task, run_policy
from kvsidecar.cli.size.agentic import SessionReplay
from kvsidecar.cli.size.json_lines import BadFile
from kvsidecar.types import Eviction

SESSIONS: Final = (8, 12, 16, 24, 32, 48)
POOL_TOKENS: Final = 1_000_000
STORE_TOKENS: Final = 8192
HOURS: Final = 2.0
PREFILL: Final = Prefill(15_000.0, 100_000.0)

WIDTH, HEIGHT = 880, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 250, 56, 64
LINES: Final[dict[str, tuple[str, str]]] = {
    CLAIRVOYANT: ("soft", "what is possible"),
    Eviction.RHYTHM: ("store", "--eviction rhythm"),
    Eviction.LRU: ("load", "LRU"),
}
"""By policy: the class of its line, and what it is called."""
STYLE: Final = """
svg { --back: #ffffff; --line: #cfd6e1; --text: #1d2430; --soft: #5b6577; --store: #c2560b; --load: #1565c0; }
@media (prefers-color-scheme: dark) {
  svg { --back: #14181f; --line: #3a4453; --text: #e8ecf3; --soft: #a9b3c4; --store: #ff9a4d; --load: #6cb2ff; }
}
.back { fill: var(--back); }
.grid { stroke: var(--line); }
path { fill: none; stroke-width: 3; }
path.soft { stroke: var(--soft); stroke-dasharray: 7 5; } path.store { stroke: var(--store); }
path.load { stroke: var(--load); }
circle.soft { fill: var(--soft); } circle.store { fill: var(--store); } circle.load { fill: var(--load); }
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--text); }
text { font-size: 15px; }
text.title { font-weight: 600; font-size: 17px; } text.name { font-weight: 600; }
text.soft { fill: var(--soft); } text.store { fill: var(--store); } text.load { fill: var(--load); }
"""


def measure(trace: Path, sessions: list[int], pool_tokens: int, hours: float, jobs: int) -> dict[str, Any]:
    """Hits of every policy for each number of sessions."""
    names = [*POLICIES, CLAIRVOYANT]
    tasks = [
        Task(SessionReplay(trace, count, hours), name, pool_tokens, PREFILL, STORE_TOKENS)
        for count in sessions
        for name in names
    ]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as processes:
        found = [row["hits"] for row in processes.map(run_policy, tasks)]
    hits = {name: found[number :: len(names)] for number, name in enumerate(names)}
    return {"schema": 1, "trace": trace.name, "hours": hours, "pool_tokens": pool_tokens, "sessions": sessions, **hits}


def svg(result: dict[str, Any]) -> str:
    """The picture, for light and dark pages."""
    return "\n".join(_parts(result)) + "\n"


def _parts(result: dict[str, Any]) -> Iterator[str]:
    sessions, pool = result["sessions"], result["pool_tokens"]
    said = "; ".join(
        f"{title} {', '.join(f'{100 * share:.0f} %' for share in result[name])}" for name, (_, title) in LINES.items()
    )
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">'
    yield '<title id="t">Hits of coding agents, by how many are at work</title>'
    yield f'<desc id="d">With {", ".join(map(str, sessions))} sessions at once: {said}.</desc>'
    yield f"<style>{STYLE}</style>"
    yield f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    yield f'<text class="title" x="{LEFT}" y="30">Prompt tokens that hit, with a pool of {pool / 1e6:g} M tokens</text>'
    for percent in range(0, 101, 25):
        y = _y(percent / 100)
        yield f'<path class="grid" style="stroke-width: 1" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="soft" x="{LEFT - 10}" y="{y + 5:.1f}" text-anchor="end">{percent} %</text>'
    for count in sessions:
        x, y = _x(count, sessions), HEIGHT - BOTTOM + 24
        yield f'<text class="soft" x="{x:.1f}" y="{y}" text-anchor="middle">{count}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="soft" x="{middle:.0f}" y="{HEIGHT - 14}" text-anchor="middle">coding agents at work</text>'
    ends = _apart({name: _y(result[name][-1]) for name in LINES})
    for name, (kind, title) in LINES.items():
        points = [(_x(count, sessions), _y(share)) for count, share in zip(sessions, result[name], strict=True)]
        yield f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'
        yield from (f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>' for x, y in points)
        x, share = points[-1][0] + 14, 100 * result[name][-1]
        yield f'<text class="name {kind}" x="{x:.1f}" y="{ends[name] + 5:.1f}">{share:.0f} % {title}</text>'
    yield "</svg>"


def _x(count: int, sessions: list[int]) -> float:
    return LEFT + 20 + (WIDTH - LEFT - RIGHT - 20) * (count - sessions[0]) / (sessions[-1] - sessions[0])


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _apart(heights: dict[str, float], least: float = 20.0) -> dict[str, float]:
    """The same heights, moved down so that texts there do not touch."""
    found = dict(sorted(heights.items(), key=lambda item: item[1]))
    for above, below in pairwise(found):
        found[below] = max(found[below], found[above] + least)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--agentic", type=Path, help="recorded sessions to replay")
    source.add_argument("--show", type=Path, help="a file of --json, instead")
    parser.add_argument("--sessions", default=",".join(map(str, SESSIONS)), help="at once, comma-separated")
    parser.add_argument("--pool-tokens", type=int, default=POOL_TOKENS)
    parser.add_argument("--hours", type=float, default=HOURS, help="of which the first half hour is not counted")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="file for the picture, an SVG")
    options = parser.parse_args()
    if options.show:
        result = json.loads(options.show.read_text())
    else:
        sessions = [int(each) for each in options.sessions.split(",")]
        try:
            result = measure(options.agentic, sessions, options.pool_tokens, options.hours, options.jobs)
        except BadFile as error:
            parser.error(str(error))
    print("sessions", *result["sessions"], sep="\t")
    for name in LINES:
        print(name, *(f"{share:.3f}" for share in result[name]), sep="\t")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(svg(result))


if __name__ == "__main__":
    main()
