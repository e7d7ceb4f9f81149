"""`kvsidecar engines`, `clear`, `pins` and `drain`."""

from __future__ import annotations

import socket as sockets
import time
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, RenderableType

from kvsidecar.cli.status_view import brief, no_engine, plain_table, printable, rank_cells
from kvsidecar.client import Namespace, RemoteClient
from kvsidecar.errors import DaemonUnreachable
from kvsidecar.protocol.wire import STATE_FROM_WIRE, namespace_from_wire
from kvsidecar.support.units import count, format_duration, format_size
from kvsidecar.types import State
from kvsidecar.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    from kvsidecar.client import Client

POLL_SECONDS = 0.2
LISTED = 20
"""Maximum number of namespaces in an error message."""


# -- engines -----------------------------------------------------------------------------------------------------


def engines_table(reply: pb.StatusReply, width: int) -> RenderableType:
    """The attached engines, one rank per line, with complete GPU UUIDs if the width allows it."""
    if not reply.ranks:
        return no_engine(reply)
    columns = ["engine", "rank", "device", "pid", "mapped", "jobs", "stored", "loaded", "attached"]
    columns += ["model"] if width >= 110 else []
    table = plain_table(None, *columns)
    table.columns[-1].justify = "left" if width >= 110 else "right"
    for rank in sorted(reply.ranks, key=lambda rank: (rank.instance, rank.rank)):
        cells = rank_cells(rank) | ({"device": brief(rank.device)} if width >= 140 else {})
        table.add_row(*(cells[column] for column in columns))
    return table


# -- clear -------------------------------------------------------------------------------------------------------


