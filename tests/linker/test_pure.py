"""What the SGLang linker decides without SGLang and torch."""

from __future__ import annotations

import itertools
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.client import Blocks
from kvsidecar.integrations.sglang import transfers
from kvsidecar.integrations.sglang.groups import KV, MAMBA, SWA, groups_of
from kvsidecar.integrations.sglang.loads import split
from kvsidecar.integrations.sglang.lookups import MOST_LENGTHS, restorable, thinned
from kvsidecar.integrations.sglang.namespace import identity_of
from kvsidecar.integrations.sglang.options import LinkerOptions
from kvsidecar.integrations.sglang.transfers import PageIds, RecentHashes, hashes_of, name_of
from tests.linker.transfers import PoolName, Transfer, keys

# -- groups ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 90), st.integers(1, 12))
def test_chunks_hold_every_layer_once_and_in_order(num_layers: int, num_chunks: int) -> None:
    groups = groups_of([(KV, range(num_layers), False)], num_layers, num_chunks)
    (group,) = groups.all
    assert group.layers == tuple(range(num_layers))
    assert all(groups.chunk_of(layer) == chunk for chunk, layers in group.slices.items() for layer in layers)
    assert groups.num_chunks == min(num_chunks, num_layers) == len(group.slices)
    numbers = [group.slice_of(chunk) for chunk in range(groups.num_chunks)]
    assert numbers == ([0] if groups.num_chunks == 1 else list(range(1, groups.num_chunks + 1)))


@given(st.integers(8, 90), st.integers(4, 8))
def test_the_first_chunks_are_small_and_so_is_the_last_one(num_layers: int, num_chunks: int) -> None:
    (group,) = groups_of([(KV, range(num_layers), False)], num_layers, num_chunks).all
    sizes = [len(layers) for layers in group.slices.values()]
    assert sizes[0] <= sizes[1] <= max(sizes[2:-1])
    assert sizes[-1] <= max(sizes[2:-1])
    for size, after in pairwise(sizes):
        assert after <= 2 * size + 2, "the forward would wait for a chunk that is much larger than the one before"


def test_pools_that_take_turns_share_chunks() -> None:
    """A hybrid model: what the forward needs first comes first, from whichever pool."""
    groups = groups_of([(KV, [2, 5, 8], True), (SWA, [0, 1, 3, 4, 6, 7], False)], 9, 2)
    assert [(each.index, each.pool, each.slices, each.replicated) for each in groups.all] == [
        (0, KV, {0: (2,), 1: (5, 8)}, True),
        (1, SWA, {0: (0, 1), 1: (3, 4, 6, 7)}, False),
    ]
    assert groups.of(MAMBA) is None


def test_a_pool_without_layers_in_a_chunk_has_nothing_to_load_there() -> None:
    groups = groups_of([(KV, [0, 1], False), (MAMBA, [3], False), (SWA, [], False)], 6, 2)
    assert [(each.pool, each.slice_of(0), each.slice_of(1)) for each in groups.all] == [
        (KV, 0, None),
        (MAMBA, None, 0),
    ]


# -- transfers -------------------------------------------------------------------------------------------------------


def test_keys_become_joined_hashes() -> None:
    assert hashes_of(keys(3)) == b"".join(bytes.fromhex(each) for each in keys(3))
    assert hashes_of([]) == b""
    for bad in ("ab", keys(1)[0] + "00", "not hexadecimal" * 4):
        with pytest.raises(ValueError):
            hashes_of([*keys(2), bad])


def test_hashes_that_were_joined_just_now_are_joined_again_however_they_are_named() -> None:
    hashes = RecentHashes()
    a, b = keys(6, "a"), keys(6, "b")
    for each in (a, a[:4], a, b[:5], b, [], a[2:], a[2:5], [*a[2:4], *b[:1]], a[3:5]):
        assert hashes(each) == hashes_of(each)
    hashes(a[:4])
    with mock.patch.object(transfers, "hashes_of", wraps=hashes_of) as converted:
        hashes(a)
    converted.assert_called_once_with(a[4:])


