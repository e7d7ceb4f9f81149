"""The command line. Outside Linux it has only the commands that need no daemon on their own machine."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from kvsidecar import __version__
from kvsidecar.errors import ClientError
from kvsidecar.support import standard_files, terminal
from kvsidecar.support.imports import gc_disabled

with gc_disabled():
    import click

    from kvsidecar.cli.common import EXIT_OUTPUT, EXIT_UNAVAILABLE, fail
    from kvsidecar.cli.operate import commands as operate
    from kvsidecar.cli.size.command import size

    if sys.platform == "linux":
        from kvsidecar.cli import node_commands
        from kvsidecar.daemon.setting_sources import unknown_variable

OF_A_NODE = ("serve", "doctor", "publish", "demo", "bench")
"""The commands of `node_commands`."""
NO_TEXTS = "Python runs without docstrings (-OO, PYTHONOPTIMIZE=2), which say here what each command does."


class _Commands(click.Group):
    """Reports errors that click does not: click is silent when the reader has closed the output, and shows a traceback
    when a disk is full, or for an error whose text is meant for the user."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in OF_A_NODE:
            raise click.UsageError(f"{cmd_name} is for the daemon's machine, which needs Linux: run it there")
        if found is not None and not found.help:
            found.epilog = NO_TEXTS
        return found

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except ClientError as error:
            fail(str(error), EXIT_UNAVAILABLE)
        except OSError:
            try:
                os.write(1, b"\n")  # whether it was that: a disk that is full has no room for this either
            except OSError as error:
                sys.stdout = None  # else the interpreter would retry at exit, and exit with 120
                fail(f"the output cannot be written: {error.strerror}", EXIT_OUTPUT)
            raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="kvsidecar")
def main() -> None:
    """A per-node daemon that keeps LLM engines' KV cache in pinned host memory."""
    standard_files.open_missing()
    terminal.never_fail_to_encode()
    if click.get_current_context().invoked_subcommand not in ("serve", "doctor"):  # these refuse it themselves
        _warn_of_variable()


def _warn_of_variable() -> None:
    """Warn of unknown variables: a mistyped one would be ignored, and the default used."""
    if sys.platform == "linux" and (said := unknown_variable(os.environ)):
        with contextlib.suppress(OSError):
            click.echo(f"kvsidecar: warning: {said}", err=True)


if not main.help:
    main.epilog = NO_TEXTS
for _command in (*operate.COMMANDS, size):
    main.add_command(_command)
if sys.platform == "linux":
    for _command in node_commands.COMMANDS:
        main.add_command(_command)
