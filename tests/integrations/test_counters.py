from __future__ import annotations

from kvsidecar.integrations.vllm.counters import COUNTED, Counters


def test_what_is_taken_is_what_was_added_since_the_last_time() -> None:
    counters = Counters()
    assert counters.take() == {}
    counters.loads += 2
    counters.loaded_tokens += 32
    assert counters.take() == {"loads": 2, "loaded_tokens": 32}
    assert counters.take() == {}
    counters.loads += 1
    counters.resets += 1
    assert counters.take() == {"loads": 1, "resets": 1}
    assert (counters.loads, counters.resets) == (3, 1)


def test_every_counter_has_words() -> None:
    assert all(text.endswith(".") for text in COUNTED.values())
    assert set(COUNTED) == {name for name in Counters.__slots__ if not name.startswith("_")}
