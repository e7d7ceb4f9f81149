"""docs/commands.md, from the command line of `kvsidecar.cli.main`, by mkdocs-click: what ``--help`` says.

Not sphinx-click: GitHub would show nothing of its page.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import os
from unittest import mock

import click

# Its public door makes HTML.
from mkdocs_click._docs import make_command_docs

from kvsidecar.cli.main import main

HEAD = """\
<!-- Made by `make docs` from kvsidecar/cli: change that. -->
# Commands

The output of `kvsidecar COMMAND --help`. [operating.md](operating.md) shows the commands in use, and lists all
[exit codes](operating.md#exit-codes) in one table.
"""
SERVE = "Its options are in [configuration.md](configuration.md)."


def page() -> str:
    with mock.patch.dict(os.environ, COLUMNS="100"):  # what a page shows without scrolling
        lines = make_command_docs("kvsidecar", _with_short_serve())
        text = "\n".join(itertools.dropwhile(lambda line: not line.startswith("## "), lines))
    return f"{HEAD}\n{text.rstrip()}\n"


def _with_short_serve() -> click.Group:
    """All commands, serve without its options."""
    group = copy.copy(main)
    assert isinstance(group, click.Group)
    serve = copy.copy(group.commands["serve"])
    serve.params = []
    serve.help = "\n\n".join([inspect.cleandoc(serve.help or ""), SERVE])
    group.commands = {**group.commands, "serve": serve}
    return group
