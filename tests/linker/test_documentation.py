"""docs/sglang.md names every option with its default, and every counter."""

from __future__ import annotations

import re
from pathlib import Path

from kvsidecar.integrations.offload_condition import GAUGES
from kvsidecar.integrations.sglang.counters import HELP
from kvsidecar.integrations.sglang.options import Options
from tests.option_tables import rows_of_code, rows_of_page

PAGE = Path(__file__).parents[2] / "docs" / "sglang.md"


def test_the_table_of_options_is_that_of_the_code() -> None:
    assert rows_of_page(PAGE) == rows_of_code(Options)


def test_the_table_of_counters_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `sglang:kvsidecar_(\w+)_total` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == list(HELP.items())


def test_the_table_of_gauges_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `sglang:kvsidecar_(\w+)(?<!_total)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == list(GAUGES.items())
