"""docs/vllm.md and docs/sglang.md name every option with its default, every counter, and every gauge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.integrations import offload_condition
from kvsidecar.integrations.offload_condition import WhyNot
from kvsidecar.integrations.sglang import counters as sglang
from kvsidecar.integrations.sglang.options import LinkerOptions as SGLangOptions
from kvsidecar.integrations.vllm import counters as vllm
from kvsidecar.integrations.vllm.options import ConnectorOptions as VLLMOptions
from tests.option_tables import rows_of_code, rows_of_page

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("engine", "options"), [("vllm", VLLMOptions), ("sglang", SGLangOptions)])
def test_the_table_of_options_is_that_of_the_code(engine: str, options: Any) -> None:
    assert rows_of_page(DOCS / f"{engine}.md") == rows_of_code(options)


@pytest.mark.parametrize(
    ("engine", "counters", "gauges"),
    [("vllm", vllm.COUNTED, vllm.GAUGES), ("sglang", sglang.HELP, offload_condition.GAUGES)],
)
def test_the_tables_of_counters_and_gauges_are_those_of_the_code(
    engine: str, counters: Mapping[str, str], gauges: Mapping[str, str]
) -> None:
    text = (DOCS / f"{engine}.md").read_text()
    rows = re.findall(rf"^\| `{engine}:kvsidecar_(\w+?)(_total)?` \| (.+) \|$", text, re.MULTILINE)
    assert [(name, said) for name, total, said in rows if total] == list(counters.items())
    assert [(name, said) for name, total, said in rows if not total] == list(gauges.items())


def test_every_reason_for_no_offload_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+\.) \|$", (DOCS / "vllm.md").read_text(), re.MULTILINE)
    assert {each.value for each in WhyNot} <= dict(rows).keys()
