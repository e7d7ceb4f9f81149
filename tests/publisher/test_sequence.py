"""What is numbered and kept."""

from __future__ import annotations

import msgspec

from kvsidecar.publisher.sequence import Sequence

EVENT = {"type": "AllBlocksCleared"}


def numbers(sequence: Sequence, first: int) -> list[int]:
    return [int.from_bytes(number, "big") for _, number, _ in sequence.since(first)]


def test_messages_are_numbered_from_0_and_hold_what_vllm_puts_into_them() -> None:
    sequence = Sequence()
    topic, number, payload = sequence.add("kv@a@b", [EVENT], 5.0)
    assert (topic, number) == (b"kv@a@b", bytes(8))
    assert msgspec.msgpack.decode(payload) == [5.0, [EVENT], 0]
    assert sequence.add("", [], 6.0)[1] == bytes([0] * 7 + [1])


def test_the_latest_are_kept_and_what_is_lost_is_known() -> None:
    sequence = Sequence(max_kept=3)
    assert sequence.has(0)
    assert numbers(sequence, 0) == []
    for _ in range(5):
        sequence.add("t", [EVENT], 0.0)
    assert [sequence.has(each) for each in range(7)] == [False, False, True, True, True, True, False]
    assert numbers(sequence, 0) == [2, 3, 4]
    assert numbers(sequence, 4) == [4]
    assert numbers(sequence, 5) == []


def test_as_many_bytes_are_kept_as_are_allowed_and_one_message_at_least() -> None:
    sequence = Sequence(max_bytes=100)
    for _ in range(3):
        sequence.add("t", [{"type": "x" * 200}], 0.0)
        assert len(numbers(sequence, 0)) == 1


def test_a_replay_passes_over_what_is_dropped_while_it_is_read() -> None:
    sequence = Sequence(max_kept=3)
    for _ in range(3):
        sequence.add("t", [EVENT], 0.0)
    replay = sequence.since(0)
    assert next(replay)[1][-1] == 0
    sequence.add("t", [EVENT], 0.0)
    sequence.add("t", [EVENT], 0.0)
    assert [number[-1] for _, number, _ in replay] == [2]
