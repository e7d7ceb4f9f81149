"""What ``kvsidecar publish`` refuses."""

from __future__ import annotations

from typing import Any

import click
import pytest

from kvsidecar.cli.main import main
from kvsidecar.daemon.setting_sources import PUBLISH_VARIABLES, load_settings, variable_of
from kvsidecar.daemon.settings import Settings
from kvsidecar.errors import ConfigError
from kvsidecar.publisher.options import PublisherOptions

GOOD: dict[str, Any] = {
    "bind": "tcp://*:5557",
    "replay": None,
    "node": "n",
    "topic": "kv@{node}@{model}",
    "models": (),
    "ownership": None,
    "socket": None,
}


def test_topics_have_the_node_and_the_model() -> None:
    assert PublisherOptions(**GOOD).topic_of("chat/llama") == "kv@n@chat/llama"
    assert PublisherOptions(**{**GOOD, "topic": "all"}).topic_of("m") == "all"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("bind", "0.0.0.0:5557"),
        ("bind", ""),
        ("replay", "udp://1.2.3.4:5"),
        ("topic", "{pod}"),
        ("topic", "{"),
        ("topic", "{0}"),
        ("node", ""),
        ("metrics", "5559"),
        ("metrics", ":5559"),
        ("metrics", "127.0.0.1:70000"),
        ("metrics", "127.0.0.1:http"),
        ("ownership", ""),
    ],
)
def test_a_bad_value_is_named(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{option} "):
        PublisherOptions(**{**GOOD, option: value})


def test_its_variables_do_not_stop_a_daemon_that_has_them_too() -> None:
    own = {each.envvar for each in main.commands["publish"].params if isinstance(each, click.Option) and each.envvar}
    assert own - set(map(variable_of, Settings.model_fields)) - {"KVSIDECAR_SOCKET"} == set(PUBLISH_VARIABLES)
    load_settings({}, dict.fromkeys(PUBLISH_VARIABLES, "x"))
