"""The command line: ``kvsidecar serve | status | demo``. Imports what a command needs when it runs: help is instant."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from kvsidecar import __version__
from kvsidecar.config import click_options

EXIT_UNAVAILABLE = 69
"""sysexits.h EX_UNAVAILABLE: no usable driver, or no daemon answers."""
EXIT_SOCKET = 73
"""sysexits.h EX_CANTCREAT: another daemon serves the socket."""
EXIT_CONFIG = 78
"""sysexits.h EX_CONFIG: a setting is wrong; starting again will not help."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="kvsidecar")
def main() -> None:
    """A per-node daemon that keeps LLM engines' KV cache in pinned host memory."""


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"kvsidecar: {message}", err=True)
    sys.exit(code)


def _serve(**flags: str | None) -> None:
    """Run the daemon until SIGTERM.

    It listens at once, pins the pool in the background, and is ready when the pool is pinned, a self-test copy has
    come back right, and RPC listens. Every option can also be a variable (KVSIDECAR_POOL_SIZE) or a line of the TOML
    file (pool_size = "64GiB"); a flag wins over a variable, a variable over the file.

    Exit codes: 0 after SIGTERM, 1 pinning failed with --on-pin-failure=exit, 69 no usable driver, 73 the socket is in
    use, 78 a setting is wrong.
    """
    from kvsidecar.errors import ConfigError, DriverUnusable, PoolRefused, SocketInUse
    from kvsidecar.serve import serve

    try:
        sys.exit(serve(flags))
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    except SocketInUse as error:
        _fail(str(error), EXIT_SOCKET)
    except DriverUnusable as error:
        _fail(str(error), EXIT_UNAVAILABLE)
    except PoolRefused as error:
        _fail(str(error), 1)


main.add_command(click.Command("serve", callback=_serve, help=_serve.__doc__, params=[*click_options()]))

_socket_option = click.option(
    "--socket",
    envvar="KVSIDECAR_SOCKET",
    metavar="PATH",
    help="The daemon's Unix socket. [default: the daemon's own default; env: KVSIDECAR_SOCKET]",
)


@main.command()
@_socket_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def status(socket: str | None, as_json: bool) -> None:
    """Show state, pool, namespaces, engines and jobs of the running daemon."""
    import json

    from kvsidecar.client import Client, ClientError
    from kvsidecar.rpc.report import message_json
    from kvsidecar.status_view import print_status

    client = Client(socket, name="kvsidecar status")
    try:
        reply = client.status()
    except ClientError as error:
        _fail(str(error), EXIT_UNAVAILABLE)
    finally:
        client.close()
    if as_json:
        click.echo(json.dumps(message_json(reply), indent=2))
    else:
        print_status(reply)


@main.command()
@click.option("--blocks", default=256, show_default=True, metavar="COUNT", help="KV blocks that engine A stores.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "host"]),
    default="auto",
    show_default=True,
    help="Where the engines' KV lies; auto: on a GPU if there is one.",
)
def demo(blocks: int, device: str) -> None:
    """Store, kill the engine, load into another one, compare every byte.

    Starts a real daemon with a small pool. Engine A (its own process, two tensor-parallel ranks) stores a KV cache
    filled with a pattern and is killed with SIGKILL. Engine B attaches, looks up, loads, and compares. Exits with 1
    if a single byte differs.
    """
    from kvsidecar.demo.run import run

    sys.exit(run(blocks=blocks, device=device))
