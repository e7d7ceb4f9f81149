"""Pieces of pages, moved from the staging memory by torch and by a kernel, which Triton interprets without a GPU."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvsidecar.integrations.sglang.scatter import ScatterByTensor, scatter_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNEL = "kvsidecar.integrations.sglang.scatter_kernel"
WIDTHS = (8, 3, 1500)
"""Words of a piece; the last one takes a program of the kernel two steps."""
NUM_PAGES = 20


@pytest.fixture
def scatter_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    import kvsidecar.integrations.sglang.scatter_kernel as module

    yield module.ScatterKernel
    if DEVICE == "cpu":
        sys.modules.pop(KERNEL, None)


def memory() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Empty tensors, of which pages have gaps between them, and full slots."""
    tensors = [torch.zeros(NUM_PAGES, 2 * each, dtype=torch.int64, device=DEVICE)[:, :each] for each in WIDTHS]
    return tensors, torch.randint(1, 1 << 60, (7, sum(WIDTHS)), device=DEVICE)


@pytest.mark.parametrize("kind", ["torch", "kernel"])
def test_each_piece_comes_to_its_page_and_no_other_page_is_touched(kind: str, request: pytest.FixtureRequest) -> None:
    tensors, slots = memory()
    make = ScatterByTensor if kind == "torch" else request.getfixturevalue("scatter_kernel")
    scatter = make(tensors, slots)
    assert not any(bool(each.any()) for each in tensors), "nothing is moved yet"
    pages = torch.tensor([0, 5, 3, 19], device=DEVICE)
    for first, mine in ((2, pages[1:]), (6, pages[:1])):  # numbers of pages of another alignment than their start
        scatter(first, mine)
    expected = [torch.zeros_like(each) for each in tensors]
    for slot, page in ((2, 5), (3, 3), (4, 19), (6, 0)):
        for each, words in zip(expected, slots[slot].split(WIDTHS), strict=True):
            each[page] = words
    assert all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_can_be_compiled(capability: int) -> None:
    """Triton's interpreter takes what its compiler does not. Needs no GPU."""
    from kvsidecar.integrations.sglang.scatter_kernel import _move

    types = {"slots": "*i64", "first": "i32", "width": "i32", "pages": "*i64", "table": "*i64", "num_tensors": "i32"}
    source = ASTSource(_move, {**types, "words_at_once": "constexpr"}, constexprs={"words_at_once": 256})
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


def test_on_a_gpu_it_is_one_kernel_unless_triton_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, slots = memory()
    if DEVICE == "cuda":
        assert type(scatter_for(tensors, slots)).__name__ == "ScatterKernel"
    monkeypatch.setitem(sys.modules, KERNEL, None)
    assert isinstance(scatter_for(tensors, slots), ScatterByTensor)
