"""The output of `kvsidecar status`, parts of which `kvsidecar top` and `kvsidecar engines` use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvsidecar.cli.status_figures import (
    has_pool,
    hit_rate,
    jobs_now,
    namespace_names,
    pool_details,
    short_device,
    tier_details,
)
from kvsidecar.protocol.wire import STATE_FROM_WIRE
from kvsidecar.support.units import format_duration, format_rate, format_size
from kvsidecar.v1 import sidecar_pb2 as pb

STATE_COLORS = {"ready": "green", "pinning": "yellow", "starting": "yellow", "draining": "yellow", "failed": "red"}
BAR_WIDTH = 40
CELL = 96
"""Maximum length of a client's text in a table cell; --json prints all of it."""
WIDE = 110
"""Columns of a terminal from which on more details of each namespace and engine are shown."""
SHOWN = 32
"""Maximum number of namespaces and of engines that `kvsidecar status` lists."""


def render(reply: pb.StatusReply, width: int) -> RenderableType:
    """A StatusReply in sections, with the largest namespaces only, for a terminal of ``width`` columns."""
    pool = Text(f"Pool  {format_size(reply.pool.total_bytes)}") if reply.partial else pool_bar(reply)
    parts: list[RenderableType] = [*map(_indented, [head(reply), pool, *map(tier_bar, reply.tiers)])]
    if reply.shares:
        parts.append(_shares("Shares", reply.shares))
    parts += [_shares(f"Shares of the {tier.name}", tier.shares) for tier in reply.tiers if tier.shares]
    if reply.namespaces:
        parts.append(_namespaces(reply, is_wide=width >= WIDE))
    parts.append(_ranks(reply) if reply.ranks else no_engine(reply))
    if reply.partial:
        parts.append(Text("\nOnly your own namespaces and engines are shown. Admins see all.", style="dim"))
        return Group(*parts)
    parts.append(_jobs(reply))
    if reply.refusals:
        parts.append(_refusals(reply))
    return Group(*parts)


def _indented(text: Text) -> RenderableType:
    """A text whose lines keep their indent where the terminal wraps them."""
    lines = []
    for line in text.split("\n"):
        indent = len(line.plain) - len(line.plain.lstrip(" "))
        lines.append(Padding(line[indent:], (0, 0, 0, indent), expand=False))
    return Group(*lines)


def head(reply: pb.StatusReply, note: str = "") -> Text:
    """State, version, uptime, and the reason if the daemon is not ready; a note behind the state."""
    state = STATE_FROM_WIRE[reply.readiness.state].value
    text = Text.assemble(
        "kvsidecar ", (state, f"bold {STATE_COLORS[state]}"), (note, "yellow"),
        f"  {reply.version} on {reply.backend}, up {format_duration(reply.uptime_seconds)}",
    )  # fmt: skip
    if reply.readiness.reason:
        text.append(f"\n  {reply.readiness.reason}", style=STATE_COLORS[state])
    if state == "pinning":
        readiness = reply.readiness
        text.append(
            f": {format_size(readiness.pinned_bytes)} of {format_size(readiness.pool_bytes)}"
            f" at {format_rate(readiness.pin_bytes_per_second)}"
        )
        if readiness.HasField("eta_seconds"):
            text.append(f", {format_duration(readiness.eta_seconds)} left")
    return text


def pool_bar(reply: pb.StatusReply, width: int = BAR_WIDTH) -> Text:
    """Two lines: a bar of ``width`` columns with the bytes used, and the details; one without a bar if no blocks can be
    in the pool."""
    pool, readiness = reply.pool, reply.readiness
    if not has_pool(readiness):
        return Text(f"Pool  {format_size(readiness.pinned_bytes)} of {format_size(readiness.pool_bytes)} pinned")
    parts = [
        (pool.leased_bytes, "cyan"),
        (pool.used_bytes - pool.leased_bytes, "blue"),
        (pool.reserved_bytes, "yellow"),
        (pool.quarantined_bytes, "red"),
        (pool.rounding_bytes, "bright_black"),
    ]
    bar = _bar("Pool", parts, pool.used_bytes, pool.total_bytes, width)
    for line in pool_details(pool):
        bar.append(f"\n      {line}", style="dim")
    return bar


def tier_bar(tier: pb.TierStatus, width: int = BAR_WIDTH) -> Text:
    """Two lines: a bar of ``width`` columns with the bytes used, and the details; or why the tier is off."""
    title = tier.name.capitalize()
    if tier.off:
        text = Text.assemble(f"{title:<5} ", ("off: ", "red"), printable(tier.off))
    else:
        text = _bar(title, [(tier.used_bytes, "blue")], tier.used_bytes, tier.capacity_bytes, width)
    return text.append(f"\n      {tier_details(tier)}", style="dim")


def _bar(title: str, parts: Iterable[tuple[int, str]], used: int, total: int, width: int) -> Text:
    bar, filled = Text(f"{title:<5} "), 0
    for nbytes, style in parts:
        part = round(nbytes / total * width) if total else 0
        part = min(max(part, 1 if nbytes else 0), width - filled)
        bar.append("█" * part, style=style)
        filled += part
    bar.append("░" * (width - filled), style="dim")
    return bar.append(f"  {format_size(used)} of {format_size(total)} used")


