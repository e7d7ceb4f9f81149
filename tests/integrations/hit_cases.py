"""Hits of groups, and what of them can be used."""

from __future__ import annotations

from hypothesis import strategies as st

from kvsidecar.integrations.vllm.groups import Group, Kind
from kvsidecar.integrations.vllm.hits import limit, lookup_range
from tests.integrations.engine import group


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Group], dict[int, list[bool]], int, int]:
    alignment = draw(st.sampled_from([4, 8]))
    groups = []
    for index in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(Kind))
        block_tokens = draw(st.sampled_from([each for each in (2, 4, 8) if alignment % each == 0]))
        window = draw(st.integers(1, 20)) if kind in (Kind.SLIDING_WINDOW, Kind.CHUNKED_LOCAL) else 0
        eagle = kind in (Kind.FULL, Kind.SLIDING_WINDOW) and draw(st.booleans())
        groups.append(group(index, kind, block_tokens, hash_tokens=2, alignment=alignment, window=window, eagle=eagle))
    local = draw(st.integers(0, 3)) * alignment
    num_tokens = local + draw(st.integers(1, 40))
    most = limit(groups, num_tokens, local)
    found = {}
    for each in groups:
        blocks = lookup_range(each, local, most)
        # A block has a hash when all of its tokens are known.
        blocks = range(blocks.start, max(blocks.start, min(blocks.stop, num_tokens // each.block_tokens)))
        found[each.index] = draw(st.lists(st.integers(0, 4).map(bool), min_size=len(blocks), max_size=len(blocks)))
    return groups, found, local, most
