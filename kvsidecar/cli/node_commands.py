"""The commands for the machine of the daemon: ``kvsidecar serve | doctor | publish | demo | bench``.

Each command imports what it needs when it runs, so that help is fast.
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import Any

import click

from kvsidecar.cli.common import (
    EXIT_AGAIN,
    EXIT_CONFIG,
    EXIT_SOCKET,
    EXIT_UNAVAILABLE,
    Decorator,
    env_option,
    fail,
    socket_option,
)
from kvsidecar.daemon.setting_sources import SECTIONS, click_options
from kvsidecar.support import extras


def _serve(check: bool, **flags: str | None) -> None:
    """Run the daemon until SIGTERM.

    The daemon listens at once and pins the pool in the background. It is ready when the whole pool is pinned, a
    self-test copy has succeeded and the gRPC server is listening.

    Every option can also be set by an environment variable (KVSIDECAR_POOL_SIZE) or in the TOML file
    (pool_size = "64GiB"). A flag overrides a variable, a variable overrides the file. SIGHUP reloads the file:
    log_level, store_chunk, drain_timeout, stuck_after, policy and share take effect, and the log names changed
    options that need a restart. Where standard input or the log is a terminal, SIGHUP means that it was closed, and
    stops the daemon as SIGTERM does; under nohup it reloads.

    With --check it reads all of that as a start and a reload do, starts nothing and touches nothing: it prints what is
    wrong and exits as a start would (78), or prints one line that begins with ok. Ports, memory and GPUs are for
    kvsidecar doctor.

    Exit codes: 0 after SIGTERM, 1 the pool could not be pinned (--on-pin-failure), 69 no usable driver, 73 the socket
    or the directory of the pool is in use, 74 a copier did not end although it was killed (its driver does not
    return), 75 a port is in use, an address does not exist yet, or this user may start no more processes (a restart
    may help), 78 a setting is invalid, a limit refuses the pool at every start, or the kernel refuses a system call
    that the daemon needs.
    """
    gc.disable()  # see `gc_disabled`; `serve` enables it again when the daemon is built
    from kvsidecar import errors
    from kvsidecar.daemon.serve import serve as run

    try:
        if check:
            from kvsidecar.daemon.check import check as checked

            click.echo(checked(flags))
            return
        sys.exit(run(flags))
    except errors.KVSidecarError as error:
        fail(str(error), _exit_code(error))


def _exit_code(error: Exception) -> int:
    """The exit code of a start that fails."""
    from kvsidecar import errors

    if isinstance(error, errors.PoolRefused):
        return EXIT_CONFIG if error.lasting else 1
    exit_codes: dict[type[Exception], int] = {
        errors.ConfigError: EXIT_CONFIG,
        errors.KernelRefuses: EXIT_CONFIG,
        errors.SocketInUse: EXIT_SOCKET,
        errors.AddressUnavailable: EXIT_AGAIN,
        errors.TooManyProcesses: EXIT_AGAIN,
        errors.DriverUnusable: EXIT_UNAVAILABLE,
    }
    return next((code for kind, code in exit_codes.items() if isinstance(error, kind)), 1)


CHECK = click.Option(["--check"], is_flag=True, help="Check the settings, and start nothing.")


class _Serve(click.Command):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in the sections of docs/configuration.md."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        title = "Options"
        for param in self.get_params(ctx):
            title = "Options" if param.name == "help" else SECTIONS.get(str(param.name), title)
            if (row := param.get_help_record(ctx)) is not None:
                sections.setdefault(title, []).append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        starts = "--check" not in args  # click takes them out
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if starts:
                from kvsidecar.daemon.systemd import Notifier
                from kvsidecar.errors import ConfigError

                Notifier.from_environment().failed(ConfigError(error.format_message()))
            raise


serve = _Serve("serve", callback=_serve, help=_serve.__doc__, params=[CHECK, *click_options()])


def _device_option(whose: str) -> Decorator:
    return click.option(
        "--device",
        type=click.Choice(["auto", "cuda", "host"]),
        default="auto",
        show_default=True,
        help=f"Where the {whose} KV lies; auto: on a GPU if there is one.",
    )


@click.command()
@socket_option
@click.option("--config", metavar="PATH", help="The daemon's configuration file. [default: as for serve]")
@click.option("--pool-size", metavar="SIZE|PERCENT", help="Pool size to check for. [default: as for serve]")
@click.option("--pool-dir", metavar="DIRECTORY", help="Directory of the pool to check. [default: as for serve]")
@click.option("--disk-dir", metavar="DIRECTORY", help="Directory of the disk tier to check. [default: as for serve]")
@click.option("--disk-size", metavar="SIZE", help="Size of the disk tier to check for. [default: as for serve]")
@click.option("--disk-speed", is_flag=True, help="Also write and read 256 MiB there, in an unnamed file.")
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


_publish_option = partial(env_option, of="PUBLISH_")


@click.command()
@socket_option
@_publish_option(
    "--bind",
    "ENDPOINT",
    "ZeroMQ endpoint that routers subscribe to.",
    default="tcp://127.0.0.1:5557",
    show_default=True,
)
@_publish_option("--replay", "ENDPOINT", "ZeroMQ endpoint where routers request missed messages.")
@_publish_option("--metrics", "ADDRESS:PORT", "HTTP address where /metrics is served.", unset="none")
@_publish_option("--node", "NAME", "Name of this node in topics.", unset="the host's name")
# The default is what llm-d expects.
@_publish_option("--topic", "TEXT", "Topic of a namespace's events.", default="kv@{node}@{model}", show_default=True)
@click.option(
    "--model", "models", multiple=True, metavar="PATTERN", help="Only namespaces of these models; repeatable."
)
@click.option(
    "--ownership", metavar="NAME", help="`ownership` of the events, for routers that distinguish owners of caches."
)
@env_option(
    "--log-format",
    None,
    "Format of log lines; auto: text on a terminal.",
    type=click.Choice(["auto", "text", "json"]),
    default="auto",
    show_default=True,
)
def publish(log_format: str, node: str | None, **given: Any) -> None:
    """Tell routers what the daemon holds, in vLLM's KV event format over ZeroMQ.

    Runs beside the daemon until SIGTERM, and outlives it. Announces the blocks that engines with the option publisher
    have stored, and their removal when the daemon evicts them, even if those engines are gone. Endpoints are neither
    encrypted nor authenticated, and events contain the tokens of prompts. Needs the extra kvsidecar[events].

    Exit codes: 0 after SIGTERM, 69 the extra is not installed, 75 an address is in use or does not exist yet, 78 an
    invalid option.
    """
    import socket

    from kvsidecar.errors import AddressUnavailable, ConfigError
    from kvsidecar.publisher.options import PublisherOptions

    try:
        options = PublisherOptions(node=socket.gethostname() if node is None else node, **given)
        from kvsidecar.publisher.run import run

        run(options, log_format)
    except ConfigError as error:
        fail(str(error), EXIT_CONFIG)
    except AddressUnavailable as error:
        fail(str(error), EXIT_AGAIN)
    except ModuleNotFoundError as error:
        fail(f"{error.name} is not installed: {extras.install('events')}", EXIT_UNAVAILABLE)


@click.command()
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


@click.command()
@_device_option("engine's")
@click.option(
    "--socket", metavar="PATH", help="Socket of a running daemon to measure. [default: start one for this run]"
)
@click.option(
    "--pool-size", metavar="SIZE", help="Pool size of the daemon that is started. [default: 12 GiB, host 1 GiB]"
)
@click.option("--pin-size", metavar="SIZE", help="Pool size for the pinning measurement. [default: 64 GiB, host 1 GiB]")
@click.option("--only", metavar="NAME[,NAME]", help="Run only these measurements; --list shows their names.")
@click.option("--layouts", metavar="NAME[,NAME]", help="Measure these KV layouts; --list shows their names.")
@click.option("--list", "list_names", is_flag=True, help="List the measurements and layouts, and exit.")
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
    own work. First prints how long that takes: two to four minutes on a GPU. Options after -- are passed to the daemon
    that is started.

    Exit codes: 1 a measurement failed (the others are reported), 69 no driver or no daemon, 78 an invalid option, 130
    interrupted (completed measurements are reported).
    """
    from kvsidecar.bench.errors import BadOption
    from kvsidecar.bench.layouts import ALL_LAYOUTS, LAYOUTS
    from kvsidecar.bench.options import MEASUREMENTS, BenchOptions
    from kvsidecar.errors import KVSidecarError

    if list_names:
        for name, what in MEASUREMENTS.items():
            click.echo(f"{name:13} {what}")
        click.echo("\nlayouts (* in the default run):")
        for layout in ALL_LAYOUTS:
            click.echo(f"{'*' if layout in LAYOUTS else ' '} {layout.name:25} {layout.what}")
        return
    try:
        options = BenchOptions.checked(**given)
        from kvsidecar.bench.run import run

        sys.exit(run(options))
    except BadOption as error:
        fail(str(error), EXIT_CONFIG)
    except KVSidecarError as error:
        fail(str(error), EXIT_UNAVAILABLE)


COMMANDS = (serve, doctor, publish, demo, bench)
