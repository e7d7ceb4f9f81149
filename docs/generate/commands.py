"""docs/commands.md, from the command line of `kvsidecar.cli.main`.

sphinx-click and mkdocs-click were tried, and are worse to read: the first makes a page three times as long, which
GitHub does not show, repeats each variable, and has the options of serve in full beside configuration.md; the second
shows types instead of values, and click's own marker as the default of an option that has none.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from docs.generate.markdown import code, prose, table
from kvsidecar.cli.main import main

HEAD = """\
<!-- Made by `make docs` from kvsidecar/cli/main.py: change that. -->
# Commands

The output of `kvsidecar COMMAND --help`. [operating.md](operating.md) shows the commands in use, and lists all
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
    options = [each for each in command.params if isinstance(each, click.Option)]
    arguments = [str(each.metavar) for each in command.params if isinstance(each, click.Argument)]
    usage = " ".join(["kvsidecar", name, *(["[OPTION...]"] if options else []), *arguments])
    shown = table(("Option", "What it does"), map(_row, options))
    if name == "serve":
        shown = "Its options are in [configuration.md](configuration.md)."
    return f"## {name}\n\n```\n{usage}\n```\n\n{prose(command.help or '')}\n\n{shown}\n"


def _row(option: click.Option) -> tuple[str, str]:
    # Not click's own text of an option: it changes from release to release.
    metavar = "" if option.is_flag else option.metavar or _values(option.type)
    text = prose(option.help or "")
    if option.show_default and not option.is_flag:
        text += f" [default: {option.default}]"
    return code(" ".join([*option.opts, *([metavar] if metavar else [])])), text


def _values(kind: click.ParamType) -> str:
    return "|".join(kind.choices) if isinstance(kind, click.Choice) else "NUMBER"
