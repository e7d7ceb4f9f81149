"""`kvsidecar drain`: stops new work, prints which jobs still run, and may wait for them."""

from __future__ import annotations

import socket as sockets
import time
from typing import TYPE_CHECKING

from rich.console import Console

from kvsidecar.cli.status_view import printable
from kvsidecar.client import RemoteClient
from kvsidecar.errors import DaemonUnreachable
from kvsidecar.protocol.wire import STATE_FROM_WIRE
from kvsidecar.support.units import count, format_duration
from kvsidecar.types import State
from kvsidecar.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    from kvsidecar.client import Client

POLL_SECONDS = 0.2


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


def drain_daemon(client: Client | RemoteClient, wait: bool, timeout: float | None, console: Console) -> bool:
    """Drain the daemon and print the jobs that still run. True if no job is left, or without ``wait``.

    Raises:
        ClientError: no daemon answers.
    """
    before = client.status()
    client.drain()
    reply = client.status()
    if STATE_FROM_WIRE[before.readiness.state] is State.DRAINING:
        _say(console, "The daemon was already draining.")
    until = "until `kvsidecar drain --cancel` or a restart"
    _say(console, f"Draining: no new work is accepted {until}. Engines continue without offload.")
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
