"""The longest hit that all KV cache groups support. Pure.

``local`` is the number of a request's tokens in the GPU's prefix cache. With a hit of ``n`` tokens the request
continues after ``local + n`` tokens, when the daemon's blocks are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvsidecar.integrations.vllm.groups import Group, GroupKind


def limit(groups: Sequence[Group], num_tokens: int, local: int) -> int:
    """Most tokens of a hit after ``local``: aligned, and without the last token, which is always computed."""
    alignment = groups[0].alignment
    return max(0, (num_tokens - 1) // alignment * alignment - local)


def limit_inside(groups: Sequence[Group], num_tokens: int) -> int:
    """Most tokens of a request after which a hit may end, even inside a block; 0: in this engine none does."""
    grain = groups[0].grain
    return (num_tokens - 1) // grain * grain if grain else 0


def lookup_range(group: Group, local: int, most: int) -> range:
    """Indices of the blocks to look up for a hit of at most ``most`` tokens after ``local``."""
    end = (local + most) // group.block_tokens
    return range(local // group.block_tokens, end + 1 if group.eagle else end)


def hashes(groups: Sequence[Group], block_hashes: Sequence[bytes], local: int, most: int) -> dict[int, Sequence[bytes]]:
    """The hashes of the blocks in `lookup_range` by group, from a request's hashes."""
    blocks = {group: lookup_range(group, local, most) for group in groups}
    return {group.index: group.hashes(block_hashes, each.start, each.stop) for group, each in blocks.items()}


def hashes_to_go_on(
    groups: Sequence[Group], block_hashes: Sequence[bytes], tokens: Sequence[int], most: int
) -> dict[int, Sequence[bytes]]:
    """The hashes of the blocks, by group, that later requests need to continue this one after so many tokens.

    Args:
        tokens: the numbers of tokens after which requests may continue.
        most: most hashes of a group, the first ones.
    """
    found: dict[int, Sequence[bytes]] = {}
    ends = sorted(end for each in tokens if (end := limit(groups, each, 0)))
    for group in groups:
        blocks = [needed_blocks(group, end, 0) for end in ends]
        if group.chained:
            found[group.index] = group.hashes(block_hashes, 0, min(most, blocks[-1].stop)) if blocks else ()
        else:
            needed = dict.fromkeys(i for each in blocks for i in each)
            found[group.index] = [name for i in needed for name in group.hashes(block_hashes, i, i + 1)][:most]
    return found


def chooses(groups: Sequence[Group]) -> bool:
    """Whether a hit does not need every block of each group, so that the blocks to fetch from a tier must be chosen."""
    return any(group.kind is not GroupKind.FULL for group in groups)


def longest_hit(groups: Sequence[Group], found: Mapping[int, Sequence[bool]], local: int, most: int) -> int:
    """Tokens of the longest hit, a multiple of the alignment; 0 for none.

    Args:
        found: by group, for each block of `lookup_range`, whether the daemon has it. Blocks without a hash yet are
            missing at the end, and count as not found.
        local: a multiple of the alignment. The GPU has the blocks needed to continue after it.
        most: from `limit`.
    """
    alignment = groups[0].alignment
    best = most // alignment * alignment
    others = []
    for group in groups:
        flags = found[group.index]
        if group.kind is GroupKind.FULL:
            run = len(flags) if all(flags) else flags.index(False)
            ready = run - 1 if group.eagle else run
            best = min(best, max(0, ready) * group.block_tokens // alignment * alignment)
        else:
            others.append(group)
    for hit in (best, best - alignment):  # nearly always; a request may end in a block that its windows do not have
        if hit >= 0 and all(_has_needed(group, found[group.index], local, hit) for group in others):
            return hit
    hits = np.arange(best, 0, -alignment)
    for group in others:
        hits = hits[_supported(group, found[group.index], local, hits)]
    return int(hits[0]) if len(hits) else 0


def needed_blocks(group: Group, hit: int, local: int) -> range:
    """Indices of the blocks that a hit of ``hit`` tokens after ``local`` needs besides those that the GPU has."""
    end = (local + hit) // group.block_tokens
    return range(max(local // group.block_tokens, group.first_needed(local + hit)), end + 1 if group.eagle else end)


def _has_needed(group: Group, flags: Sequence[bool], local: int, hit: int) -> bool:
    """Whether a group supports a hit: looks only at the blocks that the hit needs."""
    first, blocks = local // group.block_tokens, needed_blocks(group, hit, local)
    needed = flags[blocks.start - first : max(blocks.start, blocks.stop) - first]
    return len(needed) == len(blocks) and all(needed)


def needed(groups: Sequence[Group], hit: int, local: int, most: int) -> dict[int, list[bool]]:
    """Flags by group for the blocks of `lookup_range`: whether a hit of ``hit`` tokens after ``local`` needs each."""
    flags = {}
    for group in groups:
        blocks = needed_blocks(group, hit, local)
        flags[group.index] = [hit > 0 and each in blocks for each in lookup_range(group, local, most)]
    return flags


def _supported(group: Group, flags: Sequence[bool], local: int, hits: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """The result of `_has_needed` for many hits, all of them above 0."""
    first, tokens = local // group.block_tokens, local + hits
    # For each block, the first block of the run of found blocks that ends with it. The GPU has those before `first`.
    runs = np.maximum.accumulate(np.where(flags, 0, first + 1 + np.arange(len(flags))))
    last, needed = tokens // group.block_tokens - 1 + group.eagle, group.first_needed_of(tokens)
    known = last - first < len(flags)
    supported = np.zeros(len(hits), np.bool_)
    supported[known] = runs[last[known] - first] <= needed[known]
    return supported | (needed > last)
