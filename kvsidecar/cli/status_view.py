"""The output of `kvsidecar status`; `kvsidecar top` shows some of its parts."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvsidecar.protocol.wire import STATE_FROM_WIRE
from kvsidecar.support.units import format_duration, format_rate, format_size
from kvsidecar.v1 import sidecar_pb2 as pb

STATE_COLORS = {"ready": "green", "pinning": "yellow", "starting": "yellow", "draining": "yellow", "failed": "red"}
BAR_WIDTH = 40
CELL = 96
"""Most characters of a client's text in a table cell; --json prints all of it."""
SHOWN = 32
"""Most namespaces and most engines that `kvsidecar status` lists."""


def print_status(reply: pb.StatusReply, console: Console | None = None) -> None:
    """Print a StatusReply to standard output, or to ``console``."""
    (console or Console()).print(render(reply))


def render(reply: pb.StatusReply) -> RenderableType:
    """A StatusReply, section by section; of very many namespaces only the largest."""
    parts: list[RenderableType] = [head(reply)]
    if reply.partial:
        parts.append(Text(f"Pool  {format_size(reply.pool.total_bytes)}"))
    else:
        parts.append(pool_bar(reply.pool))
    if reply.namespaces:
        parts.append(_namespaces(reply))
    parts.append(_ranks(reply) if reply.ranks else no_engine(reply))
    if reply.partial:
        parts.append(Text("\nOnly your own namespaces and engines are shown. Admins see all.", style="dim"))
        return Group(*parts)
    parts.append(_jobs(reply))
    if reply.refusals:
        parts.append(_refusals(reply))
    return Group(*parts)


def head(reply: pb.StatusReply) -> Text:
    """State, version, uptime, and the reason if the daemon is not ready."""
    state = STATE_FROM_WIRE[reply.readiness.state].value
    text = Text.assemble(
        "kvsidecar ", (state, f"bold {STATE_COLORS[state]}"),
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


def pool_bar(pool: pb.PoolStatus, width: int = BAR_WIDTH) -> Text:
    """Two lines: a bar of ``width`` columns with the bytes used, and the details."""
    bar = Text("Pool  ")
    filled = 0
    for nbytes, style in (
        (pool.leased_bytes, "cyan"),
        (pool.used_bytes - pool.leased_bytes, "blue"),
        (pool.reserved_bytes, "yellow"),
        (pool.quarantined_bytes, "red"),
    ):
        part = round(nbytes / pool.total_bytes * width) if pool.total_bytes else 0
        part = min(max(part, 1 if nbytes else 0), width - filled)
        bar.append("█" * part, style=style)
        filled += part
    bar.append("░" * (width - filled), style="dim")
    bar.append(f"  {format_size(pool.used_bytes)} of {format_size(pool.total_bytes)} used")
    details = [f"{pool.blocks} blocks", f"{format_size(pool.leased_bytes)} under {pool.leases} leases"]
    details += [f"{format_size(pool.reserved_bytes)} reserved"] if pool.reserved_bytes else []
    details += [f"{format_size(pool.quarantined_bytes)} quarantined"] if pool.quarantined_bytes else []
    details += [f"{pool.page_kind} pages"] if pool.page_kind else []
    details += [f"NUMA nodes {', '.join(map(str, pool.numa_nodes))}"] if len(pool.numa_nodes) > 1 else []
    bar.append("\n      " + ", ".join(details), style="dim")
    return bar


def printable(text: str) -> Text:
    """A client's text without control characters, which could manipulate the operator's terminal."""
    return Text("".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text))


def brief(text: str, columns: int = CELL) -> Text:
    """A client's text cut to a table cell: it may have a thousand characters."""
    return printable(text if len(text) <= columns else text[: columns - 1] + "…")


def plain_table(title: str | None, *columns: str) -> Table:
    """A table without rules; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def no_engine(reply: pb.StatusReply) -> Text:
    return Text("No engine of yours is attached." if reply.partial else "No engine is attached.", style="dim")


def and_more(left_out: int, where: str) -> Text:
    """The line under a list that is not complete."""
    return Text(f"and {left_out} more: {where}", style="dim")


def _namespaces(reply: pb.StatusReply) -> RenderableType:
    table = plain_table("\nNamespaces", "model", "layout", "tokens/block", "tp x pp", "blocks", "size", "hit rate")
    shown = sorted(reply.namespaces, key=lambda each: -each.bytes)[:SHOWN]
    for each in shown:
        asked = each.hits + each.misses
        table.add_row(
            brief(each.namespace.model),
            brief(f"{each.namespace.dtype} {each.namespace.kv_layout}", CELL // 2),
            str(each.namespace.block_size),
            f"{each.namespace.tp_size} x {each.namespace.pp_size}",
            str(each.blocks),
            format_size(each.bytes),
            f"{each.hits / asked:.0%}" if asked else "-",
        )
    left_out = reply.totals.namespaces - len(shown)
    return Group(table, and_more(left_out, "kvsidecar status --json lists all")) if left_out > 0 else table


def _ranks(reply: pb.StatusReply) -> RenderableType:
    table = plain_table("\nEngines", "instance", "rank", "device", "pid", "mapped", "jobs", "attached for")
    shown = sorted(reply.ranks, key=lambda rank: (rank.instance, rank.rank))[:SHOWN]
    for rank in shown:
        table.add_row(
            brief(rank.instance),
            f"{rank.rank}/{rank.world_size}",
            brief(rank.device),
            str(rank.pid),
            format_size(rank.imported_bytes),
            str(rank.jobs_running),
            format_duration(rank.attached_seconds),
        )
    left_out = reply.totals.ranks - len(shown)
    return Group(table, and_more(left_out, "kvsidecar engines lists all")) if left_out > 0 else table


def _jobs(reply: pb.StatusReply) -> RenderableType:
    jobs = reply.jobs
    text = Text("\n")
    text.append("Jobs  ", style="bold")
    text.append(
        f"{jobs.running} running, {jobs.queued} queued"
        + (f", oldest {format_duration(jobs.oldest_inflight_seconds)}" if jobs.oldest_inflight_seconds else "")
        + f"; done: stores {jobs.stores_done} ({format_size(jobs.stored_bytes)}), "
        f"loads {jobs.loads_done} ({format_size(jobs.loaded_bytes)})"
    )
    return text


def _refusals(reply: pb.StatusReply) -> RenderableType:
    listed = ", ".join(f"{reason} {count}" for reason, count in sorted(reply.refusals.items()))
    return Text.assemble(("Refused  ", "bold"), listed)
