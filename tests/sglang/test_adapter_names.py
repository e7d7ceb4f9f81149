"""Names of requests with an adapter, with adapters like SGLang's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from kvsidecar.integrations.sglang.adapters import DIGITS, RankAdapters, digest_of, manager_of_caller, wrap

ID, OTHER_ID = "a" * 32, "b" * 32


class Adapter(SimpleNamespace):
    """As ``LoRAAdapter``, as far as it counts."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def adapter(fill: float = 1.0, **config: Any) -> Adapter:
    hf_config = {"r": 8, "lora_alpha": 16, "base_model_name_or_path": "/here", **config}
    return Adapter(
        config=SimpleNamespace(hf_config=hf_config, added_tokens_config=None),
        scaling=hf_config["lora_alpha"] / hf_config["r"],
        layers=[SimpleNamespace(weights={"qkv_proj.lora_A.weight": torch.full((8, 64), fill)})],
        embedding_layers={},
        added_tokens_embeddings={},
    )


class Req:
    def __init__(self, extra_key: str | None = None, *, lora_id: str | None = None) -> None:
        self.lora_id = lora_id
        self.extra_key = extra_key if lora_id is None else (extra_key or "") + lora_id


def test_a_digest_is_of_weights_and_configuration() -> None:
    digest = digest_of(adapter())
    assert digest_of(adapter(base_model_name_or_path="/there")) == digest
    assert len({digest, digest_of(adapter(2.0)), digest_of(adapter(lora_alpha=32))}) == 3


def test_the_digest_takes_the_place_of_the_id() -> None:
    loras = {ID: adapter(), OTHER_ID: adapter()}
    adapters = RankAdapters(SimpleNamespace(loras=loras), "own")
    name = digest_of(adapter())[:DIGITS]
    assert adapters.extra_key("tenant" + ID, ID) == "tenant" + name
    assert adapters.extra_key(OTHER_ID, OTHER_ID) == name
    loras[ID] = adapter(2.0)  # loaded again under the same id
    assert adapters.extra_key(ID, ID) == digest_of(adapter(2.0))[:DIGITS]


@pytest.mark.parametrize("manager", [None, SimpleNamespace(loras={}), SimpleNamespace(loras={ID: Adapter(strange=1)})])
def test_unknown_content_is_this_engines_alone(manager: Any) -> None:
    one, other = RankAdapters(manager, "one").extra_key(ID, ID), RankAdapters(manager, "other").extra_key(ID, ID)
    assert one != other
    assert one.endswith(ID), "SGLang's events find the name by it"
    assert one != RankAdapters(manager, "one").extra_key(OTHER_ID, OTHER_ID)


def test_only_requests_with_an_adapter_get_another_name() -> None:
    adapters = RankAdapters(SimpleNamespace(loras={ID: adapter()}), "own")
    original = Req.__init__
    end = wrap(Req, adapters)
    try:
        assert Req("k").extra_key == "k"
        assert Req().extra_key is None
        assert Req("k", lora_id=ID).extra_key == adapters.extra_key("k" + ID, ID) != "k" + ID
    finally:
        end()
    assert Req.__init__ is original


def test_the_manager_is_found_in_the_scheduler_that_is_being_made() -> None:
    found = []

    class Scheduler:
        def __init__(self) -> None:
            self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager="manager"))
            self.init_cache()

        def init_cache(self) -> None:
            found.append(manager_of_caller())

    Scheduler()
    assert found == ["manager"]
    assert manager_of_caller() is None
