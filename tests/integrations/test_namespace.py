from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.integrations.checkpoint import checkpoint_of
from kvsidecar.integrations.namespace_facts import EngineIdentity
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.namespace import identity_of
from kvsidecar.types import Namespace, text_problem

GROUPS = (Group(0, GroupKind.FULL, ("layer",), 16, 16, 16),)


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


def identity(vllm_config: Any = None, groups: tuple[Group, ...] = GROUPS, **given: Any) -> EngineIdentity:
    facts = {"vLLM": "0.33", "device": "GPU"}
    defaults = {"layout": "LBNHC", "facts": facts, "fixed_seed": "seed", "private": "one", "environment": {}}
    return identity_of(vllm_config or config(), groups, **{**defaults, **given})


def namespace(vllm_config: Any = None, groups: tuple[Group, ...] = GROUPS, **given: Any) -> Namespace:
    return identity(vllm_config, groups, **given).namespace


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
        lambda c: setattr(c.model_config, "max_model_len", 8192),
        lambda c: setattr(c.model_config, "quantization_config", {"linear": {"weight": "per block"}}),
        lambda c: setattr(c.model_config, "model_class_overrides", {"LlamaForCausalLM": "mine:Llama"}),
        lambda c: setattr(
            c.model_config, "multimodal_config", SimpleNamespace(mm_processor_kwargs={"max_pixels": 100})
        ),
        lambda c: setattr(c.model_config, "option_of_a_later_version", 1),
        lambda c: setattr(c, "part_of_a_later_version", SimpleNamespace(option=1)),
    ],
)
def test_engines_that_differ_share_nothing(change: Callable[[Any], None]) -> None:
    other = config()
    change(other)
    assert namespace(other) != namespace()


def test_kv_whose_scales_the_engine_finds_as_it_runs_is_its_own() -> None:
    scaled = config()
    scaled.cache_config.calculate_kv_scales = False
    assert namespace(scaled, private="one") == namespace(scaled, private="two")
    scaled.cache_config.calculate_kv_scales = True
    assert namespace(scaled, private="one") == namespace(scaled, private="one")
    assert namespace(scaled, private="one") != namespace(scaled, private="two")


