"""docs/helm.md's table of values, and the chart's schema, from deploy/helm/kvsidecar/values.yaml and its comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from docs.generate.markdown import code, table
from kvsidecar.daemon.setting_sources import click_options
from kvsidecar.daemon.settings import Settings

VALUES = Path(__file__).parents[2] / "deploy" / "helm" / "kvsidecar" / "values.yaml"
OPEN = {"nodeSelector", "podLabels", "podAnnotations", "annotations", "affinity", "volume", "modelCache"}
"""Values that are Kubernetes' own: any key may be in them."""

HEAD = Path(__file__).with_name("helm.md")
"""What is above the table."""

SIZE = "([0-9]{4,}|[0-9]+([.][0-9]+)?[KMGTkmgt]i?[Bb]?)"
"""What the daemon takes for a size, but no handful of bytes: that is a size without its unit."""
PERCENT = "[0-9]+([.][0-9]+)?%"
QUANTITY = "([0-9]+([.][0-9]+)?(Ki|Mi|Gi|Ti|M|G|T))"
"""What Kubernetes takes for an amount of memory, with the units of which a pool can be."""
NUMBERS = {"type": ["integer", "string"], "pattern": "^[0-9]+$"}
CPUS = {"type": ["number", "string"], "pattern": "^([0-9]+([.][0-9]+)?|[0-9]+m)$"}


def _text(pattern: str, **beside: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^({pattern})$", **beside}


FORMS: dict[str, dict[str, Any]] = {
    "mode": {"enum": ["daemonset", "sidecar"]},
    "podSecurity": {"enum": ["privileged", "baseline"]},
    "fullnameOverride": _text("|[a-z]([-a-z0-9]{0,51}[a-z0-9])?"),
    "image.tag": {"type": ["string", "integer"]},
    "image.pullPolicy": {"enum": ["", "Always", "IfNotPresent", "Never"]},
    "engine.image.tag": {"type": ["string", "integer"]},
    "pool.size": _text(f"{PERCENT}|{SIZE}"),
    "pool.memory": _text(f"|{QUANTITY}"),
    "pool.hugePages.size": _text(QUANTITY),
    "pool.hugePages.memory": _text(QUANTITY),
    "tiers.disk.size": _text(f"|{SIZE}"),
    "tiers.shared.size": _text(f"|{SIZE}"),
    "engine.gpus": NUMBERS,
    **{f"{each}.cpu": CPUS for each in ("pool", "engine", "publisher")},
    **{f"{each}.memory": _text(QUANTITY) for each in ("engine", "publisher")},
    **{
        f"{each}resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"requests": {"type": "object"}, "limits": {"type": "object"}},
        }
        for each in ("", "engine.", "publisher.")
    },
}
"""Of values whose default does not say what else they may be."""


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
    """values.schema.json: an unknown name is refused, a wrong type, and a value that the daemon or Kubernetes would."""
    made = _schema_of("", yaml.safe_load(VALUES.read_text()))
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["properties"]["settings"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            str(option.name): _setting(str(option.metavar))
            for option in click_options()
            if option.name in Settings.model_fields
        },
    }
    made["properties"]["global"] = {"type": "object"}  # of a chart that this one is part of
    return json.dumps(made, indent=2) + "\n"


def _setting(metavar: str) -> dict[str, Any]:
    """Of an option of the daemon, by what ``--help`` says that it takes."""
    words = metavar.split("|")
    if metavar == "on|off":
        return {"enum": ["on", "off", "true", "false", True, False]}
    if "SIZE" in words:
        patterns = {"SIZE": SIZE, "PERCENT": PERCENT}
        text = "|".join(patterns.get(word, word) for word in words)
        return _text(text) | {"type": ["string", "integer"], "minimum": 1000}
    if metavar in ("PORT", "COUNT"):
        return NUMBERS
    if metavar == "SECONDS":
        return {"type": ["number", "string"], "minimum": 0, "pattern": "^[0-9]*[.]?[0-9]+$"}
    if metavar == "LIST|all":
        return {"type": ["string", "integer"]}
    return {"type": "string"} if metavar.isupper() else {"enum": words}


def _schema_of(name: str, value: Any) -> dict[str, Any]:
    if name in FORMS:
        return FORMS[name]
    if isinstance(value, dict):
        made: dict[str, Any] = {"type": "object"}
        if name.rpartition(".")[2] not in OPEN:
            made |= {
                "additionalProperties": False,
                "properties": {key: _schema_of(f"{name}.{key}".lstrip("."), each) for key, each in value.items()},
            }
        return made
    if isinstance(value, list):
        return {"type": "array"}
    return {"type": {bool: "boolean", int: "integer", str: "string"}[type(value)]}
