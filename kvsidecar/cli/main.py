"""The command line: ``kvsidecar serve | status | top | engines | clear | pin | drain | doctor | demo | bench``.

Each command imports what it needs when it runs, so that help is fast.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from kvsidecar import __version__
from kvsidecar.support import terminal
from kvsidecar.support.imports import gc_disabled

with gc_disabled():
    import click

    from kvsidecar.daemon.config import click_options

if TYPE_CHECKING:
    from kvsidecar.client import Client, RemoteClient

EXIT_UNAVAILABLE = 69
"""sysexits.h EX_UNAVAILABLE: no usable driver, or no daemon answers."""
EXIT_SOCKET = 73
"""sysexits.h EX_CANTCREAT: another daemon serves the socket."""
EXIT_OUTPUT = 74
"""sysexits.h EX_IOERR: what a command says cannot be written."""
EXIT_AGAIN = 75
"""sysexits.h EX_TEMPFAIL: a port is in use; a restart may help."""
EXIT_DENIED = 77
"""sysexits.h EX_NOPERM: this user may not do this, or may not open the daemon's socket."""
EXIT_CONFIG = 78
"""sysexits.h EX_CONFIG: a setting is invalid; a restart will not help."""


class _Commands(click.Group):
    """click says nothing of a reader that has gone, and shows a traceback where a disk is full."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError:
            try:
                os.write(1, b"\n")  # whether it was that: a disk that is full has no room for this either
            except OSError as error:
                sys.stdout = None  # else the interpreter would retry at exit, and exit with 120
                _fail(f"the output cannot be written: {error.strerror}", EXIT_OUTPUT)
            raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="kvsidecar")
def main() -> None:
    """A per-node daemon that keeps LLM engines' KV cache in pinned host memory."""
    terminal.never_fail_to_encode()


def _client(where: dict[str, str | None], name: str, timeout: float) -> Client | RemoteClient:
    """A client for the daemon that the options select."""
    from kvsidecar.client import Client, ClientError, RemoteClient, Tls

    address, tls = where["connect"], {option: where[f"connect_{option}"] for option in ("ca", "certificate", "key")}
    if _was_given("socket") and _was_given("connect"):
        raise click.UsageError("give either --socket or --connect")
    if address is None or _was_given("socket"):
        if given := [option for option in tls if _was_given(f"connect_{option}")]:
            raise click.UsageError(f"--connect-{given[0]} goes with --connect")
        return Client(where["socket"], name=name, timeout=timeout)
    if missing := [option for option, path in tls.items() if not path]:
        raise click.UsageError(f"--connect needs --connect-{missing[0]}: TCP is served with mTLS only")
    try:
        return RemoteClient(address, Tls(**{option: str(path) for option, path in tls.items()}), timeout=timeout)
    except ClientError as error:
        _fail(str(error), EXIT_CONFIG)


def _was_given(option: str) -> bool:
    """Whether the option was given as a flag, not by the environment."""
    return click.get_current_context().get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE


@contextmanager
def _connected(where: dict[str, str | None], name: str, timeout: float = 5.0) -> Iterator[Client | RemoteClient]:
    """A client for the daemon that the options select. Exits if the daemon does not answer or refuses the request."""
    from kvsidecar.client import ClientError, RequestDenied, SocketDenied

    with _client(where, name, timeout) as client:
        try:
            yield client
        except ClientError as error:
            _fail(str(error), EXIT_DENIED if isinstance(error, RequestDenied | SocketDenied) else EXIT_UNAVAILABLE)


def _fail(message: str, code: int) -> NoReturn:
    try:
        click.echo(f"kvsidecar: {message}", err=True)
    except OSError:  # the reader is gone or the disk is full; the exit code remains
        sys.stderr = None  # else the interpreter would retry at exit, and exit with 120
    sys.exit(code)


def _serve(**flags: str | None) -> None:
    """Run the daemon until SIGTERM.

    The daemon listens at once and pins the pool in the background. It is ready when the whole pool is pinned, a
    self-test copy has succeeded and the gRPC server is listening.

    Every option can also be set by an environment variable (KVSIDECAR_POOL_SIZE) or in the TOML file
    (pool_size = "64GiB"). A flag overrides a variable, a variable overrides the file. SIGHUP reloads the file:
    log_level, store_chunk, drain_timeout, stuck_after, policy and share take effect, and the log names changed
    options that need a restart.

    Exit codes: 0 after SIGTERM, 1 pinning failed with --on-pin-failure=exit, 69 no usable driver, 73 the socket or
    the directory of the pool is in use, 74 a copier did not end although it was killed (its driver does not return), 75
    a port is in use or an address does not exist yet (a restart may help), 78 a setting is invalid.
    """
    gc.disable()  # see `gc_disabled`; `serve` enables it again when the daemon is built
    from kvsidecar.daemon.serve import serve
    from kvsidecar.errors import AddressUnavailable, ConfigError, DriverUnusable, PoolRefused, SocketInUse

    exit_codes: dict[type[Exception], int] = {
        ConfigError: EXIT_CONFIG,
        SocketInUse: EXIT_SOCKET,
        AddressUnavailable: EXIT_AGAIN,
        DriverUnusable: EXIT_UNAVAILABLE,
        PoolRefused: 1,
    }
    try:
        sys.exit(serve(flags))
    except tuple(exit_codes) as error:
        _fail(str(error), exit_codes[type(error)])