def find_namespace(wanted: str, reply: pb.StatusReply) -> Namespace | str:
    """The namespace that the operator means, or an error message if there is not exactly one.

    Args:
        wanted: the model as `kvsidecar status` shows it, or the full text if several namespaces have that model.
    """
    known = [namespace_from_wire(each.namespace) for each in reply.namespaces]
    found = [each for each in known if str(each) == wanted] or [each for each in known if each.model == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        listed = _some([f"  --namespace {str(each)!r}" for each in found], "\n")
        return f"several namespaces have the model {wanted!r}; choose one:\n{listed}"
    models = _some([repr(model) for model in dict.fromkeys(each.model for each in known)], ", ")
    return f"no namespace has the model {wanted!r}; " + (
        f"known models: {models}" if models else "there are no namespaces"
    )


def _some(texts: list[str], separator: str) -> str:
    more = [f"and {len(texts) - LISTED} more: kvsidecar status --json lists all"] if len(texts) > LISTED else []
    return separator.join(texts[:LISTED] + more)


def clear_question(reply: pb.StatusReply) -> str:
    totals = reply.totals
    return (
        f"Clear all {totals.blocks} blocks ({format_size(totals.bytes)}) in {totals.namespaces} namespaces? "
        "Engines will recompute them."
    )


# -- holds --------------------------------------------------------------------------------------------------------


def read_hashes(file: TextIO) -> list[bytes] | str:
    """The block hashes in a file, one a line in hexadecimal; or an error message."""
    hashes = []
    for number, line in enumerate(file, 1):
        try:
            hashes += [bytes.fromhex(line)] if line.strip() else []
        except ValueError:
            return f"line {number} is not a hash in hexadecimal"
    if len({len(each) for each in hashes}) > 1:
        return "the hashes have different lengths"
    return hashes or "there are no hashes"


def holds_table(reply: pb.StatusReply) -> RenderableType:
    """The operators' holds, one per line."""
    table = plain_table(None, "name", "by", "model", "blocks", "size", "ends in")
    for each in sorted(reply.pins, key=lambda hold: hold.name):
        left = format_duration(each.seconds_left)
        model = brief(each.namespace.model)
        table.add_row(each.name, printable(each.owner), model, str(each.blocks), format_size(each.bytes), left)
    return table if reply.pins else "There are no pins."


# -- drain -------------------------------------------------------------------------------------------------------


def open_jobs(reply: pb.StatusReply) -> int:
    """Number of unfinished jobs. Only ranks count jobs before and after their copy; only workers count the jobs of
    engines that are gone."""
    listed = sum(rank.jobs_running for rank in reply.ranks)
    return max(listed, reply.totals.jobs_running, reply.jobs.running + reply.jobs.queued)


def waits_for(reply: pb.StatusReply) -> str:
    """The unfinished jobs, their engines, and the age of the oldest job, as the end of a sentence."""
    text = _open_jobs_by_rank(reply)
    if reply.jobs.oldest_inflight_seconds:
        text += f", the oldest for {format_duration(reply.jobs.oldest_inflight_seconds)}"
    return text


def _open_jobs_by_rank(reply: pb.StatusReply) -> str:
    text = f"{count(open_jobs(reply), 'job')} to end"
    busy = [f"{rank.instance} {rank.rank}/{rank.world_size}" for rank in reply.ranks if rank.jobs_running]
    more = f" and {len(busy) - 4} more" if len(busy) > 4 else ""
    return text + (f" ({', '.join(busy[:4])}{more})" if busy else "")


def drain(client: Client | RemoteClient, *, wait: bool, timeout: float | None, console: Console) -> bool:
    """Drain the daemon and print the jobs that still run. True if no job is left, or without ``wait``.

    Raises:
        ClientError: no daemon answers.
    """
    before = client.status()
    client.drain()
    reply = client.status()
    if STATE_FROM_WIRE[before.readiness.state] is State.DRAINING:
        _say(console, "The daemon was already draining.")
    _say(
        console,
        "Draining: no new work is accepted until `kvsidecar drain --cancel` or a restart. Engines continue without "
        "offload.",
    )
    if not wait:
        _say(console, f"Still running: {waits_for(reply)}." if open_jobs(reply) else "No job is running.")
        return True
    return _wait(client, reply, timeout, console)


def cancel_drain(client: Client | RemoteClient, console: Console) -> bool:
    """Cancel a drain and print the result. False if the daemon is shutting down.

    Raises:
        ClientError: no daemon answers.
    """
    cancelled = client.cancel_drain()
    now = client.status().readiness
    state = STATE_FROM_WIRE[now.state]
    if state is State.DRAINING and not cancelled:
        _say(console, f"Drain not cancelled: {now.reason}.")
        return False
    if not cancelled:
        _say(console, f"The daemon was not draining. It is {state.value}.")
    elif state is State.READY:
        _say(console, "Drain cancelled: new work is accepted again, and stored blocks are still there.")
    else:
        _say(console, f"Drain cancelled, but the daemon is {state.value}: {now.reason}.")
    return True


def _say(console: Console, text: str) -> None:
    console.print(printable(text), soft_wrap=True)  # a file has no width


def _wait(client: Client | RemoteClient, reply: pb.StatusReply, timeout: float | None, console: Console) -> bool:
    deadline = None if timeout is None else time.monotonic() + timeout
    epoch, last_line = reply.epoch, ""
    with console.status("") as shown:
        while open_jobs(reply):
            text = f"waiting for {waits_for(reply)}"
            shown.update(printable(text))
            # A terminal shows the current state, a file gets a line whenever the jobs change.
            if not console.is_terminal and (line := f"waiting for {_open_jobs_by_rank(reply)}") != last_line:
                _say(console, line)
                last_line = line
            if deadline is not None and time.monotonic() >= deadline:
                _say(console, f"Timed out after {timeout:g} s, still {text}.")
                return False
            time.sleep(POLL_SECONDS)
            try:
                reply = client.status()
            except DaemonUnreachable:
                if _listens(client):
                    continue  # it is busy or hangs, and may still copy
                _say(console, "The daemon has exited.")
                return True
            if reply.epoch != epoch:
                _say(console, "The daemon has exited and was restarted.")
                return True
    _say(console, "Drained: no job is running.")
    return True


def _listens(client: Client | RemoteClient) -> bool:
    try:
        if isinstance(client, RemoteClient):
            host, _, port = client.address.rpartition(":")
            sockets.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
        else:
            with sockets.socket(sockets.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(client.socket)
    except TimeoutError:
        return True
    except OSError:
        return False
    return True
