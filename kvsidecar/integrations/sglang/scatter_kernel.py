"""One kernel for all tensors of a chunk, in Triton, which SGLang needs itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

MOST_WORDS = 1024
"""Most words that one program moves at once."""


# Not specialized: a kernel for each combination of alignments would be compiled during loads. Annotations would be
# compiled as well.
@triton.jit(do_not_specialize=["first", "width"], do_not_specialize_on_alignment=["pages"])  # type: ignore
def _move(slots, first, width, pages, table, num_tensors, words_at_once: tl.constexpr):  # type: ignore
    """Program ``[i, t]`` moves the piece of tensor ``t`` from slot ``first + i`` to page ``pages[i]``."""
    tensor = tl.program_id(1)
    address = tl.load(table + tensor)
    page_words = tl.load(table + num_tensors + tensor)
    offset = tl.load(table + 2 * num_tensors + tensor)
    num_words = tl.load(table + 3 * num_tensors + tensor)
    page = tl.load(pages + tl.program_id(0))
    source = slots + (first + tl.program_id(0).to(tl.int64)) * width + offset
    target = address.to(tl.pointer_type(tl.int64)) + page * page_words
    for begin in range(0, num_words, words_at_once):
        words = begin + tl.arange(0, words_at_once)
        inside = words < num_words
        tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


class ScatterKernel:
    """A `kvsidecar.integrations.sglang.scatter.Scatter`.

    Raises:
        Exception: Triton has no compiler here.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        words = [each.shape[1] for each in tensors]
        columns = (
            [each.data_ptr() for each in tensors],
            [each.stride(0) for each in tensors],
            [sum(words[:index]) for index in range(len(words))],
            words,
        )
        self._tensors = tensors  # referenced as long as their addresses are used
        self._table = torch.tensor(columns, dtype=torch.int64, device=slots.device)
        self._slots, self._width = slots, slots.shape[1]
        self._words = min(MOST_WORDS, triton.next_power_of_2(max(words)))
        self(0, torch.empty(0, dtype=torch.int64, device=slots.device))  # compiles it, and moves nothing

    def __call__(self, first: int, pages: torch.Tensor) -> None:
        count = len(self._tensors)
        _move[len(pages), count](self._slots, first, self._width, pages, self._table, count, words_at_once=self._words)
