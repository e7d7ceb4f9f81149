"""Which arguments of the installed SGLang are part of the namespace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import sglang

from kvsidecar.integrations.namespace_facts import EngineIdentity
from kvsidecar.integrations.sglang import ignored
from kvsidecar.integrations.sglang.groups import KV, groups_of
from kvsidecar.integrations.sglang.namespace import arguments, identity_of, kept_beside_kv
from tests.sglang import decided
from tests.sglang.engine import DEFAULTS, ENVIRONMENT, linker

TESTED = "0.5.23"
"""The SGLang whose arguments `decided` lists. A later one may have others, which count until somebody decides."""


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """SGLang sets variables of its own when it resolves its arguments."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name.startswith("SGLANG_")})
    yield
    os.environ.clear()
    os.environ.update(before)


def identity(model: str, **options: Any) -> EngineIdentity:
    """Of an engine with these options, in so far as it does not depend on its memory."""
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(model_path=model, **{**DEFAULTS, **options})
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    groups = groups_of([(KV, range(3), False)], 3, 1)
    return identity_of(
        server_args, groups, hf_config=None, page_size=16, tp_size=1, is_eagle=False, facts={}, private="p"
    )


@pytest.mark.skipif(sglang.__version__ != TESTED, reason=f"the lists are those of SGLang {TESTED}")
def test_somebody_has_decided_about_every_argument(model: str) -> None:
    """An argument that is in neither list counts. Look at what it does, and put it into one of them."""
    from sglang.srt.server_args import ServerArgs

    names = set(arguments(ServerArgs(model_path=model)))
    assert names - decided.ARGUMENTS - ignored.ARGUMENTS == set()
    assert not decided.ARGUMENTS & ignored.ARGUMENTS
    assert (decided.ARGUMENTS | ignored.ARGUMENTS) - names == set()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, None),
        ({"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
        ({"enable_return_indexer_topk": True}, "--enable-return-indexer-topk"),
        ({"kv_canary": "log"}, "--kv-canary"),
    ],
)
def test_what_sglang_keeps_beside_kv_is_known(model: str, options: dict[str, Any], named: str | None) -> None:
    from sglang.srt.server_args import ServerArgs

    assert kept_beside_kv(ServerArgs(model_path=model, **{**DEFAULTS, **options})) == named


@pytest.mark.parametrize(
    ("argument", "one", "other"),
    [
        ("context_length", 512, 1024),
        ("modelopt_quant", "fp8", "int4_awq"),
        ("model_loader_extra_config", '{"a": 1}', '{"a": 2}'),
        ("mm_process_config", {"image": {"max_pixels": 1}}, {"image": {"max_pixels": 2}}),
        ("json_model_override_args", '{"rope_theta": 1.0}', '{"rope_theta": 2.0}'),
        ("load_format", "auto", "safetensors"),
    ],
)
def test_engines_that_differ_have_namespaces_of_their_own_and_say_in_what(
    model: str, argument: str, one: Any, other: Any
) -> None:
    found = [identity(model, **{argument: each}) for each in (one, one, other)]
    assert found[0].namespace == found[1].namespace != found[2].namespace
    assert {name for name, value in found[0].options.items() if found[2].options.get(name) != value} == {argument}


def test_random_weights_of_which_nobody_said_the_seed_are_nobody_elses(model: str) -> None:
    spaces = [identity(model, load_format="dummy", random_seed=None).options["seed of random weights"] for _ in "ab"]
    assert spaces[0] != spaces[1]


@pytest.mark.parametrize(
    "options",
    [
        {"port": 30001, "host": "::1"},
        {"max_running_requests": 2},
        {"mem_fraction_static": 0.3},
        {"max_total_tokens": 4096},
        {"chunked_prefill_size": 128},
        {"log_level": "debug"},
        {"random_seed": 4},
        {"enable_metrics": False},
        {"served_model_name": "other"},
        {"schedule_policy": "lpm"},
        linker("/other.sock"),
    ],
)
def test_replicas_share_whatever_their_ports_sizes_and_limits(model: str, options: dict[str, Any]) -> None:
    one, other = identity(model), identity(model, **options)
    assert one.options == other.options
    assert one.namespace == other.namespace
    assert other.served_name == options.get("served_model_name", model)


def test_nothing_of_an_ordinary_engine_cannot_be_told(model: str, caplog: pytest.LogCaptureFixture) -> None:
    identity(model)
    assert "shares KV with no other" not in caplog.text