def test_a_list_that_is_changed_later_is_joined_as_it_is_now() -> None:
    hashes, mine = RecentHashes(), keys(3)
    hashes(mine)
    mine += keys(2, "more")
    assert hashes(mine) == hashes_of(mine)
    with pytest.raises(ValueError):
        hashes([*mine, "no hash"])
    assert hashes(mine) == hashes_of(mine)


def test_pages_from_one_on_are_those_of_the_whole_transfer() -> None:
    slots = (np.array([3, 9, 4])[:, None] * 16 + np.arange(16)).ravel()
    ids = PageIds(Transfer(PoolName.KV, keys(3), slots), 16, first=1)
    assert (len(ids), ids.take().tolist()) == (2, [9, 4])
    with pytest.raises(ValueError, match="32 slots for 3 keys"):
        PageIds(Transfer(PoolName.KV, keys(3), slots[:32]), 16, first=1)


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_slots_become_pages(size: int) -> None:
    pages = np.array([7, 3, 4, 9])
    slots = (pages[:, None] * size + np.arange(size)).ravel()
    ids = PageIds(Transfer(PoolName.KV, keys(4), slots), size)
    assert len(ids) == 4
    assert ids.arrived()
    assert ids.take().tolist() == pages.tolist()


def test_a_state_has_one_slot_whatever_the_page_size() -> None:
    transfer = Transfer(PoolName.MAMBA, keys(1), np.array([5]))
    assert name_of(transfer) == MAMBA
    assert PageIds(transfer, 16).take().tolist() == [5]


@pytest.mark.parametrize(
    "slots",
    [list(range(15)), [*range(1, 17)], [*range(8), *range(24, 32)], [*range(16, 31), 33]],
    ids=["too few", "not aligned", "two halves", "a gap"],
)
def test_what_is_not_a_page_is_refused(slots: list[int]) -> None:
    with pytest.raises(ValueError):
        PageIds(Transfer(PoolName.KV, keys(1), np.array(slots)), 16).take()


# -- restorable ------------------------------------------------------------------------------------------------------


def slow(num_pages: int, prefix: int, windows: dict[int, list[list[bool]]]) -> list[int]:
    return [
        length
        for length in range(1, num_pages + 1)
        if length <= prefix
        and all(all(found[max(0, length - window) : length]) for window, all_ in windows.items() for found in all_)
    ]


@given(st.data())
def test_every_restorable_prefix_is_found(data: st.DataObject) -> None:
    pages = data.draw(st.integers(0, 8))
    flags = st.lists(st.booleans(), min_size=pages, max_size=pages)
    windows = data.draw(st.dictionaries(st.integers(1, 4), st.lists(flags, min_size=1, max_size=2), max_size=2))
    prefix = data.draw(st.integers(0, pages))
    assert restorable(pages, prefix, windows) == slow(pages, prefix, windows)


def test_a_window_is_restorable_at_node_ends_only() -> None:
    """The lengths are not one run: the longest of one rank may be impossible on another."""
    window = [True, True, False, False, True, True]
    assert restorable(6, 6, {2: [window]}) == [1, 2, 6]
    assert restorable(6, 5, {2: [window]}) == [1, 2]


@given(st.integers(0, 1 << 17), st.integers(0, 1 << 17))
def test_ranks_that_have_found_different_lengths_have_a_long_one_in_common(one: int, other: int) -> None:
    """They usually find the same. Otherwise one has asked before the last pages of the other were there."""
    found = [thinned(one), thinned(other)]
    for lengths, longest in zip(found, (one, other), strict=True):
        assert lengths[-1:] == ([longest] if longest else [])
        assert len(lengths) <= MOST_LENGTHS + 1
    less, more = sorted((one, other))
    if more < 2 * less:
        common = max(set(found[0]) & set(found[1]), default=0)
        assert common > less - less / 8, "nearly all that both have"


