"""Images, audio and video by their content in block hashes, with vLLM's own requests, items and engine core."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from kvsidecar.integrations.vllm import adapter_hooks, media
from kvsidecar.integrations.vllm.adapters import AdapterLoad, Adapters
from kvsidecar.integrations.vllm.media import Media, content_of

kv_cache_utils.init_none_hash(sha256)
HASHER = kv_cache_utils.get_request_block_hasher(4, sha256)
UUID = "the client's name"


@pytest.fixture(autouse=True)
def _unwrapped() -> Iterator[None]:
    """A test process may go on with engines of its own."""
    yield
    for owner, name in ((kv_cache_utils, "generate_block_hash_extra_keys"), (Request, "from_engine_core_request")):
        setattr(owner, name, inspect.unwrap(getattr(owner, name)))


def engine(encoder: dict[str, Any] | None = None, **config: Any) -> Media:
    """What stands for an engine: the one that was made last."""
    model = SimpleNamespace(multimodal_config=SimpleNamespace(**encoder or {}))
    made = media.named_by_content(SimpleNamespace(model_config=model, **config))
    assert made is not None
    return made


def item(*values: Any) -> MultiModalKwargsItem:
    field = MultiModalBatchedField()
    fields = [MultiModalFieldElem(data=torch.tensor(each), field=field) for each in values]
    return MultiModalKwargsItem({f"values{i}": each for i, each in enumerate(fields)})


def feature(
    data: MultiModalKwargsItem | None, identifier: str = UUID, offset: int = 2, mm_hash: str | None = None
) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data, "image", identifier, PlaceholderRange(offset=offset, length=5), mm_hash=mm_hash or identifier
    )


def asked(*features: MultiModalFeatureSpec, **more: Any) -> Request:
    """The request of the engine core for 12 tokens, of which each item has five."""
    core: Any = SimpleNamespace(mm_receiver_cache=None, request_block_hasher=HASHER)
    values: dict[str, Any] = dict.fromkeys(inspect.signature(EngineCoreRequest).parameters)
    values |= {
        "request_id": "r",
        "prompt_token_ids": list(range(12)),
        "mm_features": list(features),
        "sampling_params": SamplingParams(),
        "arrival_time": 0.0,
        "client_index": 0,
        "current_wave": 0,
        "priority": 0,
    }
    known = {name: default.default for name, default in inspect.signature(EngineCoreRequest).parameters.items()}
    given = {
        name: value for name, value in (values | more).items() if value is not None or known[name] is inspect._empty
    }
    request, _ = EngineCore.preprocess_add_request(core, EngineCoreRequest(**given))
    return request


IMAGE, OTHER = [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 5.0]]


def test_two_images_with_one_uuid_are_not_the_same_in_two_engines_nor_in_one() -> None:
    first = engine()
    hashes = asked(feature(item(IMAGE))).block_hashes
    assert hashes != asked(feature(item(OTHER))).block_hashes
    second = engine()
    assert asked(feature(item(OTHER))).block_hashes != hashes
    assert asked(feature(item(IMAGE))).block_hashes == hashes
    del first, second
    by_name = asked(feature(item(IMAGE))).block_hashes
    assert by_name == asked(feature(item(OTHER))).block_hashes, "vLLM tells them apart: there is nothing to do"


def test_an_image_is_the_same_whatever_it_is_called() -> None:
    _engine = engine()
    hashes = asked(feature(item(IMAGE))).block_hashes
    assert asked(feature(item(IMAGE), "its hash")).block_hashes == hashes
    assert asked(feature(item(IMAGE), offset=3)).block_hashes != hashes
    assert asked(feature(item(IMAGE)), cache_salt="s").block_hashes != hashes
    two = asked(feature(item(IMAGE), "a", 0), feature(item(OTHER), "b", 6)).block_hashes
    assert asked(feature(item(IMAGE), "c", 0), feature(item(OTHER), "d", 6)).block_hashes == two
    assert asked(feature(item(OTHER), "a", 0), feature(item(IMAGE), "b", 6)).block_hashes[0] != two[0]
    assert asked(feature(item(IMAGE), "a", 0), feature(item(IMAGE), "b", 6)).block_hashes[1:] != two[1:]


def test_text_is_hashed_as_before() -> None:
    plain = asked().block_hashes
    _engine = engine()
    assert asked().block_hashes == plain
    assert asked(feature(item(IMAGE), offset=8)).block_hashes[:2] == plain[:2]


@pytest.mark.parametrize(
    "why",
    [
        "not here",
        "in shared memory",
        "on a GPU",
        "of another engine's encoder",
        "of an encoder that depends on others",
        "by adapter",
    ],
)
def test_an_item_that_is_not_seen_is_the_engines_own(why: str) -> None:
    options: dict[str, Any] = {}
    made: dict[str, Any] = {}
    if why == "of another engine's encoder":
        options = {"ec_transfer_config": SimpleNamespace(is_ec_consumer=True)}
    if why == "of an encoder that depends on others":
        options = {"encoder": {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": None}}
    if why == "by adapter":
        made = {"mm_hash": "the item's own"}
    data: Any = item(IMAGE)
    if why == "not here":
        data = None
    elif why == "in shared memory":
        field = MultiModalBatchedField()
        data = MultiModalKwargsItem(
            {name: MultiModalFieldElem(data=7, field=field) for name in ("address", "monotonic_id")}  # type: ignore[arg-type]
        )
    elif why == "on a GPU":
        data["values0"].data = data["values0"].data.to("meta")
    first = engine(**options)
    hashes = asked(feature(data, **made)).block_hashes
    assert asked(feature(data, **made)).block_hashes == hashes, "its own hits are lost"
    assert asked(feature(data, "another", **made)).block_hashes != hashes
    second = engine(**options)
    assert asked(feature(data, **made)).block_hashes != hashes
    del first, second


def test_scales_of_the_encoder_that_are_given_are_the_same_for_all() -> None:
    scales = {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": "scales.json"}
    first = engine(scales)
    hashes = asked(feature(item(IMAGE))).block_hashes
    second = engine(scales)
    assert asked(feature(item(IMAGE))).block_hashes == hashes
    del first, second


def test_embeddings_in_place_of_a_prompt_are_named_by_their_content() -> None:
    """By vLLM itself."""
    _engine = engine()
    hashes = []
    for value in (0.0, 0.0, 1.0):
        embeds = torch.zeros(12, 8)
        embeds[2, 3] = value
        hashes.append(asked(prompt_token_ids=None, prompt_embeds=embeds).block_hashes)
    assert len(hashes[0]) == 3
    assert hashes[0] == hashes[1] != hashes[2]


def test_what_the_encoder_puts_out_is_kept_for_one_content_alone() -> None:
    _engine = engine()
    first, other, again = (feature(item(each)) for each in (IMAGE, OTHER, IMAGE))
    for each in first, other, again:
        asked(each)
    assert (first.identifier, again.identifier) == (UUID, UUID), "nothing is computed twice"
    assert other.identifier.startswith(UUID)
    assert other.identifier != UUID, "the model is given what was computed of another image"
    child = asked(other)
    assert child.block_hashes == asked(feature(item(OTHER))).block_hashes, "n > 1 shares it"


def test_after_a_change_of_the_weights_the_encoder_computes_anew() -> None:
    made = engine()
    before, hashes = feature(item(IMAGE)), asked(feature(item(IMAGE))).block_hashes
    asked(before)
    made.reset()
    after = feature(item(IMAGE))
    assert asked(after).block_hashes == hashes, "the connector's keys say which weights"
    assert after.identifier != before.identifier == UUID


def test_an_item_that_vllm_keeps_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _engine = engine()
    kept, read = item(IMAGE), list[Any]()
    monkeypatch.setattr(media, "content_of", lambda each: read.append(each) or content_of(each))
    assert asked(feature(kept)).block_hashes == asked(feature(kept)).block_hashes
    assert len(read) == 1


def test_events_still_say_the_identifier() -> None:
    _engine = engine()
    request = asked(feature(item(IMAGE)))
    assert "content " in str(kv_cache_utils.generate_block_hash_extra_keys(request, 0, 4, 0)[0])
    assert UUID in str(block_pool.generate_block_hash_extra_keys(request, 0, 4, 0)[0])


@pytest.mark.parametrize("adapters_first", [True, False])
def test_the_content_of_an_adapter_is_in_the_hash_as_well(adapters_first: bool) -> None:
    adapters = Adapters(1)
    adapters.take_report({0: (AdapterLoad(1, 1, "content of the adapter"),)}, lambda identity: False)
    if adapters_first:
        assert adapter_hooks.hash_by_content(adapters)
    _engine = engine()
    if not adapters_first:
        assert adapter_hooks.hash_by_content(adapters)
    lora = {"lora_request": LoRARequest("tuned", 1, "/a")}
    request = asked(feature(item(IMAGE)), **lora)
    keys = str(kv_cache_utils.generate_block_hash_extra_keys(request, 0, 4, 0)[0])
    assert ("content of the adapter" in keys, "tuned" in keys, UUID in keys) == (True, False, False)
    assert request.block_hashes != asked(feature(item(OTHER)), **lora).block_hashes
    assert request.block_hashes != asked(feature(item(IMAGE))).block_hashes


def test_every_byte_of_an_item_counts_and_how_they_are_cut() -> None:
    contents = [
        content_of(each)
        for each in (
            item(IMAGE),
            item(OTHER),
            item([1.0, 2.0, 3.0, 4.0]),
            item([[1, 2], [3, 4]]),
            item(IMAGE, IMAGE),
            item(IMAGE[0], IMAGE[1]),
            item([]),
        )
    ]
    assert None not in contents
    assert len(set(contents)) == len(contents)
    assert content_of(item(IMAGE)) == contents[0]
    turned = item(IMAGE)
    turned["values0"].data = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).T
    assert content_of(turned) == contents[0], "how it lies in memory does not matter"
    half = item(IMAGE)
    half["values0"].data = half["values0"].data.to(torch.bfloat16)
    assert content_of(half) not in (None, contents[0])


def test_a_vllm_that_hashes_in_another_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "get_request_block_hasher", lambda size, function: None)
    with pytest.raises(ValueError, match="images, audio and video"):
        engine()
    assert media.named_by_content(SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None))) is None
