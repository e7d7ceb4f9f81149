from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from kvsidecar.integrations import sglang, vllm
from kvsidecar.integrations.vllm.options import ConnectorOptions


def test_nothing_given_is_the_defaults() -> None:
    options = ConnectorOptions.parse({})
    assert (options.store_mode, options.lookup_budget, options.socket) == ("eager", 0.005, None)


def test_times_are_read_with_units_or_as_seconds() -> None:
    options = ConnectorOptions.parse(
        {"lookup_budget": "2ms", "load_timeout": 20, "store_interval": 1.5, "lease_seconds": "2 min"}
    )
    assert options.lookup_budget == pytest.approx(0.002)
    assert (options.load_timeout, options.store_interval, options.lease_seconds) == (20.0, 1.5, 120.0)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"sokcet": "/run/x"}, "kv_connector_extra_config.sokcet is unknown: did you mean socket?"),
        ({"gpu": 1}, "kv_connector_extra_config.gpu is unknown: the options are socket, "),
        ({"store_mode": "sometimes"}, "kv_connector_extra_config.store_mode is 'sometimes': it must be"),
        ({"lookup_budget": "5 parsecs"}, "kv_connector_extra_config.lookup_budget is '5 parsecs': it must be a time"),
        ({"lookup_budget": 0}, "lookup_budget is 0"),
        ({"lookup_budget": True}, "lookup_budget is True"),
        ({"lazy_watermark": -1}, "lazy_watermark is -1: it must be a whole number"),
        ({"store_prompt_only": "yes"}, "store_prompt_only is 'yes': it must be true or false"),
        ({"socket": ""}, "socket is '': it must be a non-empty text"),
        ({"lease_seconds": 10}, "lease_seconds is 10.0: it must not be less than load_timeout"),
    ],
)
def test_an_unknown_option_or_a_bad_value_is_refused_in_one_sentence_that_names_it(
    extra: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        ConnectorOptions.parse(extra)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("module", "wrong", "right"), [(vllm, "KVSidecarConector", vllm.CONNECTOR), (sglang, "Linker", "KVSidecarLinker")]
)
def test_a_wrong_name_of_the_class_that_an_engine_loads_is_answered_with_the_right_one(
    module: ModuleType, wrong: str, right: str
) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{wrong}'; the .* is named {right}$"):
        getattr(module, wrong)
    with pytest.raises(AttributeError, match=r"has no attribute '__wrapped__'$"):
        module.__wrapped__  # noqa: B018 - which Python asks every module for
