"""The pages of docs/ that are made from the code. ``make docs`` writes them; ``make check`` fails if they differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.generate import api, commands, configuration, helm, messages, metrics, recipes, sizing

DOCS = Path(__file__).parents[1]

PAGES: dict[str, Callable[[], str]] = {
    "api.md": api.page,
    "commands.md": commands.page,
    "configuration.md": configuration.page,
    "../deploy/helm/kvsidecar/values.schema.json": helm.schema,
    "helm.md": helm.page,
    "messages.md": messages.page,
    "metrics.md": metrics.page,
    "recipes.md": recipes.page,
    "sizing.md": sizing.page,
}
"""File name -> what makes its text."""
