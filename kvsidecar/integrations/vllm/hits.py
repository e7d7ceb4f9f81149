"""The longest hit that all KV cache groups support. Pure.

``local`` is the number of a request's tokens in the GPU's prefix cache. With a hit of ``n`` tokens the request
continues after ``local + n`` tokens, when the daemon's blocks are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvsidecar.integrations.vllm.groups import Group, Kind


def limit(groups: Sequence[Group], num_tokens: int, local: int) -> int:
    """Most tokens of a hit after ``local``: aligned, and without the last token, which is always computed."""
    alignment = groups[0].alignment
    return max(0, (num_tokens - 1) // alignment * alignment - local)


def lookup_range(group: Group, local: int, most: int) -> range:
    """Indices of the blocks to look up for a hit of at most ``most`` tokens after ``local``."""
    end = (local + most) // group.block_tokens
    return range(local // group.block_tokens, end + 1 if group.eagle else end)


def hashes(groups: Sequence[Group], block_hashes: Sequence[bytes], local: int, most: int) -> dict[int, Sequence[bytes]]:
    """By group: the hashes of the blocks in `lookup_range`, from a request's hashes."""
    blocks = {group: lookup_range(group, local, most) for group in groups}
    return {group.index: group.hashes(block_hashes, each.start, each.stop) for group, each in blocks.items()}


def chooses(groups: Sequence[Group]) -> bool:
    """Whether a hit does not need every block of each group, so that what is fetched from a tier is to be chosen."""
    return any(group.kind is not Kind.FULL for group in groups)


def packed(hashes: Mapping[int, Sequence[bytes]]) -> dict[int, bytes]:
    """Join the hashes of each group."""
    return {index: b"".join(each) for index, each in hashes.items()}


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
    # By group: for each block, the first block of the run of found blocks that ends with it.
    runs: dict[int, list[int]] = {}
    for group in groups:
        flags = found[group.index]
        first = local // group.block_tokens
        if group.kind is Kind.FULL:
            run = next((i for i, flag in enumerate(flags) if not flag), len(flags))
            ready = run - 1 if group.eagle else run
            best = min(best, max(0, ready) * group.block_tokens // alignment * alignment)
        else:
            starts, start = [], 0  # the GPU has the blocks before `local`
            for i, flag in enumerate(flags):
                if not flag:
                    start = first + i + 1
                starts.append(start)
            runs[group.index] = starts
    others = [group for group in groups if group.kind is not Kind.FULL]
    while best > 0 and not all(_supports(group, runs[group.index], local, best) for group in others):
        best -= alignment
    return best


def needed(groups: Sequence[Group], hit: int, local: int, most: int) -> dict[int, list[bool]]:
    """By group: for each block of `lookup_range`, whether a hit of ``hit`` tokens after ``local`` needs it."""
    flags = {}
    for group in groups:
        blocks = lookup_range(group, local, most)
        last = (local + hit) // group.block_tokens - 1
        first = group.first_needed(local + hit)
        if group.eagle:
            last += 1
        flags[group.index] = [hit > 0 and first <= each <= last for each in blocks]
    return flags


def _supports(group: Group, starts: Sequence[int], local: int, hit: int) -> bool:
    tokens = local + hit
    first = local // group.block_tokens
    last = tokens // group.block_tokens - 1
    needed = group.first_needed(tokens)
    if group.eagle:
        last += 1
    elif needed > last:
        return True
    return last - first < len(starts) and starts[last - first] <= needed
