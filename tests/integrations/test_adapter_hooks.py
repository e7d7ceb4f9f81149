"""The functions of vLLM that are wrapped, with vLLM's own requests, adapters and engine core."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from kvsidecar.integrations.vllm import adapter_hooks
from kvsidecar.integrations.vllm.adapters import AdapterLoad, Adapters

kv_cache_utils.init_none_hash(sha256)
HASHER = kv_cache_utils.get_request_block_hasher(4, sha256)

ATTENTION = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def _unwrapped() -> Iterator[None]:
    """A test process may go on with engines of its own."""
    yield
    for owner, name in ((kv_cache_utils, "generate_block_hash_extra_keys"), (EngineCore, "add_lora")):
        setattr(owner, name, inspect.unwrap(getattr(owner, name)))


def request(name: str | None = "tuned", path: str = "/a", **values: Any) -> Request:
    adapter = LoRARequest(name, 1, path) if name is not None else None
    return Request("r", list(range(12)), SamplingParams(), None, lora_request=adapter, block_hasher=HASHER, **values)


def known(digest: str) -> Adapters:
    adapters = Adapters(1)
    adapters.take_report({0: (AdapterLoad(1, 1, digest),)}, lambda identity: False)
    return adapters


def test_hashes_contain_the_content_in_place_of_name_and_path() -> None:
    base, by_name = request(None).block_hashes, request().block_hashes
    first = known("content")
    assert adapter_hooks.hash_by_content(first)
    by_content = request().block_hashes
    assert by_content not in (base, by_name)
    assert request("other", "/b").block_hashes == by_content
    assert request(cache_salt="s").block_hashes != by_content
    assert request(None).block_hashes == base
    second = known("other content")
    assert adapter_hooks.hash_by_content(second)
    assert request().block_hashes != by_content
    del second
    assert request().block_hashes == by_name, "an engine without the connector, in the same process"


def test_hashes_of_unknown_content_are_the_engines_own_until_the_request_is_settled() -> None:
    adapters = Adapters(1)
    assert adapter_hooks.hash_by_content(adapters)
    unknown = request()
    assert unknown.block_hashes == request().block_hashes
    assert unknown.block_hashes != request(path="/b").block_hashes, "as vLLM tells them apart"
    adapters.take_report({0: (AdapterLoad(1, 1, "content"),)}, lambda identity: False)
    before = list(unknown.block_hashes)
    unknown.append_output_token_ids([1, 2, 3, 4])
    assert unknown.block_hashes[:-1] == before
    later = request()
    later.append_output_token_ids([1, 2, 3, 4])
    assert unknown.block_hashes[-1] != later.block_hashes[-1], "a request keeps what its hashes began with"
    assert adapters.settle(unknown)
    assert unknown.block_hashes == later.block_hashes
    other_run = Adapters(1)
    assert adapter_hooks.hash_by_content(other_run)
    assert request().block_hashes != before


def test_events_still_name_the_adapter() -> None:
    adapters = known("content")
    assert adapter_hooks.hash_by_content(adapters)
    assert kv_cache_utils.generate_block_hash_extra_keys(request(), 0, 4, 0)[0] == (("kvsidecar", "content"),)
    for extra_keys in (
        block_pool.generate_block_hash_extra_keys,
        inspect.unwrap(kv_cache_utils.generate_block_hash_extra_keys),
    ):
        assert "tuned" in str(extra_keys(request(), 0, 4, 0)[0])


def test_a_vllm_that_hashes_in_another_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "get_request_block_hasher", lambda size, function: None)
    assert not adapter_hooks.hash_by_content(Adapters(1))


def test_the_content_of_an_adapter_that_is_replaced_is_unknown_until_it_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    adapters = known("content")

    def add_lora(core: Any, lora_request: Any) -> bool:
        seen.append(adapters.identity(1))
        if lora_request.lora_path == "/missing":
            raise RuntimeError("no such adapter")
        return True

    monkeypatch.setattr(EngineCore, "add_lora", add_lora)
    assert adapter_hooks.hash_by_content(adapters)
    assert EngineCore.add_lora(None, LoRARequest("tuned", 1, "/a"))
    with pytest.raises(RuntimeError):
        EngineCore.add_lora(None, LoRARequest("tuned", 1, "/missing", load_inplace=True))
    assert adapters.identity(1) == "content"
    assert EngineCore.add_lora(None, LoRARequest("tuned", 1, "/b", load_inplace=True))
    assert adapters.identity(1) is None
    assert seen == ["content", None, None]


def adapter(
    lora_id: int = 1, *, scaling: float = 2.0, module: str = ATTENTION, change: tuple[int, ...] = ()
) -> LoRAModel:
    a = torch.arange(8 * 4096, dtype=torch.bfloat16).reshape(8, 4096)
    if change:
        a[change] += 1000
    weights = LoRALayerWeights(module, 8, 16, a, torch.ones(64, 8), scaling)
    return LoRAModel(lora_id, 8, {module: weights})


def test_a_digest_is_of_the_weights_and_how_they_are_applied() -> None:
    digest = adapter_hooks.digest_of(adapter())
    assert adapter_hooks.digest_of(adapter(2)) == digest
    others = [adapter(scaling=1.0), adapter(module="model.layers.1.self_attn.q_proj"), adapter(change=(7, 4095))]
    assert len({digest, *map(adapter_hooks.digest_of, others)}) == 4


def test_what_a_rank_loads_is_recorded_for_its_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    models = [adapter(), adapter(scaling=1.0), SimpleNamespace(id=1, strange=object())]
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda manager, lora_request: models.pop(0))
    config, other_config = object(), object()
    loads, others = adapter_hooks.record_loads(config), adapter_hooks.record_loads(other_config)
    manager: Any = WorkerLoRAManager.__new__(WorkerLoRAManager)
    manager.lora_config = config
    manager.list_adapters = lambda: {1}
    assert manager._load_adapter(LoRARequest("tuned", 1, str(tmp_path))).rank == 8
    (first,) = loads.take()
    assert (first.lora_id, first.number, first.digest) == (1, 1, adapter_hooks.digest_of(adapter()))
    assert loads.keeps(1)
    manager._load_adapter(LoRARequest("tuned", 1, str(tmp_path)))
    (second,) = loads.take()
    assert (second.number, loads.changes) == (2, 1)
    manager._load_adapter(LoRARequest("tuned", 1, str(tmp_path)))
    (unknown,) = loads.take()
    assert unknown.digest.startswith("own ")
    assert not others.take()
    manager.list_adapters = set
    assert loads.keeps(1), "its files are the same"
    (tmp_path / "new").touch()
    assert not loads.keeps(1)