# -- jobs ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 7))
def test_jobs_of_a_limited_size_hold_every_block_once(counts: list[int], most: int) -> None:
    parts = [
        Blocks(group, b"".join(bytes([group, i]) * 16 for i in range(count)), np.arange(count))
        for group, count in enumerate(counts)
        if count
    ]
    jobs = split(parts, most)
    assert all(0 < sum(len(each.block_ids) for each in job) <= most for job in jobs)
    assert all(len({each.group for each in job}) == len(job) for job in jobs), "a group appears twice in one job"
    for part in parts:
        pieces = [each for job in jobs for each in job if each.group == part.group]
        assert b"".join(each.hashes for each in pieces) == part.hashes  # type: ignore[misc]
        assert list(itertools.chain(*(each.block_ids for each in pieces))) == list(part.block_ids)


# -- options ---------------------------------------------------------------------------------------------------------


def test_options_are_read_and_bad_ones_named() -> None:
    assert LinkerOptions.parse({}) == LinkerOptions()
    assert LinkerOptions.parse({"lookup_budget": "2ms"}).lookup_budget == 0.002
    for bad, told in (
        ({"lookup_budge": 1}, "lookup_budge is unknown"),
        ({"load_chunks": 0}, "load_chunks is 0"),
        ({"load_timeout": "1m"}, "lease_seconds is 30.0"),
    ):
        with pytest.raises(ValueError, match=told):
            LinkerOptions.parse(bad)


# -- namespace -------------------------------------------------------------------------------------------------------


def namespace(path: str = "org/model", **different: Any) -> Any:
    arguments = {
        "model_path": path,
        "dtype": "bfloat16",
        "load_format": "auto",
        "random_seed": 1,
        "kv_cache_dtype": "auto",
    }
    options: dict[str, Any] = {
        "hf_config": None, "page_size": 16, "tp_size": 1, "is_eagle": False, "facts": {"SGLang": "1"}, "private": "one",
        "environment": {},
    }  # fmt: skip
    chunks = different.pop("chunks", 4)
    server = SimpleNamespace(**{**arguments, **{k: v for k, v in different.items() if k not in options}})
    given_options = {**options, **{k: v for k, v in different.items() if k in options}}
    return identity_of(server, groups_of([(KV, range(8), False)], 8, chunks), **given_options).namespace


def test_namespaces_are_equal_exactly_where_the_bytes_are() -> None:
    assert namespace() == namespace(random_seed=2), "weights from a checkpoint do not depend on the seed"
    assert namespace() == namespace(chunks=2), "how a page is loaded does not change it"
    assert namespace().problem() is None
    assert namespace() == namespace(port=1, max_running_requests=5, mem_fraction_static=0.5, log_level="debug")
    assert namespace() == namespace(environment={"SGLANG_PORT": "1", "SGLANG_LOG_MS": "1", "HOME": "/"})
    for different in (
        {"path": "org/other"},
        {"context_length": 512},
        {"modelopt_quant": "fp8"},
        {"model_loader_extra_config": '{"a": 1}'},
        {"mm_process_config": {"image": {"max_pixels": 1}}},
        {"argument_of_a_later_version": 1},
        {"environment": {"SGLANG_INT4_WEIGHT": "1"}},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"page_size": 32},
        {"tp_size": 2},
        {"is_eagle": True},
        {"facts": {"SGLang": "2"}},
        {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "org/draft"},
        {"attention_backend": "other"},
    ):
        assert namespace(**different) != namespace(), different
    assert namespace(load_format="dummy") != namespace(load_format="dummy", random_seed=2)


def test_the_scales_of_k_and_v_count_by_what_is_in_their_file(tmp_path: Path) -> None:
    spaces = []
    for name, scale in (("one", 1.0), ("copy", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "scales.json"
        file.write_text(f'{{"kv_cache": {{"scaling_factor": {{"0": {{"0": {scale}}}}}}}}}')
        spaces.append(namespace(quantization_param_path=str(file)))
    assert spaces[0] == spaces[1] != spaces[2]
    file.write_text("{}")
    assert namespace(quantization_param_path=str(file)) != spaces[2], "the same file with other scales"
