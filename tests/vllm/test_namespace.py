"""Which options of the installed vLLM are part of the namespace, and engines that differ in one of them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm import envs
from vllm.config import KVTransferConfig, MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from kvsidecar.integrations.namespace_facts import EngineIdentity
from kvsidecar.integrations.vllm import ignored
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.namespace import identity_of, part_of
from tests.harness import DaemonProcess
from tests.vllm import decided, models
from tests.vllm.engine import defaults, joined, kvsidecar, prompt, running

GROUPS = (Group(0, GroupKind.FULL, ("layer",), 32, 32, 32),)
TESTED = "0.33.0"
"""The vLLM whose options `decided` lists. A later one may have others, which count until somebody decides."""


def parts_of(kind: Any) -> Iterator[type]:
    """The dataclasses in a type."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield kind
    for each in typing.get_args(kind):
        yield from parts_of(each)


def walked() -> dict[str, type]:
    """Every part of vLLM's configuration that is not ignored as a whole."""
    found: dict[str, type] = {}

    def walk(kind: type, part: str) -> None:
        if part in found:
            return
        found[part] = kind
        hints = typing.get_type_hints(kind)
        for option in dataclasses.fields(kind):
            if option.name not in ignored.OPTIONS.get(part, ()):
                for each in parts_of(hints[option.name]):
                    if each.__module__.startswith("vllm.config"):
                        walk(each, part_of(option.name))

    walk(VllmConfig, "vllm_config")
    return found


@pytest.mark.skipif(not vllm.__version__.startswith(TESTED), reason=f"the lists are those of vLLM {TESTED}")
def test_somebody_has_decided_about_every_option() -> None:
    """An option that is in neither list counts. Look at what it does, and put it into one of them."""
    undecided, both, gone = [], [], []
    for part, kind in walked().items():
        names = {each.name for each in dataclasses.fields(kind)}
        counted, left_out = decided.OPTIONS.get(part, set()), ignored.OPTIONS.get(part, frozenset())
        undecided += [f"{part}.{each}" for each in names - counted - left_out]
        both += [f"{part}.{each}" for each in counted & left_out]
        gone += [f"{part}.{each}" for each in counted - names]
    assert (undecided, both, gone) == ([], [], [])
    assert set(ignored.OPTIONS) <= set(walked())
    variables = set(envs.environment_variables)
    assert {each for each in variables if not ignored.variable(each)} == decided.VARIABLES


def identity(model: str, change: Callable[[Any], None] | None = None, **options: Any) -> EngineIdentity:
    """Of an engine with these options, in so far as it does not depend on the workers."""
    vllm_config = EngineArgs(model=model, **{**defaults(), **options}).create_engine_config()
    if change is not None:
        change(vllm_config)
    facts = {"vLLM": vllm.__version__}
    return identity_of(
        vllm_config, GROUPS, layout="L", facts=facts, fixed_seed="s", private="p", variables=envs.environment_variables
    )


def of_one_name(number: float) -> Any:
    def override(config: Any) -> Any:
        config.rope_theta = number
        return config

    return override


BFLOAT = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ({"max_model_len": 512}, {"max_model_len": 1024}, "model_config.max_model_len"),
        (
            {"quantization": "fp8_per_tensor", **BFLOAT},
            {"quantization": "fp8_per_block", **BFLOAT},
            "model_config.quantization",
        ),
        ({"hf_overrides": of_one_name(1.0)}, {"hf_overrides": of_one_name(2.0)}, "model_config.hf_overrides"),
        ({"load_format": "auto"}, {"load_format": "dummy"}, "load_config.load_format"),
        ({"additional_config": {"a": 1}}, {"additional_config": {"a": 2}}, "additional_config"),
    ],
)
def test_engines_that_differ_have_namespaces_of_their_own_and_say_in_what(
    model: str, one: dict[str, Any], other: dict[str, Any], names: str
) -> None:
    found = [identity(model, **each) for each in (one, one, other)]
    assert found[0].namespace == found[1].namespace != found[2].namespace
    assert names in {name for name, value in found[0].options.items() if found[2].options.get(name) != value}


@pytest.mark.parametrize(
    ("option", "one", "other"),
    [
        ("multimodal_config", *(MultiModalConfig(mm_processor_kwargs={"max_pixels": each}) for each in (100, 200))),
        ("model_class_overrides", *({"LlamaForCausalLM": f"{each}:Llama"} for each in ("json", "mine"))),
    ],
)
def test_parts_and_classes_of_the_users_own_count(model: str, option: str, one: Any, other: Any) -> None:
    """Set afterwards: vLLM would register the classes for good, and has no model with images here."""
    spaces = [
        identity(model, lambda found, each=each: setattr(found.model_config, option, each)).namespace
        for each in (one, one, other)
    ]
    assert spaces[0] == spaces[1] != spaces[2]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 4},
        {"max_num_batched_tokens": 512},
        {"gpu_memory_utilization": 0.3},
        {"kv_cache_memory_bytes": 32 << 20},
        {"num_gpu_blocks_override": 99},
        {"data_parallel_size": 2},
        {"enable_chunked_prefill": False},
        {"performance_mode": "throughput"},
        {"async_scheduling": False},
        {"served_model_name": "other"},
        {"seed": 3},
        {"max_logprobs": 5},
        {"kv_transfer_config": KVTransferConfig(**kvsidecar("/run/other.sock"))},
    ],
)
def test_replicas_share_whatever_their_ports_sizes_and_limits(model: str, options: dict[str, Any]) -> None:
    one, other = identity(model), identity(model, **options)
    assert one.options == other.options
    assert one.namespace == other.namespace


def test_engines_of_other_lengths_share_nothing_of_a_model_that_turns_on_the_length(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Phi-3 computes with its long factors in an engine that takes longer requests than it was trained with first."""
    longrope, asked = models.save("with_longrope", tmp_path), prompt("long", 300)
    with running(longrope, max_model_len=1024) as engine:
        (wanted,) = engine.generate(asked)
    with joined(daemon, longrope, max_model_len=512) as engine:
        (short,) = engine.generate(asked)
        engine.drain()
    assert short.tokens != wanted.tokens
    with joined(daemon, longrope, max_model_len=1024) as engine:
        (answer,) = engine.generate(asked)
        assert (answer.cached, answer.tokens) == (0, wanted.tokens)
        engine.drain()


def test_engines_whose_length_was_fitted_to_other_memory_share(daemon: DaemonProcess, tmp_path: Path) -> None:
    """The model was constructed before its memory was known."""
    longrope, asked, lengths = models.save("with_longrope", tmp_path), prompt("long", 200), []
    answers = []
    for nbytes in (16 << 20, 600_000):
        fitted = {"max_model_len": -1, "kv_cache_memory_bytes": nbytes}
        with joined(daemon, longrope, **fitted) as engine:
            answers += engine.generate(asked)
            engine.drain()
            lengths.append(engine.engine.vllm_config.model_config.max_model_len)
    assert lengths[0] > lengths[1]
    assert [each.cached for each in answers] == [0, 192]
    assert answers[0].tokens == answers[1].tokens
