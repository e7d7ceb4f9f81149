"""One screen of `kvsidecar top`, as a pure function of the observations."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvsidecar.cli.status_figures import Rates, Worth, busiest, hit_rate, jobs_now, share_details, short_device
from kvsidecar.cli.status_view import BAR_WIDTH, brief, head, pool_bar, rank_cells, tier_bar
from kvsidecar.protocol.wire import STATE_FROM_WIRE
from kvsidecar.support.units import format_duration, format_rate, format_size
from kvsidecar.types import State
from kvsidecar.v1 import sidecar_pb2 as pb

_LABEL = 8
_SPARKS = "▁▂▃▄▅▆▇█"
_RATE_COLUMNS = 11
_TOTAL_COLUMNS = 33
"""Width of the totals. The sparkline gets the rest of the line, if it is wide enough."""
_SPARKLINE_COLUMNS = 8
_CELL_COLUMNS = 14
"""Width of a number or a GPU. The engine's name gets the rest of the line, and at least a third."""


@dataclass(frozen=True, slots=True)
class Screen:
    reply: pb.StatusReply | None
    """The last reply; None if there was none."""
    rates: Rates | None
    """None until there are two replies of one run of the daemon."""
    history: Sequence[tuple[float, float]]
    """Bytes stored and loaded per second, oldest first."""
    lost_for: float | None
    """Seconds since the daemon stopped answering; None if it answers."""
    lost_reason: str = ""
    restarts: int = 0
    """Restarts of the daemon since top started."""
    worth: Worth | None = None
    """Worth of a loaded token; None: unknown."""


SAVED_HEIGHT = 16
"""Lines of a terminal from which on the savings are shown."""
TIERS_HEIGHT = 20
"""Lines of a terminal from which on the tiers are shown."""
SHARES_HEIGHT = 24
"""Lines of a terminal from which on the shares are shown."""
PRINTED_HEIGHT = 10_000
"""The height in lines of a screen that is printed rather than kept in a terminal: everything has room."""
SHARES_SHOWN = 4


def render(screen: Screen, width: int, height: int) -> RenderableType:
    """The screen, fitted to ``width`` columns and ``height`` lines; it needs at least 40 and 15."""
    reply = screen.reply
    lines = [] if screen.lost_for is None else _lost(screen)
    if reply is None:
        return Group(*map(_cut, lines))
    bar = max(8, min(BAR_WIDTH, width - 40))
    lines += _head(screen, reply, width, height)
    if STATE_FROM_WIRE[reply.readiness.state] is State.PINNING:
        lines.append(_pin_bar(reply.readiness, bar))
    lines += pool_bar(reply, bar).split("\n")
    for tier in reply.tiers if height >= TIERS_HEIGHT else ():
        lines += tier_bar(tier, bar).split("\n")
    if reply.shares and height >= SHARES_HEIGHT:
        lines += _shares(reply.shares)
    lines += [Text(), *_flow(screen, reply, width, height)]
    if reply.refusals:
        lines.append(_refusals(reply, screen.rates))
    lines.append(Text())
    if not reply.ranks:
        lines.append(Text("No engine is attached.", style="dim"))
        return Group(*map(_cut, lines))
    # One line is for the heading, one for the number of ranks that are not shown.
    return Group(*map(_cut, lines), _engines(reply, screen.rates, width, max(1, height - len(lines) - 2)))