@pytest.mark.parametrize(
    "given",
    [
        {"layout": "BLNHC"},
        {"facts": {"vLLM": "0.34", "device": "GPU"}},
        {"fixed_seed": "other"},
        {"fixed_seed": None},
        {"environment": {"PYTHONHASHSEED": "1"}},
        {"environment": {"VLLM_PP_LAYER_PARTITION": "1,2"}},
        {"environment": {"VLLM_OF_A_LATER_VERSION": "1"}},
        {"groups": (replace(GROUPS[0], block_tokens=32),)},
        {"groups": (replace(GROUPS[0], kind=GroupKind.SLIDING_WINDOW, window=64),)},
        {"groups": (replace(GROUPS[0], eagle=True),)},
    ],
)
def test_what_the_workers_find_is_part_of_it(given: dict[str, Any]) -> None:
    assert namespace(**given) != namespace()


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.model_config, "tokenizer", "other"),
        lambda c: setattr(c.model_config, "served_model_name", "other"),
        lambda c: setattr(c.cache_config, "num_gpu_blocks", 5),
        lambda c: setattr(c.cache_config, "gpu_memory_utilization", 0.5),
        lambda c: setattr(c.parallel_config, "data_parallel_rank", 1),
        lambda c: setattr(c.parallel_config, "master_port", 1234),
        lambda c: setattr(c, "scheduler_config", SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=100)),
        lambda c: setattr(c, "kv_transfer_config", SimpleNamespace(engine_id="other")),
        lambda c: setattr(c, "instance_id", "other"),
    ],
)
def test_replicas_share_wherever_they_run_and_however_much_they_take_at_once(change: Callable[[Any], None]) -> None:
    other = config()
    change(other)
    same = namespace()
    assert namespace(other) == same
    known = {"VLLM_PORT": "1", "VLLM_HOST_IP": "h", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_DP_RANK": "3", "HOME": "/"}
    assert namespace(other, environment=known, variables=["HOME_OF_VLLM"]) == same


def test_the_length_that_counts_is_the_one_that_the_model_was_constructed_with() -> None:
    """vLLM shortens the length that it was asked to find when the model is there: to what fits beside it."""
    lengths = []
    for asked, found in ((-1, 4096), (-1, 1000), (4096, 4096), (None, 4096)):
        vllm_config = config()
        vllm_config.model_config.original_max_model_len = asked
        vllm_config.model_config.max_model_len = found
        lengths.append(identity(vllm_config).options["model_config.max_model_len"])
    assert lengths == ["auto", "auto", "4096", "4096"]


def test_an_engine_says_of_what_its_namespace_is_made_and_no_secrets() -> None:
    vllm_config = config()
    vllm_config.model_config.max_model_len = 8192
    vllm_config.load_config.model_loader_extra_config = {"password": "hunter2"}
    vllm_config.model_config.hf_config_path = "/home/somebody/config"
    options = identity(vllm_config, environment={"VLLM_SECRET": "hunter2"}).options
    assert options["model_config.max_model_len"] == "8192"
    assert options["load_config.load_format"] == "auto"
    assert "hunter2" not in str(options)
    assert "somebody" not in str(options)
    assert set(options) >= {"weights", "vLLM", "device", "VLLM_SECRET", "load_config.model_loader_extra_config"}


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


def checkpoint(path: Path, weights: bytes = b"weights") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_two_copies_of_a_checkpoint_are_one_and_other_weights_are_others(tmp_path: Path) -> None:
    spaces = []
    for path, weights in (("a/Model", b"weights"), ("b/copy", b"weights"), ("c/Model", b"Weights")):
        vllm_config = config()
        vllm_config.model_config.model = str(checkpoint(tmp_path / path, weights))
        vllm_config.model_config.hf_config = SimpleNamespace(architectures=["LlamaForCausalLM"])
        os.utime(tmp_path / path / "model.safetensors", ns=(len(spaces), len(spaces)))
        spaces.append(namespace(vllm_config))
    assert spaces[0] == spaces[1] != spaces[2]
    assert str(spaces[0]).startswith("LlamaForCausalLM-")
    assert spaces[0].model != spaces[2].model, "an operator can tell them apart"


def test_the_weights_of_a_draft_model_count(tmp_path: Path) -> None:
    spaces = []
    for path, weights in (("a", b"draft"), ("b", b"draft"), ("c", b"other")):
        vllm_config = config()
        draft = SimpleNamespace(model=str(checkpoint(tmp_path / path, weights)), hf_config=SimpleNamespace())
        vllm_config.speculative_config = SimpleNamespace(method="eagle", model=draft.model, draft_model_config=draft)
        spaces.append(namespace(vllm_config))
    assert spaces[0] == spaces[1] != spaces[2]


def test_a_model_of_the_hub_is_its_commit_also_in_the_hubs_cache(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for each in checkpoint(tmp_path / "blobs").iterdir():
        (snapshot / each.name).symlink_to(each)
    spaces = []
    for model in ("org/model", str(snapshot)):
        vllm_config = config()
        vllm_config.model_config.model = model
        vllm_config.model_config.hf_config._commit_hash = commit
        spaces.append(namespace(vllm_config))
    assert spaces[0] == spaces[1]
    assert spaces[0].model == "org/model"


def test_operators_may_name_the_model(tmp_path: Path) -> None:
    assert namespace(name="tenant-a/model").model == "tenant-a/model"
    assert namespace(name="tenant-a/model") != namespace(name="tenant-b/model") != namespace()


def test_weights_from_elsewhere_are_known_by_where_the_engine_has_them_from(tmp_path: Path) -> None:
    """vLLM keeps the texts of an object store's model in a directory, and streams the weights."""
    directory = checkpoint(tmp_path / "texts")
    (directory / "model.safetensors").unlink()
    spaces = []
    for uri in ("s3://models/one", "s3://models/other"):
        vllm_config = config()
        vllm_config.model_config.model, vllm_config.model_config.model_weights = str(directory), uri
        spaces.append(namespace(vllm_config))
    assert spaces[0] != spaces[1]
    before = checkpoint_of(str(directory), None)
    assert checkpoint_of(str(directory), None) == before
    os.utime(directory / "config.json", ns=(1, 1))
    assert checkpoint_of(str(directory), None) != before, "it was rewritten"


def test_weights_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    vllm_config = config()
    vllm_config.model_config.model = str(checkpoint(tmp_path / "model"))
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors").symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match="cannot be identified"):
        namespace(vllm_config)


@pytest.mark.parametrize(
    ("served", "name", "told"),
    [
        ("chat", None, "chat"),
        (None, None, "org/model"),
        ("chat", "tenant/chat", "tenant/chat"),
        ("é" * 999, None, "é" * 256),
    ],
)
def test_an_engine_tells_the_name_that_requests_give_its_model(served: str | None, name: str | None, told: str) -> None:
    """It may be as long as the daemon takes."""
    vllm_config = config()
    vllm_config.model_config.served_model_name = served
    found = identity(vllm_config, name=name)
    assert found.served_name == told
    assert text_problem("served_name", found.served_name) is None
    assert found.namespace == namespace(name=name), "whatever it is"
