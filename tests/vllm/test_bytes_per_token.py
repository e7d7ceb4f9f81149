"""The bytes per token in docs/sizing.md are what the command finds, and the pool holds little more than a hit needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import vllm

from benchmarks.vllm.bytes_table import MOST, Found, Row, markdown
from benchmarks.vllm.published import CONFIGS
from tests.marks import long

QUICK = ("Llama-3.1-8B", "gpt-oss-120b", "Qwen3-Next-80B-A3B")
SIZES = (1, 2, 8)
MISSES = {("Llama-4-Scout", tp) for tp in SIZES}
"""Rows in which the pool holds more than it should: vLLM caches the blocks of all chunks, and all of them are stored. A
request that goes another way in an earlier chunk hits them."""
SHOWN = Found.read()

of_this_vllm = pytest.mark.skipif(
    vllm.__version__.partition("+")[0] != SHOWN.vllm, reason=f"the table is that of vLLM {SHOWN.vllm}"
)


def found(models: Sequence[str], directory: Path) -> tuple[Row, ...]:
    """What the command finds now, in a process of its own: it changes vLLM and torch."""
    results = directory / "found.json"
    command = [sys.executable, "-m", "benchmarks.vllm.bytes_per_token", *models, "--json", str(results)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Found.read(results).rows


def shown(models: Sequence[str]) -> tuple[Row, ...]:
    return tuple(row for row in SHOWN.rows if row.model in models)


@of_this_vllm
def test_some_rows_are_what_the_command_finds(tmp_path: Path) -> None:
    assert set(found(QUICK, tmp_path)) == set(shown(QUICK))


@long
@of_this_vllm
def test_the_other_rows_are_what_the_command_finds(tmp_path: Path) -> None:
    others = [model for model in CONFIGS if model not in QUICK]
    assert found(others, tmp_path) == shown(others)


def test_the_table_has_every_model_on_every_number_of_ranks() -> None:
    assert [(row.model, row.tp) for row in SHOWN.rows] == [(model, tp) for model in CONFIGS for tp in SIZES]
    assert markdown(SHOWN.rows) in Path("docs/sizing.md").read_text()


def test_the_pool_holds_little_more_than_a_hit_needs_except_where_it_is_known_to() -> None:
    assert {(row.model, row.tp) for row in SHOWN.rows if row.misses} == MISSES


def test_a_hit_loads_what_it_needs_once() -> None:
    assert all(row.needed <= row.loaded <= MOST * row.needed for row in SHOWN.rows)
