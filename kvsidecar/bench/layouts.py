"""The KV layouts that are measured: real engines' shapes, each with one name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from kvsidecar.bench.errors import Skipped
from kvsidecar.support.units import KiB, MiB, format_size
from kvsidecar.types import GroupLayout, Namespace, Region

BLOCK_COUNTS = (1, 8, 64, 512)
"""How many blocks a job has."""
IN_FLIGHT = (1, 4)
"""How many jobs are outstanding at a time."""
MOST_BLOCKS = max(BLOCK_COUNTS) * max(IN_FLIGHT)
MANY_BLOCKS = 4096
"""How many blocks layouts with small blocks have, so that they take about as much memory as the others."""


class Form(StrEnum):
    CONTIGUOUS = "contiguous"
    """All bytes of a block are adjacent."""
    STACKED = "stacked"
    """One allocation, ``[rows, blocks, row bytes]``: a constant stride from row to row (vLLM since 0.33)."""
    SEPARATE = "separate"
    """One allocation for each row (vLLM up to 0.32)."""
    PHYSICAL = "physical"
    """Like SEPARATE, in memory of cuMemCreate, as in vLLM's sleep mode: the copier maps it at a constant distance."""

    @property
    def apart(self) -> bool:
        """Whether each row is an allocation."""
        return self in (Form.SEPARATE, Form.PHYSICAL)


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's KV cache of one group."""

    name: str
    form: Form
    rows: int
    row_bytes: int
    what: str
    consecutive: bool = False
    """Whether the block ids of a job are consecutive; otherwise they are random."""
    num_blocks: int = MOST_BLOCKS

    @property
    def block_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.num_blocks

    @property
    def allocation_bytes(self) -> tuple[int, ...]:
        """Sizes of the allocations, in the order in which regions name them."""
        if self.form.apart:
            return (self.row_bytes * self.num_blocks,) * self.rows
        return (self.nbytes,)

    def regions(self) -> tuple[Region, ...]:
        width, stack = self.row_bytes, self.row_bytes * self.num_blocks
        if self.form.apart:
            return tuple(Region(row, 0, width, width, width, 1) for row in range(self.rows))
        if self.form is Form.STACKED:
            return (Region(0, 0, stack, width, width, self.rows),)
        return (Region(0, 0, width, self.block_bytes, width, self.rows),)

    def group(self) -> GroupLayout:
        return GroupLayout(group=0, num_blocks=self.num_blocks, shard=0, num_shards=1, regions=self.regions())

    def namespace(self, run: str) -> Namespace:
        """A namespace for this layout in this run alone: nothing is shared with a real engine."""
        return Namespace(
            model=f"kvsidecar-bench-{run}",
            dtype="uint8",
            kv_layout=f"{self.form}-{self.rows}x{self.row_bytes}",
            block_size=16,
            tp_size=1,
            pp_size=1,
            hash_algorithm="random",
        )

    def extents(self, block: int) -> list[tuple[int, int, int]]:
        """Where a block's rows lie, in order: (allocation, first byte, bytes)."""
        return [
            (region.allocation, region.offset + row * region.row_stride + block * region.block_stride, region.row_bytes)
            for region in self.regions()
            for row in range(region.num_rows)
        ]

    def block_ids(self, count: int, jobs: int, rng: np.random.Generator) -> list[list[int]]:
        """Block ids of several jobs; no two share a block while there are enough."""
        if self.consecutive:
            starts = [job % (self.num_blocks // count) * count for job in range(jobs)]
            return [list(range(start, start + count)) for start in starts]
        ids: list[int] = []
        while len(ids) < count * jobs:
            # Whole rounds only: the ids of one job must differ from each other.
            ids += rng.permutation(self.num_blocks)[: self.num_blocks // count * count].tolist()
        return [ids[job * count : (job + 1) * count] for job in range(jobs)]

    def to_json(self) -> dict[str, Any]:
        """The fields for a process that measures with this layout; it calls `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Layout:
        return cls(**{**fields, "form": Form(fields["form"])})

    def scaled(self, divisor: int) -> Layout:
        """A layout with as many rows, this many times narrower: for a host without room for real ones."""
        return replace(self, row_bytes=max(1, self.row_bytes // divisor))

    def sized(self, free_bytes: int | None = None) -> Layout:
        """The layout with as many of its blocks as fit.

        Args:
            free_bytes: memory of the device; None on the host, where layouts are scaled to fit.

        Raises:
            Skipped: not even one job of the largest size fits.
        """
        if free_bytes is None:
            return replace(self, num_blocks=min(self.num_blocks, MOST_BLOCKS))
        count = self.num_blocks
        while count * self.block_bytes > free_bytes // 2:
            count //= 2
        if count < max(BLOCK_COUNTS):
            need = max(BLOCK_COUNTS) * self.block_bytes * 2
            raise Skipped(
                f"{self.name} needs {format_size(need)} of free GPU memory; {format_size(free_bytes)} are free"
            )
        return replace(self, num_blocks=count)


CONTIGUOUS = Layout("contiguous", Form.CONTIGUOUS, 1, 2 * MiB, "block-contiguous (cross-layer)")
STACKED = Layout("stacked-64k", Form.STACKED, 32, 64 * KiB, "layer-stacked, Llama-3.1-8B (vLLM 0.33)")
LAYOUTS: tuple[Layout, ...] = (
    CONTIGUOUS,
    STACKED,
    Layout("stacked-128k", Form.STACKED, 32, 128 * KiB, "layer-stacked, twice the heads"),
    Layout("separate-64k-consecutive", Form.SEPARATE, 32, 64 * KiB, "one allocation per layer (vLLM 0.26)", True),
    Layout("separate-64k", Form.SEPARATE, 32, 64 * KiB, "one allocation per layer, random ids"),
    Layout("mla-18k", Form.STACKED, 61, 18 * KiB, "layer-stacked MLA, DeepSeek-V3", num_blocks=MANY_BLOCKS),
    Layout("tp8-8k", Form.STACKED, 80, 8 * KiB, "layer-stacked, Llama-70B under TP 8", num_blocks=MANY_BLOCKS),
    Layout("tp8-4k", Form.STACKED, 160, 4 * KiB, "K and V apart, Llama-70B under TP 8", num_blocks=1024),
    # The same in four times the memory: every row of a block lies in another page, and the copy engine waits for its
    # address translation.
    Layout("tp8-4k-wide", Form.STACKED, 160, 4 * KiB, "the same, over 2.5 GiB", num_blocks=MANY_BLOCKS),
)
SMALL_ROWS: tuple[Layout, ...] = tuple(
    Layout(f"{form}-{row_bytes // KiB}k", form, rows, row_bytes, what, num_blocks=num_blocks)
    for rows, row_bytes, num_blocks in (
        (32, 64 * KiB, MOST_BLOCKS),
        (32, 32 * KiB, MANY_BLOCKS),
        (32, 16 * KiB, MANY_BLOCKS),
        (80, 8 * KiB, MANY_BLOCKS),
        (160, 4 * KiB, MANY_BLOCKS),
    )
    for form, what in (
        (Form.STACKED, "all rows in one allocation"),
        (Form.SEPARATE, "one allocation per row"),
        (Form.PHYSICAL, "one allocation of cuMemCreate per row"),
    )
    if f"{form}-{row_bytes // KiB}k" not in {layout.name for layout in LAYOUTS}
)
"""Layouts that compare the forms, for ``--layouts``."""
ALL_LAYOUTS = (*LAYOUTS, *SMALL_ROWS)
TINY = Layout("tiny", Form.CONTIGUOUS, 1, 4 * KiB, "blocks that cost nothing to copy", num_blocks=1024)
"""The layout for measuring the daemon's work, not the link's."""
