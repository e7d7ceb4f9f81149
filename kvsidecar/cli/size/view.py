"""What `kvsidecar size` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group as Rows
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvsidecar.cli.size.kv import KV, KVKind
from kvsidecar.cli.size.plan import PASTED, Demand, Machine, Plan
from kvsidecar.support.units import count, format_duration, format_size


def render(
    kv: KV, demand: Demand, machine: Machine, found: Plan, hits: Mapping[str, float], assumed: Sequence[str]
) -> RenderableType:
    """The figures, what was assumed, and the lines to paste."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for row in rows(kv, demand, machine, found, hits):
        table.add_row(*row)
    parts: list[RenderableType] = [table]
    if assumed:
        parts.append(Text("\nAssumed: " + "; ".join(assumed) + ".", style="dim"))
    for where, make in PASTED.values():
        parts += [Text(f"\n# {where}", style="cyan"), Text(make(found))]
    return Rows(*parts)


def rows(kv: KV, demand: Demand, machine: Machine, found: Plan, hits: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Label and text of each figure."""
    yield "a token", f"{format_size(round(kv.token_bytes))} of context that is kept whole"
    for text in group_texts(kv):
        yield "blocks", text
    yield (
        "a session",
        f"{format_size(found.session_bytes)} in {count(found.session_blocks, 'block')}, for {demand.context:,} tokens",
    )
    yield "all sessions", f"{format_size(found.wanted_bytes)} for {demand.sessions:,}"
    sessions = f"{found.sessions_in_pool:,} of {count(demand.sessions, 'session')}"
    yield "pool", f"{format_size(found.pool_bytes)}, which keeps {sessions}"
    yield "disk", disk_text(demand, machine, found)
    yield (
        "memory limit",
        f"{format_size(found.memory_bytes)}: the pool, and what the daemon and {count(machine.gpus, 'copier')} need",
    )
    yield "huge pages", f"{found.huge_page_count} of 2 MiB, if the pool is to have its own (otherwise transparent ones)"
    yield "pinned after", pin_text(machine, found)
    for number, (size, share) in enumerate(hits.items()):
        yield "" if number else "hits", f"{share:.1%}{'' if number else ' of the prompt tokens'} with {size}"


def group_texts(kv: KV) -> Iterator[str]:
    """One text for groups that are equal."""
    seen: dict[tuple[KVKind, int, int, int], list[int]] = {}
    for each in kv.groups:
        seen.setdefault((each.kind, each.block_tokens, each.block_bytes, each.window), []).append(each.layers)
    for (kind, tokens, nbytes, window), layers in seen.items():
        what = {
            KVKind.FULL: "attention to all tokens",
            KVKind.WINDOW: f"attention to {window} tokens",
            KVKind.STATE: "states",
        }[kind]
        groups = f", {len(layers)} groups" if len(layers) > 1 else ""
        yield f"{format_size(nbytes)} of {tokens} tokens: {count(layers[0], 'layer')} with {what}{groups}"


def disk_text(demand: Demand, machine: Machine, found: Plan) -> str:
    if not found.disk_wanted_bytes:
        return "not needed: the pool has room for all sessions"
    if not found.disk_bytes:
        none = "none" if machine.disk_bytes is None else "too little free"
        return f"{none} (--disk); {format_size(found.disk_wanted_bytes)} would keep all sessions"
    return (
        f"{format_size(found.disk_bytes)}, which keeps {found.sessions_kept:,} of {count(demand.sessions, 'session')}"
    )


def pin_text(machine: Machine, found: Plan) -> str:
    used, fresh = found.pin_seconds
    if machine.pin_ms_per_gib:
        return f"{format_duration(used)}, at the {machine.pin_ms_per_gib:g} ms/GiB that were measured"
    return f"{format_duration(used)} to {format_duration(fresh)} (memory that was used before; never used)"