main.add_command(click.Command("serve", callback=_serve, help=_serve.__doc__, params=[*click_options()]))

_socket_option = click.option(
    "--socket",
    envvar="KVSIDECAR_SOCKET",
    metavar="PATH",
    help="The daemon's Unix socket. [default: as for serve; env: KVSIDECAR_SOCKET]",
)


_CONNECT = (
    ("connect", "HOST:PORT", "Address of a daemon on another host, reached over TCP with mTLS."),
    ("connect-ca", "PATH", "CA bundle that the daemon's certificate is verified against, as a PEM file."),
    ("connect-certificate", "PATH", "Client certificate, as a PEM file. The daemon's policy must name it."),
    ("connect-key", "PATH", "Private key of the client certificate, as a PEM file."),
)


def _device_option(whose: str) -> Callable[..., Any]:
    return click.option(
        "--device",
        type=click.Choice(["auto", "cuda", "host"]),
        default="auto",
        show_default=True,
        help=f"Where the {whose} KV lies; auto: on a GPU if there is one.",
    )


def _daemon_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that choose a daemon: --socket on this host, --connect for another host."""
    for name, metavar, text in reversed(_CONNECT):
        variable = "KVSIDECAR_" + name.replace("-", "_").upper()
        command = click.option(f"--{name}", envvar=variable, metavar=metavar, help=f"{text} [env: {variable}]")(command)
    return _socket_option(command)


@main.command()
@_daemon_options
@click.option("--json", "as_json", is_flag=True, help="Print the complete status as one JSON object.")
def status(as_json: bool, **where: str | None) -> None:
    """Show the state, pool, namespaces, engines and jobs of the running daemon.

    Lists the largest namespaces only; --json lists all of them.
    """
    import json

    from rich.console import Console

    from kvsidecar.cli.status_view import render
    from kvsidecar.server.report import message_json

    with _connected(where, "kvsidecar status") as client:
        reply = client.status(everything=as_json)
    if as_json:
        click.echo(json.dumps(message_json(reply), indent=2))
    else:
        Console().print(render(reply))


@main.command()
@_daemon_options
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 60.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Refresh interval. Rates are averages over one interval.",
)
@click.option("--once", is_flag=True, help="Print one screen, with rates over one interval, and exit.")
def top(interval: float, once: bool, **where: str | None) -> None:
    """Watch the running daemon: pin progress, pool, rates, hits, engines, the oldest job, refusals.

    Refreshes until q or Ctrl-C, and keeps trying while no daemon answers. Rates count a job when it ends.

    Exit codes: 0, and 69 no daemon answers (with --once).
    """
    from rich.console import Console

    from kvsidecar.cli.operate import top as top_command

    if not once and not sys.stdout.isatty():
        raise click.UsageError("standard output is not a terminal: use --once")
    with _connected(where, "kvsidecar top", top_command.ANSWER_SECONDS) as client:
        if once:
            top_command.once(client, interval, Console())
        else:
            top_command.live(client, interval, Console())


@main.command()
@_daemon_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array with all fields of each rank.")
def engines(as_json: bool, **where: str | None) -> None:
    """Show the attached engines, one rank per line.

    Exit codes: 0, even if no engine is attached, and 69 no daemon answers.
    """
    import json

    from rich.console import Console

    from kvsidecar.cli.operate.commands import engines_table
    from kvsidecar.server.report import message_json

    with _connected(where, "kvsidecar engines") as client:
        reply = client.status(everything=True)
    if as_json:
        click.echo(json.dumps([message_json(rank) for rank in reply.ranks], indent=2))
    else:
        console = Console()
        console.print(engines_table(reply, console.width))


@main.command()
@_daemon_options
@click.option("--namespace", metavar="MODEL", help="Clear the namespace of this model, as `kvsidecar status` shows it.")
@click.option("--share", metavar="NAME", help="Clear all namespaces of this share.")
@click.option("--all", "everything", is_flag=True, help="Clear all namespaces. Asks for confirmation.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@click.option(
    "--hashes", "file", type=click.File(), metavar="FILE|-", help="Only these blocks: hex hashes, one a line."
)
@click.option("--group", default=0, show_default=True, metavar="NUMBER", help="KV cache group of the hashes.")
@click.option(
    "--unused", default=0, type=click.IntRange(min=0), metavar="SECONDS", help="Only blocks not used for so long."
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
    from kvsidecar.cli.operate.commands import clear_question, find_namespace, read_hashes
    from kvsidecar.support.units import count

    if (namespace is not None) + (share is not None) + everything != 1:
        raise click.UsageError("give either --namespace MODEL, --share NAME or --all")
    if file is not None and (namespace is None or unused):
        raise click.UsageError("--hashes goes with --namespace, and without --unused")
    hashes = None if file is None else read_hashes(file)
    if isinstance(hashes, str):
        _fail(hashes, 1)
    with _connected(where, "kvsidecar clear") as client:
        chosen = None if namespace is None else find_namespace(namespace, client.status(everything=True))
        if isinstance(chosen, str):
            _fail(chosen, 1)
        if everything and not yes:
            click.confirm(clear_question(client.status()), abort=True)
        groups = None if hashes is None else {group: hashes}
        blocks = client.clear(chosen, share=share, groups=groups, unused_seconds=unused)
    click.echo(f"{count(blocks, 'block')} cleared.")


@main.command()
@_daemon_options
@click.argument("name")
@click.option("--namespace", metavar="MODEL", required=True, help="Namespace of the blocks, as for `kvsidecar clear`.")
@click.option("--hashes", "file", type=click.File(), required=True, metavar="FILE|-", help="Hex hashes, one a line.")
@click.option("--group", default=0, show_default=True, metavar="NUMBER", help="KV cache group of the blocks.")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=86400.0, show_default=True, help="Until the pin expires."
)
def pin(name: str, namespace: str, file: Any, group: int, seconds: float, **where: str | None) -> None:
    """Keep blocks in the pool, such as those of a common system prompt.

    Those of the hashes that are stored now are kept until they are unpinned, the pin expires or the daemon ends. A pin
    of the same NAME is replaced. All pins together have at most --pin-max of the daemon.

    Exit codes: 0, 1 no such namespace, or not a hash, 69 no daemon answers or it refuses, 77 permission denied.
    """
    from kvsidecar.cli.operate.commands import find_namespace, read_hashes
    from kvsidecar.support.units import count, format_size

    hashes = read_hashes(file)
    if isinstance(hashes, str):
        _fail(hashes, 1)
    with _connected(where, "kvsidecar pin") as client:
        chosen = find_namespace(namespace, client.status(everything=True))
        if isinstance(chosen, str):
            _fail(chosen, 1)
        blocks, nbytes = client.pin(name, chosen, {group: hashes}, seconds)
    click.echo(f"{count(blocks, 'block')} of {len(hashes)} pinned, {format_size(nbytes)}.")


@main.command()
@_daemon_options
@click.argument("name")
def unpin(name: str, **where: str | None) -> None:
    """End a pin: its blocks can be evicted again.

    Exit codes: 0, 1 no such pin, 69 no daemon answers, 77 permission denied.
    """
    with _connected(where, "kvsidecar unpin") as client:
        unpinned = client.unpin(name)
    if not unpinned:
        _fail(f"there is no pin {name!r}", 1)


@main.command()
@_daemon_options
def pins(**where: str | None) -> None:
    """Show the pins: who has pinned how much, and for how long.

    Exit codes: 0, 69 no daemon answers.
    """
    from rich.console import Console

    from kvsidecar.cli.operate.commands import pins_table

    with _connected(where, "kvsidecar pins") as client:
        Console().print(pins_table(client.status()))


@main.command()
@_daemon_options
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

    from kvsidecar.cli.operate.commands import cancel_drain
    from kvsidecar.cli.operate.commands import drain as drain_daemon

    if cancel and wait:
        raise click.UsageError("--cancel does not go with --wait")
    if timeout is not None and not wait:
        raise click.UsageError("--timeout goes with --wait")
    console = Console()
    with _connected(where, "kvsidecar drain") as client:
        if cancel:
            succeeded = cancel_drain(client, console)
        else:
            succeeded = drain_daemon(client, wait=wait, timeout=timeout, console=console)
    sys.exit(0 if succeeded else 1)


@main.command()
@_socket_option
@click.option("--config", metavar="PATH", help="The daemon's configuration file. [default: as for serve]")
@click.option("--pool-size", metavar="SIZE|PERCENT", help="Pool size to check for. [default: as for serve]")
@click.option("--pool-dir", metavar="DIRECTORY", help="Directory of the pool to check. [default: as for serve]")
@click.option("--disk-dir", metavar="DIRECTORY", help="Directory of the disk tier to check. [default: as for serve]")
@click.option("--disk-size", metavar="SIZE", help="Size of the disk tier to check for. [default: as for serve]")
@click.option("--disk-speed", is_flag=True, help="Also write and read 256 MiB there, in a file without a name.")
@click.option("--cluster-master", metavar="HOST:PORT", help="Mooncake master to check. [default: as for serve]")
@click.option("--shared-dir", metavar="DIRECTORY", help="Directory of the shared tier. [default: as for serve]")
@click.option("--shared-size", metavar="SIZE", help="Size of the shared tier. [default: as for serve]")
@click.option("--device", metavar="auto|cuda|host", help="Device to check for. [default: as for serve]")
@click.option("--pid", type=click.IntRange(min=1), metavar="PID", help="Also check this engine process.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
def doctor(pid: int | None, as_json: bool, disk_speed: bool, **flags: str | None) -> None:
    """Check whether this machine can run the daemon, and suggest fixes.

    Run it as the daemon's user and inside the daemon's container, before the daemon is installed or while it runs. It
    reads the configuration as serve does. It changes nothing and creates no CUDA context.

    Exit codes: 0, 1 there is a problem.
    """
    import json

    from rich.console import Console

    from kvsidecar.cli.doctor import view
    from kvsidecar.cli.doctor.checks import examine
    from kvsidecar.cli.doctor.findings import Verdict
    from kvsidecar.cli.doctor.gather import gather

    findings = examine(gather(flags, pid, disk_speed=disk_speed))
    if as_json:
        click.echo(json.dumps(view.as_json(findings), indent=2))
    else:
        Console().print(view.render(findings))
    sys.exit(1 if any(finding.verdict is Verdict.PROBLEM for finding in findings) else 0)


@main.command()
@click.option(
    "--blocks", default=256, show_default=True, metavar="COUNT", help="Number of KV blocks that engine A stores."
)
@click.option("--disk", is_flag=True, help="Kill the daemon too: engine B loads from disk, through another daemon.")
@_device_option("engines'")
def demo(blocks: int, disk: bool, device: str) -> None:
    """Store, kill the engine, load into another engine, compare every byte.

    Starts a real daemon with a small pool. Engine A (a process of its own, with two tensor-parallel ranks) stores a KV
    cache filled with a pattern and is killed with SIGKILL. Engine B attaches, looks up, loads and compares. Exits with
    1 if a byte differs.
    """
    from kvsidecar.cli.demo.run import run

    sys.exit(run(blocks=blocks, device=device, disk=disk))


@main.command()
@_device_option("engine's")
@click.option(
    "--socket", metavar="PATH", help="Socket of a running daemon to measure. [default: start one for this run]"
)
@click.option(
    "--pool-size", metavar="SIZE", help="Pool size of the daemon that is started. [default: 12 GiB, host 1 GiB]"
)
@click.option("--pin-size", metavar="SIZE", help="Pool size for the pinning measurement. [default: 64 GiB, host 1 GiB]")
@click.option("--only", metavar="NAME[,NAME]", help="Run only these measurements; --list shows their names.")
@click.option("--list", "list_names", is_flag=True, help="List the measurements, and exit.")
@click.option("--quick", is_flag=True, help="Take few samples. Shows that everything works, not how fast it is.")
@click.option(
    "--repeat", type=int, metavar="COUNT", help="Minimum number of rounds for each bandwidth figure. [default: 7]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed for block ids, hashes and contents.")
@click.option("--json", metavar="FILE|-", help="Write all results as JSON; - writes to standard output.")
@click.argument("serve_flags", nargs=-1, metavar="[-- SERVE_OPTION...]")
def bench(list_names: bool, **given: Any) -> None:
    """Measure the daemon's performance on this machine.

    Starts a daemon for this run or uses a running one, attaches as an engine does, and measures through the public
    client: bandwidth relative to the limit of the link, latencies, job rates, pinning, and the impact on an engine's
    own work. Takes two to four minutes on a GPU. Options after -- are passed to the daemon that is started.

    Exit codes: 1 a measurement failed (the others are reported), 69 no driver or no daemon, 78 an invalid option, 130
    interrupted (completed measurements are reported).
    """
    from kvsidecar.bench.errors import BadOption
    from kvsidecar.bench.options import MEASUREMENTS, Options
    from kvsidecar.errors import KVSidecarError

    if list_names:
        for name, what in MEASUREMENTS.items():
            click.echo(f"{name:13} {what}")
        return
    try:
        options = Options.checked(**given)
        from kvsidecar.bench.run import run

        sys.exit(run(options))
    except BadOption as error:
        _fail(str(error), EXIT_CONFIG)
    except KVSidecarError as error:
        _fail(str(error), EXIT_UNAVAILABLE)
