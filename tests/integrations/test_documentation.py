"""docs/vllm.md names every option with its default, and every counter."""

from __future__ import annotations

import re
from pathlib import Path

from kvsidecar.integrations.offload_condition import WhyNot
from kvsidecar.integrations.vllm.counters import COUNTED, GAUGES
from kvsidecar.integrations.vllm.options import Options
from tests.option_tables import rows_of_code, rows_of_page

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_the_table_of_options_is_that_of_the_code() -> None:
    assert rows_of_page(PAGE) == rows_of_code(Options)


def test_the_table_of_counters_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `vllm:kvsidecar_(\w+)_total` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == list(COUNTED.items())


def test_the_table_of_gauges_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `vllm:kvsidecar_(\w+)(?<!_total)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == list(GAUGES.items())


def test_every_reason_for_no_offload_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+\.) \|$", PAGE.read_text(), re.MULTILINE)
    assert {each.value for each in WhyNot} <= dict(rows).keys()
