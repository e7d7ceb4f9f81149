from __future__ import annotations

from kvsidecar.client.ordering import RingSlots


def test_ring_slots_go_round_so_that_an_entry_rests_as_long_as_possible() -> None:
    ring = RingSlots(3, lambda job: True)
    taken = []
    for job in range(6):
        index = ring.take(job)
        assert index is not None
        taken.append(index)
        ring.issued(index)
    assert taken == [0, 1, 2, 0, 1, 2]


def test_ring_slots_ignore_what_they_do_not_know() -> None:
    ring = RingSlots(1, lambda job: True)
    assert ring.take(1) == 0
    ring.issued(5)
    ring.issued(-1)
    assert ring.take(2) is None
    assert RingSlots(0, lambda job: True).take(1) is None
