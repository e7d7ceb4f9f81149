"""What the engine knows of its adapters' content, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.integrations.vllm.adapters import ATTRIBUTE, WAIT_STEPS, AdapterLoad, AdapterLoads, Adapters, files_of

Reports = dict[int, tuple[AdapterLoad, ...]]


@dataclass
class Lora:
    lora_int_id: int = 1


@dataclass
class Request:
    """As vLLM's, with the identity itself in place of hashes that contain it."""

    request_id: str = "r"
    lora_request: Lora | None = field(default_factory=Lora)
    block_hashes: list[Any] = field(default_factory=list)

    def update_block_hashes(self) -> None:
        self.block_hashes.append(getattr(self, ATTRIBUTE))


def loaded(digest: str, number: int = 1, lora_id: int = 1, ranks: int = 1) -> Reports:
    return {rank: (AdapterLoad(lora_id, number, digest),) for rank in range(ranks)}


def unused(identity: str) -> bool:
    return False


def used(identity: str) -> bool:
    return True


def settled(adapters: Adapters) -> Request:
    request = Request()
    assert adapters.settle(request)
    return request


def test_a_request_shares_only_what_all_ranks_have_loaded() -> None:
    adapters = Adapters(2)
    adapters.take_report({0: (AdapterLoad(1, 1, "a"),)}, unused)
    assert adapters.identity(1) is None
    assert not adapters.settle(Request())
    adapters.take_report({1: (AdapterLoad(1, 1, "a"),)}, unused)
    assert adapters.identity(1) == "a"
    request = settled(adapters)
    assert request.block_hashes == ["a"]
    assert adapters.may_share(request)
    assert not adapters.settle(request), "once"
    assert adapters.may_share(Request(lora_request=None))


def test_ranks_with_other_parts_have_a_common_identity() -> None:
    adapters, others = Adapters(2), Adapters(2)
    adapters.take_report({0: (AdapterLoad(1, 1, "a"),), 1: (AdapterLoad(1, 1, "b"),)}, unused)
    others.take_report({1: (AdapterLoad(7, 1, "b"),), 0: (AdapterLoad(7, 1, "a"),)}, unused)
    assert adapters.identity(1) == others.identity(7)
    others.take_report({0: (AdapterLoad(7, 2, "b"),), 1: (AdapterLoad(7, 2, "a"),)}, unused)
    assert adapters.identity(1) != others.identity(7)


def test_a_request_waits_for_a_report_that_may_be_under_way_and_no_longer() -> None:
    adapters, request = Adapters(1), Request()
    for _ in range(WAIT_STEPS + 1):
        assert adapters.waits(request)
        adapters.new_step()
    assert not adapters.waits(request)
    assert not adapters.waits(Request("another")), "the adapter is not loaded, or this vLLM does not say so"
    assert not adapters.may_share(request)
    adapters.loading(1, inplace=False)
    assert adapters.waits(request)
    adapters.take_report(loaded("a"), unused)
    assert not adapters.waits(Request("next"))


def test_a_request_whose_adapter_was_replaced_does_not_share_and_the_next_does() -> None:
    adapters = Adapters(1)
    adapters.take_report(loaded("a"), unused)
    request = settled(adapters)
    assert not adapters.take_report(loaded("b", 2), unused)
    assert not adapters.may_share(request)
    assert adapters.may_share(settled(adapters))
    assert adapters.changes == 1


@pytest.mark.parametrize("ended", [False, True])
def test_content_that_requests_have_mixed_with_other_is_shared_by_nobody_until_a_reset(ended: bool) -> None:
    adapters = Adapters(1)
    adapters.take_report(loaded("a"), unused)
    request = settled(adapters)
    if ended:
        adapters.ended(request)
    assert adapters.take_report(loaded("b", 2), unused if ended else used)
    adapters.take_report(loaded("a", 3), unused)
    again = settled(adapters)
    assert again.block_hashes not in (["a"], ["b"]), "vLLM's own cache does not mix them either"
    assert not adapters.may_share(again)
    adapters.reset()
    assert adapters.may_share(settled(adapters))


def test_content_of_requests_that_ended_long_ago_is_not_mixed() -> None:
    adapters = Adapters(1)
    adapters.take_report(loaded("a"), unused)
    adapters.ended(settled(adapters))
    for _ in range(WAIT_STEPS + 2):
        adapters.new_step()
    assert not adapters.take_report(loaded("b", 2), unused)


def test_while_an_adapter_is_loaded_in_place_its_content_is_unknown() -> None:
    adapters = Adapters(1)
    adapters.take_report(loaded("a"), unused)
    adapters.loading(1, inplace=True)
    assert adapters.identity(1) is None
    assert not adapters.take_report(loaded("a"), used), "the same content again"
    assert adapters.identity(1) == "a"
    adapters.loading(1, inplace=True)
    assert adapters.take_report(loaded("b", 2), used)
    assert adapters.identity(1) == "b"
    adapters.loading(1, inplace=True)
    adapters.not_loaded(1)
    assert adapters.identity(1) == "b", "the load failed"


def test_without_identities_in_the_hashes_nothing_is_shared() -> None:
    adapters, request = Adapters(1, in_hashes=False), Request()
    adapters.take_report(loaded("a"), unused)
    assert not adapters.settle(request)
    assert not adapters.waits(request)
    assert not adapters.may_share(request)


def test_a_rank_reports_each_change_once_and_each_load_in_place() -> None:
    loads = AdapterLoads()
    loads.add(1, "a")
    loads.add(1, "a")  # evicted, and loaded again
    assert loads.take() == (AdapterLoad(1, 1, "a"),)
    loads.add(1, "a", reread=True)
    assert loads.take() == (AdapterLoad(1, 1, "a"),)
    assert loads.changes == 0
    loads.add(1, "b")
    assert loads.take() == (AdapterLoad(1, 2, "b"),)
    assert not loads.take()
    assert loads.changes == 1


def test_an_evicted_adapter_is_kept_while_its_files_stay(tmp_path: Path) -> None:
    resident = {1}
    loads = AdapterLoads(resident.__contains__)
    (tmp_path / "weights").write_text("a")
    loads.add(1, "a", str(tmp_path), files_of(str(tmp_path)))
    loads.add(2, "b", "hub/name", files_of("hub/name"))
    loads.add(3, "c", str(tmp_path), files_of(str(tmp_path)), reread=True)
    resident |= {2, 3}
    assert all(map(loads.keeps, (1, 2, 3)))
    (tmp_path / "weights").write_text("longer")
    assert loads.keeps(1)
    assert not loads.keeps(3), "each step reads the files"
    resident.clear()
    assert not loads.keeps(1)
    assert not loads.keeps(2), "who knows what the hub has now"
    assert not loads.keeps(4)
