"""docs/helm.md's table of values, and the chart's schema, from deploy/helm/kvsidecar/values.yaml and its comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from docs.generate.markdown import code, table
from kvsidecar.daemon.settings import Settings

VALUES = Path(__file__).parents[2] / "deploy" / "helm" / "kvsidecar" / "values.yaml"
OPEN = {"nodeSelector", "podLabels", "podAnnotations", "affinity", "volume", "modelCache"}
"""Values that are Kubernetes' own: any key may be in them."""
CHOICES = {"mode": ["daemonset", "sidecar"], "podSecurity": ["privileged", "baseline"]}

HEAD = Path(__file__).with_name("helm.md")
"""What is above the table."""


def values() -> Iterator[tuple[str, Any, str]]:
    """(dotted name, default, what the comment says) of every value with a comment."""
    path: list[str] = []
    said: list[str] = []
    defaults = yaml.safe_load(VALUES.read_text())
    for line in VALUES.read_text().splitlines():
        if comment := re.fullmatch(r" *# (?:-- )?(.*)", line):
            said = [comment[1]] if "# -- " in line else [*said, comment[1]]
        elif key := re.fullmatch(r"( *)(\w+):.*", line):
            path = [*path[: len(key[1]) // 2], key[2]]
            if said:
                value = defaults
                for name in path:
                    value = value[name]
                yield ".".join(path), value, " ".join(said)
            said = []


def page() -> str:
    rows = [(code(name), code(json.dumps(default)), said) for name, default, said in values()]
    return HEAD.read_text() + table(("Value", "Default", "What it does"), rows) + "\n"


def schema() -> str:
    """values.schema.json: an unknown name is refused, and a wrong type."""
    made = _schema_of("", yaml.safe_load(VALUES.read_text()))
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["properties"]["settings"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {"type": "string"} for name in Settings.model_fields},
    }
    made["properties"]["global"] = {"type": "object"}  # of a chart that this one is part of
    return json.dumps(made, indent=2) + "\n"


def _schema_of(name: str, value: Any) -> dict[str, Any]:
    if name in CHOICES:
        return {"enum": CHOICES[name]}
    if isinstance(value, dict):
        made: dict[str, Any] = {"type": "object"}
        if name not in OPEN:
            made |= {
                "additionalProperties": False,
                "properties": {key: _schema_of(key, each) for key, each in value.items()},
            }
        return made
    if isinstance(value, list):
        return {"type": "array"}
    return {"type": {bool: "boolean", int: "integer", str: "string"}[type(value)]}
