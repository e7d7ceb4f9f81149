"""The tables of `kvsidecar engines` and `kvsidecar pins`."""

from __future__ import annotations

from rich.console import RenderableType

from kvsidecar.cli.status_view import WIDE, brief, no_engine, plain_table, printable, rank_cells
from kvsidecar.support.units import format_duration, format_size
from kvsidecar.v1 import sidecar_pb2 as pb


def engines_table(reply: pb.StatusReply, width: int) -> RenderableType:
    """The attached engines, one rank per line, with complete GPU UUIDs if the width allows it."""
    if not reply.ranks:
        return no_engine(reply)
    columns = ["engine", "rank", "device", "pid", "mapped", "jobs", "stored", "loaded", "attached"]
    columns += ["model"] if width >= WIDE else []
    table = plain_table(None, *columns)
    table.columns[-1].justify = "left" if width >= WIDE else "right"
    for rank in sorted(reply.ranks, key=lambda rank: (rank.instance, rank.rank)):
        cells = rank_cells(rank) | ({"device": brief(rank.device)} if width >= 140 else {})
        table.add_row(*(cells[column] for column in columns))
    return table


def holds_table(reply: pb.StatusReply) -> RenderableType:
    """The operators' holds, one per line."""
    table = plain_table(None, "name", "by", "model", "blocks", "size", "ends in")
    for each in sorted(reply.pins, key=lambda hold: hold.name):
        left = format_duration(each.seconds_left)
        model = brief(each.namespace.model)
        table.add_row(each.name, printable(each.owner), model, str(each.blocks), format_size(each.bytes), left)
    return table if reply.pins else "There are no pins."
