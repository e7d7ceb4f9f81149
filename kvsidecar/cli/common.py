"""Shared by the commands: exit codes, and options that choose the daemon."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from kvsidecar.client import Client, RemoteClient

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

EXIT_FAILED = 1
"""The daemon answers, and has failed."""
EXIT_UNAVAILABLE = 69
"""sysexits.h EX_UNAVAILABLE: no usable driver, or no daemon answers."""
EXIT_SOCKET = 73
"""sysexits.h EX_CANTCREAT: another daemon serves the socket."""
EXIT_OUTPUT = 74
"""sysexits.h EX_IOERR: a command's output cannot be written."""
EXIT_AGAIN = 75
"""sysexits.h EX_TEMPFAIL: a port is in use; a restart may help."""
EXIT_DENIED = 77
"""sysexits.h EX_NOPERM: this user may not do this, or may not open the daemon's socket."""
EXIT_CONFIG = 78
"""sysexits.h EX_CONFIG: a setting is invalid; a restart will not help."""


def _client(where: dict[str, str | None], name: str, timeout: float) -> Client | RemoteClient:
    """A client for the daemon that the options select."""
    from kvsidecar.client import ClientError, RemoteClient, Tls

    address, tls = where["connect"], {option: where[f"connect_{option}"] for option in ("ca", "certificate", "key")}
    if _was_given("socket") and _was_given("connect"):
        raise click.UsageError("give either --socket or --connect")
    if address is None or _was_given("socket"):
        if given := [option for option in tls if _was_given(f"connect_{option}")]:
            raise click.UsageError(f"--connect-{given[0]} requires --connect")
        if sys.platform != "linux":
            raise click.UsageError(
                "a daemon needs Linux, so it is on another machine: name it with --connect HOST:PORT"
            )
        from kvsidecar.client import Client

        return Client(where["socket"], name=name, timeout=timeout)
    if missing := [option for option, path in tls.items() if not path]:
        raise click.UsageError(f"--connect needs --connect-{missing[0]}: TCP is served with mTLS only")
    try:
        return RemoteClient(address, Tls(**{option: str(path) for option, path in tls.items()}), timeout=timeout)
    except ClientError as error:
        fail(str(error), EXIT_CONFIG)


def _was_given(option: str) -> bool:
    """Whether the option was given as a flag, not by the environment."""
    return click.get_current_context().get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE


ANSWER_SECONDS = 10.0
"""How long a command waits for an answer: a daemon on a busy node may be slow without being down. If none runs, the
command fails at once."""


@contextmanager
def connected(
    where: dict[str, str | None], name: str, timeout: float = ANSWER_SECONDS
) -> Iterator[Client | RemoteClient]:
    """A client for the daemon that the options select. Exits if the daemon does not answer or refuses the request."""
    from kvsidecar.client import ClientError, RequestDenied, SocketDenied

    with _client(where, name, timeout) as client:
        try:
            yield client
        except ClientError as error:
            fail(str(error), EXIT_DENIED if isinstance(error, RequestDenied | SocketDenied) else EXIT_UNAVAILABLE)


def fail(message: str, code: int) -> NoReturn:
    try:
        click.echo(f"kvsidecar: {message}", err=True)
    except OSError:  # the reader is gone or the disk is full; the exit code remains
        sys.stderr = None  # else the interpreter would retry at exit, and exit with 120
    sys.exit(code)


def env_option(flag: str, metavar: str | None, text: str, *, of: str = "", unset: str = "", **more: Any) -> Decorator:
    """An option that may also be given by a variable, which the help names.

    Args:
        of: the part of the variable's name between KVSIDECAR_ and the flag's.
        unset: the value if neither is given, for the help.
    """
    variable = f"KVSIDECAR_{of}{flag.removeprefix('--').replace('-', '_').upper()}"
    default = f"default: {unset}; " if unset else ""
    return click.option(flag, metavar=metavar, help=f"{text} [{default}env: {variable}]", envvar=variable, **more)


socket_option = env_option("--socket", "PATH", "The daemon's Unix socket.", unset="as for serve")
_CONNECT = (
    ("--connect", "HOST:PORT", "Address of a daemon on another host, reached over TCP with mTLS."),
    ("--connect-ca", "PATH", "CA bundle that the daemon's certificate is verified against, as a PEM file."),
    ("--connect-certificate", "PATH", "Client certificate, as a PEM file. The daemon's policy must name it."),
    ("--connect-key", "PATH", "Private key of the client certificate, as a PEM file."),
)


def daemon_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that choose a daemon: --socket on this host, --connect for another host."""
    for option in reversed(_CONNECT):
        command = env_option(*option)(command)
    return socket_option(command)
