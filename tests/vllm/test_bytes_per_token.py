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
COPIES = "it has fewer KV heads than ranks, and each rank stores its copy"
MISSES = {
    ("Qwen3.5-397B-A17B", 8): COPIES,
    ("Qwen3-Next-80B-A3B", 8): COPIES,
    ("Nemotron-3-Nano-30B-A3B", 8): COPIES,
    **dict.fromkeys((("Llama-4-Scout", tp) for tp in SIZES), "vLLM caches all chunks, and all of them are stored"),
}
"""Rows in which the pool holds more than it should, and why."""
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
    assert {(row.model, row.tp) for row in SHOWN.rows if row.misses} == MISSES.keys()


def test_a_hit_loads_what_it_needs_once() -> None:
    """Also where the pool holds more, unless the copies of a head are shards of the block."""
    over = {(row.model, row.tp) for row in SHOWN.rows if row.loaded > MOST * row.needed}
    assert over == {row for row, why in MISSES.items() if why == COPIES}
    assert all(row.loaded >= row.needed for row in SHOWN.rows)
