"""The commands of operators: ``kvsidecar status | top | engines | clear | pin | unpin | pins | drain``.

Each command imports what it needs when it runs, so that help is fast.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvsidecar.cli.common import ANSWER_SECONDS, EXIT_FAILED, connected, daemon_options, fail

if TYPE_CHECKING:
    from kvsidecar.v1 import sidecar_pb2 as pb

_Found = TypeVar("_Found")


def _exit_if_failed(shown: pb.StatusReply) -> None:
    from kvsidecar.protocol.wire import STATE_FROM_WIRE
    from kvsidecar.types import State

    if STATE_FROM_WIRE[shown.readiness.state] is State.FAILED:
        sys.exit(EXIT_FAILED)


@click.command()
@daemon_options
@click.option("--json", "as_json", is_flag=True, help="Print the complete status as one JSON object.")
def status(as_json: bool, **where: str | None) -> None:
    """Show the state, pool, namespaces, engines and jobs of the running daemon.

    Lists the largest namespaces only; --json lists all of them.

    Exit codes: 0, 1 the daemon has failed, 69 no daemon answers, and 77 this user may not connect.
    """
    import json

    from rich.console import Console

    from kvsidecar.cli.status_view import render
    from kvsidecar.protocol.as_json import message_json

    with connected(where, "kvsidecar status") as client:
        reply = client.status(everything=as_json)
    if as_json:
        click.echo(json.dumps(message_json(reply), indent=2))
    else:
        console = Console()
        console.print(render(reply, console.width))
    _exit_if_failed(reply)


@click.command()
@daemon_options
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 60.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Refresh interval. Rates are averages over one interval.",
)
@click.option("--once", is_flag=True, help="Print one screen, with rates over one interval, and exit.")
@click.option(
    "--prefill-rate",
    type=click.FloatRange(0, min_open=True),
    metavar="TOKENS",
    help="Prompt tokens that an engine computes in a second: also show what loads save in prefill.",
)
@click.option(
    "--engine-price",
    metavar="PRICE",
    help="Price of one engine, with all its GPUs, per hour, such as 20, $20 or 20EUR: also show what is saved. "
    "Requires --prefill-rate.",
)
def top(interval: float, once: bool, prefill_rate: float | None, engine_price: str | None, **where: str | None) -> None:
    """Watch the running daemon: pin progress, pool, rates, hits, what is saved, engines, the oldest job, refusals.

    Refreshes until q or Ctrl-C, and keeps trying while no daemon answers. Rates count a job when it ends.

    Exit codes: 0, and with --once 1 the daemon has failed, and 69 no daemon answers.
    """
    from rich.console import Console

    from kvsidecar.cli.operate import top as top_command
    from kvsidecar.cli.status_figures import Price, Worth

    if engine_price is not None and prefill_rate is None:
        raise click.UsageError("--engine-price requires --prefill-rate")
    try:
        price = None if engine_price is None else Price.parse(engine_price)
    except ValueError as error:
        raise click.UsageError(f"--engine-price {error}") from error
    worth = None if prefill_rate is None else Worth(prefill_rate, price)
    if not once and not sys.stdout.isatty():
        raise click.UsageError("standard output is not a terminal: use --once")
    with connected(where, "kvsidecar top", ANSWER_SECONDS if once else top_command.LIVE_ANSWER_SECONDS) as client:
        if once:
            _exit_if_failed(top_command.once(client, interval, Console(), worth))
        else:
            top_command.live(client, interval, Console(), worth)


@click.command()
@daemon_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array with all fields of each rank.")
def engines(as_json: bool, **where: str | None) -> None:
    """Show the attached engines, one rank per line.

    Exit codes: 0, even if no engine is attached, and 69 no daemon answers.
    """
    import json

    from rich.console import Console

    from kvsidecar.cli.operate.tables import engines_table
    from kvsidecar.protocol.as_json import message_json

    with connected(where, "kvsidecar engines") as client:
        reply = client.status(everything=True)
    if as_json:
        click.echo(json.dumps([message_json(rank) for rank in reply.ranks], indent=2))
    else:
        console = Console()
        console.print(engines_table(reply, console.width))


def _valid(found: _Found | str) -> _Found:
    """The result. Exits if it is an error message."""
    if isinstance(found, str):
        fail(found, 1)
    return found


@click.command()
@daemon_options
@click.option("--namespace", metavar="MODEL", help="Clear the namespace of this model, as `kvsidecar status` shows it.")
@click.option("--share", metavar="NAME", help="Clear all namespaces of this share.")
@click.option("--all", "everything", is_flag=True, help="Clear all namespaces. Asks for confirmation.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@click.option(
    "--hashes", "file", type=click.File(), metavar="FILE|-", help="Only these blocks: hex hashes, one per line."
)
@click.option("--group", default=0, show_default=True, metavar="NUMBER", help="KV cache group of the hashes.")
@click.option(
    "--unused", default=0, type=click.IntRange(min=0), metavar="SECONDS", help="Only blocks not used for this long."
)
def clear(
    namespace: str | None,
    share: str | None,
    everything: bool,
    yes: bool,
    file: Any,
    group: int,
    unused: int,
    **where: str | None,
) -> None:
    """Discard stored blocks, so that lookups no longer hit them.

    Use it for KV that must not be reused, for example after weights were changed in place. Copies in flight finish.
    Engines stay attached and store again. Slower tiers forget whole namespaces, also with --hashes and --unused.

    Exit codes: 0, 1 not confirmed, no such namespace, or not a hash, 69 no daemon answers, 77 permission denied.
    """
    from kvsidecar.cli.operate.targets import clear_question, find_namespace, read_hashes
    from kvsidecar.support.units import count

    if (namespace is not None) + (share is not None) + everything != 1:
        raise click.UsageError("give either --namespace MODEL, --share NAME or --all")
    if file is not None and (namespace is None or unused):
        raise click.UsageError("--hashes requires --namespace, and cannot be combined with --unused")
    hashes = None if file is None else _valid(read_hashes(file))
    with connected(where, "kvsidecar clear") as client:
        chosen = None if namespace is None else _valid(find_namespace(namespace, client.status(everything=True)))
        if everything and not yes:
            click.confirm(clear_question(client.status()), abort=True)
        groups = None if hashes is None else {group: hashes}
        blocks = client.clear(chosen, share=share, groups=groups, unused_seconds=unused)
    click.echo(f"{count(blocks, 'block')} cleared.")


@click.command()
@daemon_options
@click.argument("name")
@click.option("--namespace", metavar="MODEL", required=True, help="Namespace of the blocks, as for `kvsidecar clear`.")
@click.option("--hashes", "file", type=click.File(), required=True, metavar="FILE|-", help="Hex hashes, one per line.")
@click.option("--group", default=0, show_default=True, metavar="NUMBER", help="KV cache group of the blocks.")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=86400.0, show_default=True, help="Time until the pin expires."
)
def pin(name: str, namespace: str, file: Any, group: int, seconds: float, **where: str | None) -> None:
    """Keep blocks in the pool, such as those of a common system prompt.

    Those of the blocks that are in the pool now stay there until they are unpinned or the pin expires. A restart that
    keeps the cache keeps the pin; otherwise it ends with the daemon. A pin of the same NAME is replaced. All pins
    together may take at most the daemon's --pin-max.

    Exit codes: 0, 1 no such namespace, or not a hash, 69 no daemon answers or it refuses, 77 permission denied.
    """
    from kvsidecar.cli.operate.targets import find_namespace, read_hashes
    from kvsidecar.support.units import count, format_size

    hashes = _valid(read_hashes(file))
    with connected(where, "kvsidecar pin") as client:
        chosen = _valid(find_namespace(namespace, client.status(everything=True)))
        blocks, nbytes = client.pin(name, chosen, {group: hashes}, seconds)
    click.echo(f"{count(blocks, 'block')} of {len(hashes)} pinned, {format_size(nbytes)}.")


@click.command()
@daemon_options
@click.argument("name")
def unpin(name: str, **where: str | None) -> None:
    """End a pin: its blocks can be evicted again.

    Exit codes: 0, 1 no such pin, 69 no daemon answers, 77 permission denied.
    """
    with connected(where, "kvsidecar unpin") as client:
        unpinned = client.unpin(name)
    if not unpinned:
        fail(f"there is no pin {name!r}", 1)


@click.command()
@daemon_options
def pins(**where: str | None) -> None:
    """Show the pins: who pinned how much, and for how long.

    Exit codes: 0, 69 no daemon answers.
    """
    from rich.console import Console

    from kvsidecar.cli.operate.tables import holds_table

    with connected(where, "kvsidecar pins") as client:
        Console().print(holds_table(client.status()))


@click.command()
@daemon_options
@click.option("--wait", is_flag=True, help="Wait until no job is running, and show which are.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.0),
    metavar="SECONDS",
    help="With --wait: give up after this time. [default: never]",
)
@click.option("--cancel", is_flag=True, help="Cancel a drain: the daemon accepts new work again.")
def drain(wait: bool, timeout: float | None, cancel: bool, **where: str | None) -> None:
    """Stop accepting new work, and finish running jobs.

    Until --cancel or a restart, lookups miss, stores and loads are declined, and engines continue without offload. The
    daemon keeps running, and keeps its blocks. SIGTERM ends it.

    Exit codes: 0, 1 jobs still running after --timeout, or the daemon is shutting down, 69 no daemon answers, 77
    permission denied.
    """
    from rich.console import Console

    from kvsidecar.cli.operate.drain import cancel_drain, drain_daemon

    if cancel and wait:
        raise click.UsageError("--cancel cannot be combined with --wait")
    if timeout is not None and not wait:
        raise click.UsageError("--timeout requires --wait")
    console = Console()
    with connected(where, "kvsidecar drain") as client:
        succeeded = cancel_drain(client, console) if cancel else drain_daemon(client, wait, timeout, console)
    sys.exit(0 if succeeded else 1)


COMMANDS = (status, top, engines, clear, pin, unpin, pins, drain)