def printable(text: str) -> Text:
    """A client's text without control characters, which could manipulate the operator's terminal."""
    return Text("".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text))


def brief(text: str, columns: int = CELL) -> Text:
    """A client's text, truncated to fit a table cell."""
    return printable(text if len(text) <= columns else text[: columns - 1] + "…")


def plain_table(title: str | None, *columns: str) -> Table:
    """A table without lines; the first column is left-aligned, the others are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def no_engine(reply: pb.StatusReply) -> Text:
    return Text("No engine of yours is attached." if reply.partial else "No engine is attached.", style="dim")


def rank_cells(rank: pb.RankStatus, name_columns: int = CELL) -> dict[str, Text]:
    """The cells that a table may show for a rank, by column."""
    return {
        "engine": brief(rank.instance + (" (idle)" if rank.idle else ""), name_columns),
        "rank": Text(f"{rank.rank}/{rank.world_size}"),
        "device": brief(short_device(rank.device)),
        "pid": Text(str(rank.pid)),
        "mapped": Text(format_size(rank.imported_bytes)),
        "jobs": Text(str(rank.jobs_running)),
        "stored": Text(format_size(rank.stored_bytes)),
        "loaded": Text(format_size(rank.loaded_bytes)),
        "attached": Text(format_duration(rank.attached_seconds)),
        "model": brief(rank.served_name or rank.namespace.model),
    }


def _with_rest(table: Table, not_shown: int, command: str) -> RenderableType:
    """The table, and below it the number of entries that it does not show."""
    rest = Text(f"and {not_shown} more: {command} lists all", style="dim")
    return Group(table, rest) if not_shown > 0 else table


def _shares(title: str, shares: Sequence[pb.ShareStatus]) -> RenderableType:
    table = plain_table(f"\n{title}", "name", "used", "guaranteed", "max", "pinned", "evicted")
    for each in shares[:SHOWN]:
        table.add_row(
            each.name,
            format_size(each.used_bytes),
            format_size(each.guaranteed_bytes),
            format_size(each.max_bytes) if each.HasField("max_bytes") else "-",
            format_size(each.pinned_bytes),
            format_size(each.evicted_bytes),
        )
    return _with_rest(table, len(shares) - SHOWN, "kvsidecar status --json")


def _namespaces(reply: pb.StatusReply, *, is_wide: bool) -> RenderableType:
    columns = ["model", "tokens/block", "tp x pp", "blocks", "size", "hit rate", *(["layout"] if is_wide else [])]
    table = plain_table("\nNamespaces", *columns)
    named = zip(namespace_names(reply.namespaces), reply.namespaces, strict=True)
    shown = sorted(named, key=lambda each: -each[1].bytes)[:SHOWN]
    for name, each in shown:
        rate = hit_rate(each.loaded_tokens, each.needed_tokens)
        table.add_row(
            brief(name),
            str(each.namespace.block_size),
            f"{each.namespace.tp_size} x {each.namespace.pp_size}",
            f"{each.blocks:,}",
            format_size(each.bytes),
            "-" if rate is None else f"{rate:.0%}",
            *([brief(f"{each.namespace.dtype} {each.namespace.kv_layout}", CELL // 2)] if is_wide else []),
        )
    listed = _with_rest(table, reply.totals.namespaces - len(shown), "kvsidecar status --json")
    return Group(listed, *(_differs(name, each) for name, each in shown if each.differs))


def _differs(name: str, status: pb.NamespaceStatus) -> Text:
    """Why a namespace shares nothing with the largest of its model."""
    space = status.namespace
    text = Text.assemble(brief(name), ", ", brief(f"{space.dtype} {space.kv_layout}", CELL // 2))
    text.append(f", blocks: {status.blocks:,}, shares nothing with the largest namespace of this model. It differs in ")
    return text.append(Text(", ").join([brief(each) for each in status.differs])).append(".")


def _ranks(reply: pb.StatusReply) -> RenderableType:
    table = plain_table("\nEngines", "instance", "rank", "device", "pid", "mapped", "jobs", "attached for")
    shown = sorted(reply.ranks, key=lambda rank: (rank.instance, rank.rank))[:SHOWN]
    for rank in shown:
        cells = rank_cells(rank) | {"engine": brief(rank.instance), "device": brief(rank.device)}
        table.add_row(*(cells[column] for column in ("engine", "rank", "device", "pid", "mapped", "jobs", "attached")))
    return _with_rest(table, reply.totals.ranks - len(shown), "kvsidecar engines")


def _jobs(reply: pb.StatusReply) -> RenderableType:
    jobs = reply.jobs
    oldest = f", oldest {format_duration(jobs.oldest_inflight_seconds)}" if jobs.oldest_inflight_seconds else ""
    stores = f"stores {jobs.stores_done:,} ({format_size(jobs.stored_bytes)})"
    loads = f"loads {jobs.loads_done:,} ({format_size(jobs.loaded_bytes)})"
    return Text.assemble("\n", ("Jobs  ", "bold"), f"{jobs_now(jobs)}{oldest}; done: {stores}, {loads}")


def _refusals(reply: pb.StatusReply) -> RenderableType:
    listed = ", ".join(f"{reason} {count:,}" for reason, count in sorted(reply.refusals.items()))
    return Text.assemble(("Refused  ", "bold"), listed)
