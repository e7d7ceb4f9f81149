"""What ``kvsidecar publish`` refuses."""

from __future__ import annotations

from typing import Any

import pytest

from kvsidecar.errors import ConfigError
from kvsidecar.publisher.options import TOPIC, Options

GOOD: dict[str, Any] = {
    "bind": "tcp://*:5557",
    "replay": None,
    "node": "n",
    "topic": TOPIC,
    "models": (),
    "ownership": None,
    "socket": None,
}


def test_topics_have_the_node_and_the_model() -> None:
    assert Options(**GOOD).topic_of("chat/llama") == "kv@n@chat/llama"
    assert Options(**{**GOOD, "topic": "all"}).topic_of("m") == "all"


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
        ("ownership", ""),
    ],
)
def test_a_bad_value_is_named(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{option} "):
        Options(**{**GOOD, option: value})