def _cut(text: Text) -> Text:
    """Truncate to one line."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _label(name: str, now: str = "") -> Text:
    """The beginning of a line, with the current rate."""
    return Text(f"{name:<{_LABEL}}{now:>{_RATE_COLUMNS if now else 0}}", style="bold")


def _lost(screen: Screen) -> list[Text]:
    stale = "" if screen.reply is None else "; its last answer is shown below"
    since = f"No answer for {format_duration(screen.lost_for or 0)}{stale}. Retrying."
    return [Text(since, style="bold red"), Text(f"  {screen.lost_reason}", style="red")]


def _head(screen: Screen, reply: pb.StatusReply, width: int, height: int) -> list[Text]:
    restarted = f"  restarted {screen.restarts}x since top started" if screen.restarts else ""
    text = head(reply, note=restarted).split("\n")[0]
    reason = reply.readiness.reason
    if not reason or STATE_FROM_WIRE[reply.readiness.state] is State.PINNING:
        return [text]
    if height < SAVED_HEIGHT:
        return [text.append(f"  {reason}", style="yellow")]
    most = 3 if height < PRINTED_HEIGHT else None
    lines = textwrap.wrap(reason, max(8, width - 4), max_lines=most, placeholder=" …", break_on_hyphens=False)
    return [text, *(Text(f"  {line}", style="yellow") for line in lines)]


def _pin_bar(readiness: pb.Readiness, width: int) -> Text:
    share = readiness.pinned_bytes / readiness.pool_bytes if readiness.pool_bytes else 0.0
    filled = round(share * width)
    text = Text.assemble(
        "Pin   ", ("█" * filled, "yellow"), ("░" * (width - filled), "dim"),
        f"  {share:.0%}, {format_rate(readiness.pin_bytes_per_second)}",
    )  # fmt: skip
    if readiness.HasField("eta_seconds"):
        text.append(f", {format_duration(readiness.eta_seconds)} left")
    return text


def _shares(shares: Sequence[pb.ShareStatus]) -> list[Text]:
    """One line for each of the largest shares."""
    shown = [Text.assemble((each.name, "cyan"), f"  {share_details(each)}") for each in shares[:SHARES_SHOWN]]
    if more := len(shares) - len(shown):
        shown.append(Text(f"and {more} with less: kvsidecar status", style="dim"))
    return [_label("" if number else "Shares").append(line) for number, line in enumerate(shown)]


def _flow(screen: Screen, reply: pb.StatusReply, width: int, height: int) -> list[Text]:
    """One line each for stores, loads, hits, what they save, and jobs."""
    rates, jobs = screen.rates, reply.jobs
    columns = min(60, width - _LABEL - _RATE_COLUMNS - _TOTAL_COLUMNS)
    lines = []
    for name, index, rate, done, total in (
        ("Store", 0, None if rates is None else rates.stored_bytes, jobs.stores_done, jobs.stored_bytes),
        ("Load", 1, None if rates is None else rates.loaded_bytes, jobs.loads_done, jobs.loaded_bytes),
    ):
        line = _label(name, "-" if rate is None else format_rate(rate))
        if columns >= _SPARKLINE_COLUMNS:
            line.append("  " + _sparkline([each[index] for each in screen.history], columns), style="cyan")
        line.append(f"  {format_size(total)} in {done:,} {'job' if done == 1 else 'jobs'}", style="dim")
        lines.append(line)
    lines.append(_hits(reply, rates, width))
    if height >= SAVED_HEIGHT:
        lines.append(_saved(screen, jobs))
    lines.append(_jobs(jobs))
    return lines


def _sparkline(values: Sequence[float], columns: int) -> str:
    """The last ``columns`` values relative to the highest; right-aligned."""
    shown = list(values)[-columns:]
    highest = max(shown, default=0.0)
    line = "".join(
        " " if value <= 0 else _SPARKS[min(len(_SPARKS) - 1, int(value / highest * len(_SPARKS)))] for value in shown
    )
    return f"{line:>{columns}}"


def _hits(reply: pb.StatusReply, rates: Rates | None, width: int) -> Text:
    now = None if rates is None else rates.hit_rate
    line = _label("Hits", "-" if now is None else f"{now:.0%}")
    if rates is not None and now is not None:
        line.append(f"  of {rates.needed_tokens:,.0f} tokens/s")
    if rates is not None and rates.evicted_bytes:
        line.append(f"  evicting {format_rate(rates.evicted_bytes)}", style="yellow")
    needed = reply.lookups.needed_tokens
    all_in_all = hit_rate(reply.lookups.loaded_tokens, needed)
    if all_in_all is None:
        return line.append("  no prompt so far", style="dim")
    longest, shortest = f"  {all_in_all:.0%} of {needed:,} tokens so far", f"  {all_in_all:.0%} so far"
    return line.append(longest if line.cell_len + len(longest) <= width else shortest, style="dim")


def _saved(screen: Screen, jobs: pb.JobsStatus) -> Text:
    """Prompt tokens that were loaded instead of computed."""
    now = None if screen.rates is None else screen.rates.loaded_tokens
    line = _label("Saved", "-" if now is None else f"{now:,.0f}")
    line.append("  tokens/s")
    if screen.worth is not None and now:
        line.append(f", {screen.worth.hourly(now)}", style="green")
    line.append(f"  {jobs.loaded_tokens:,} tokens so far", style="dim")
    if screen.worth is not None and jobs.loaded_tokens:
        line.append(f", {screen.worth.of(jobs.loaded_tokens)}", style="dim")
    return line


def _jobs(jobs: pb.JobsStatus) -> Text:
    line = _label("Jobs", jobs_now(jobs))
    if jobs.oldest_inflight_seconds:
        old = jobs.oldest_inflight_seconds
        line.append(f", oldest {format_duration(old)}", style="yellow" if old > 1 else "")
    return line


def _refusals(reply: pb.StatusReply, rates: Rates | None) -> Text:
    line = _label("Refused")
    new = {} if rates is None else rates.refusals
    for number, (reason, count) in enumerate(sorted(reply.refusals.items(), key=lambda item: -item[1])):
        line.append(", " if number else "")
        line.append(f"{reason} {count:,}")
        if reason in new:
            line.append(f" (+{new[reason]:,})", style="yellow")
    return line


def _engines(reply: pb.StatusReply, rates: Rates | None, width: int, lines: int) -> RenderableType:
    wanted: list[tuple[str, int]] = [("engine", 0), ("rank", 0), ("store", 0), ("load", 0), ("jobs", 0)]
    wanted += [("device", 70), ("mapped", 80), ("attached", 100), ("pid", 110)]
    names = [name for name, least in wanted if width >= least]
    table = Table(box=None, pad_edge=False, header_style="dim", show_edge=False)
    for index, name in enumerate(names):
        # The engine's name is truncated before any number.
        cut = {"overflow": "ellipsis", "no_wrap": True}
        table.add_column(name, justify="left" if index == 0 else "right", **cut)  # type: ignore[arg-type]
    room = max(width // 3, width - _CELL_COLUMNS * (len(names) - 1))
    by_rank = {} if rates is None else rates.ranks

    left_out = max(len(reply.ranks), reply.totals.ranks) - min(len(reply.ranks), lines)
    for rank in busiest(reply, rates, lines):
        stored, loaded = by_rank.get(rank.session, (None, None))
        cells = rank_cells(rank, room) | {
            "store": Text("-" if stored is None else format_rate(stored)),
            "load": Text("-" if loaded is None else format_rate(loaded)),
            "device": brief(short_device(rank.device), _CELL_COLUMNS),
        }
        table.add_row(*(cells[name] for name in names))
    if not left_out:
        return table
    return Group(table, _cut(Text(f"and {left_out} less busy: kvsidecar engines lists all", style="dim")))
