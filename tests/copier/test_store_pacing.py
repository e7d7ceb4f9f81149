"""Only stores of a device whose engine computes are bounded."""

from __future__ import annotations

from kvsidecar.copier.store_pacing import StorePacing
from kvsidecar.types import Direction


def test_stores_of_a_busy_device_are_bounded_and_nothing_else_is() -> None:
    changes: list[int] = []
    pacing = StorePacing(4096, lambda: changes.append(1))
    assert pacing.of("a", Direction.STORE) is None
    pacing.set_busy(frozenset({"a"}))
    assert (pacing.of("a", Direction.STORE), pacing.of("a", Direction.LOAD)) == (4096, None)
    assert pacing.of("b", Direction.STORE) is None
    pacing.set_busy(frozenset({"a"}))
    assert len(changes) == 1, "nothing has changed"
    pacing.set_chunk(None)
    assert (pacing.of("a", Direction.STORE), len(changes)) == (None, 2)
