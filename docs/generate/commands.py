"""docs/commands.md, from the command line of `kvsidecar.cli`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from docs.generate.markdown import code, prose, table
from kvsidecar.cli import main

HEAD = """\
<!-- Made by `make docs` from kvsidecar/cli.py: change that. -->
# Commands

What `kvsidecar COMMAND --help` says. [operating.md](operating.md) shows the commands at work, with their
[exit codes](operating.md#exit-codes) in one table.
"""


def commands() -> dict[str, click.Command]:
    """By name, in the order of ``kvsidecar --help``'s source."""
    assert isinstance(main, click.Group)
    return main.commands


def flags_of(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield from parameter.opts
            yield from parameter.secondary_opts


def page() -> str:
    return "\n".join([HEAD, *(_section(name, command) for name, command in commands().items())])


def _section(name: str, command: click.Command) -> str:
    usage = f"kvsidecar {name}"
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    options = [each for each in command.params if isinstance(each, click.Option)]
    for part in ["[OPTIONS]" if options else "", *(argument.make_metavar(click.Context(command)) for argument in arguments)]:
        usage += f" {part}" if part else ""
    text = prose(command.help or "")
    if name == "serve":
        shown = "Its options are in [configuration.md](configuration.md)."
    else:
        shown = table(("Option", "What it does"), [_row(command, option) for option in options])
    return f"## {name}\n\n```\n{usage}\n```\n\n{text}\n\n{shown}\n"


def _row(command: click.Command, option: click.Option) -> tuple[str, str]:
    names, text = option.get_help_record(click.Context(command)) or ("", "")
    return code(re.sub(r"\s+", " ", names)), prose(text)
