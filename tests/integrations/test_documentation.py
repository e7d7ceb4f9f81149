"""docs/vllm.md names every option with its default, and every counter."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvsidecar.integrations.vllm.counters import COUNTED, GAUGES
from kvsidecar.integrations.vllm.options import Options

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


def shown(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, float):
        return f'`"{default:g}s"`' if default >= 1 else f'`"{default * 1e3:g}ms"`'
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def test_the_table_of_options_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(each.name, shown(each.default), each.metadata["help"]) for each in fields(Options)]


def test_the_table_of_counters_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `vllm:kvsidecar_(\w+)_total` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == list(COUNTED.items())


def test_the_table_of_gauges_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `vllm:kvsidecar_(\w+)(?<!_total)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == list(GAUGES.items())
