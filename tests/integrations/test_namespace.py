from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.integrations.vllm.groups import Group, Kind
from kvsidecar.integrations.vllm.namespace import checkpoint_of, namespace_of
from kvsidecar.types import Namespace

GROUPS = (Group(0, Kind.FULL, ("layer",), 16, 16, 16),)


def config() -> Any:
    """What is read of vLLM's configuration, on an engine that has none of the optional fields."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            dtype="torch.bfloat16",
            seed=0,
            revision=None,
            quantization=None,
            hf_overrides={},
            hf_config=SimpleNamespace(_commit_hash="c0ffee"),
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )


def namespace(vllm_config: Any = None, groups: tuple[Group, ...] = GROUPS, **given: Any) -> Namespace:
    given = {"layout": "LBNHC", "facts": ["vllm 0.33", "GPU"], "fixed_seed": "seed", "environment": {}, **given}
    return namespace_of(vllm_config or config(), groups, **given)


def test_it_is_one_that_the_daemon_takes_and_the_same_for_equal_engines() -> None:
    assert namespace().problem() is None
    assert namespace() == namespace()


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.model_config, "model", "org/other"),
        lambda c: setattr(c.model_config, "dtype", "torch.float16"),
        lambda c: setattr(c.model_config, "revision", "v2"),
        lambda c: setattr(c.model_config, "quantization", "fp8"),
        lambda c: setattr(c.model_config, "hf_overrides", {"rope_scaling": {"factor": 2.0}}),
        lambda c: setattr(c.model_config.hf_config, "_commit_hash", "decaf"),
        lambda c: setattr(c.cache_config, "cache_dtype", "fp8_e5m2"),
        lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
        lambda c: setattr(c.cache_config, "mamba_ssm_cache_dtype", "float32"),
        lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2),
        lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2),
        lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
        lambda c: setattr(c, "speculative_config", SimpleNamespace(method="eagle", model="org/draft")),
    ],
)
def test_engines_that_differ_share_nothing(change: Callable[[Any], None]) -> None:
    other = config()
    change(other)
    assert namespace(other) != namespace()


@pytest.mark.parametrize(
    "given",
    [
        {"layout": "BLNHC"},
        {"facts": ["vllm 0.34", "GPU"]},
        {"fixed_seed": "other"},
        {"fixed_seed": None},
        {"environment": {"PYTHONHASHSEED": "1"}},
        {"groups": (replace(GROUPS[0], block_tokens=32),)},
        {"groups": (replace(GROUPS[0], kind=Kind.SLIDING_WINDOW, window=64),)},
        {"groups": (replace(GROUPS[0], eagle=True),)},
    ],
)
def test_what_the_workers_find_is_part_of_it(given: dict[str, Any]) -> None:
    assert namespace(**given) != namespace()


def test_layers_of_other_stages_and_page_sizes_are_not_part_of_it() -> None:
    assert namespace(groups=(replace(GROUPS[0], layer_names=("other",), page_bytes=5, spec="Uniform"),)) == namespace()


def test_random_weights_of_another_seed_are_another_model_and_a_seed_alone_is_not() -> None:
    one, other = config(), config()
    other.model_config.seed = 1
    assert namespace(one) == namespace(other)
    one.load_config.load_format = other.load_config.load_format = "dummy"
    assert namespace(one) != namespace(other)


def test_hashes_of_another_width_are_known_by_their_algorithm() -> None:
    vllm_config = config()
    vllm_config.cache_config.prefix_caching_hash_algo = "xxhash_cbor"
    assert namespace(vllm_config).hash_bytes == 16
    vllm_config.cache_config.prefix_caching_hash_algo = "md5"
    with pytest.raises(ValueError, match="md5"):
        namespace(vllm_config)


def test_a_long_model_path_fits() -> None:
    vllm_config = config()
    vllm_config.model_config.model = "/" + "x" * 5000
    assert namespace(vllm_config).problem() is None


def test_a_checkpoint_written_anew_is_another_one(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    before = checkpoint_of(str(tmp_path), None)
    assert checkpoint_of(str(tmp_path), None) == before
    os.utime(weights, ns=(1, 1))
    assert checkpoint_of(str(tmp_path), None) != before
