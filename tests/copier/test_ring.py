"""Records between two processes: each once, whole, in order, and no faster than they are taken."""

from __future__ import annotations

import os
import random
import select
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.copier.ring import Receiver, Ring, RingFull, Sender
from tests.marks import processes


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring.create(4096)
    yield ring
    ring.close()


def record(number: int, length: int) -> bytes:
    return number.to_bytes(4, "little") + random.Random(number).randbytes(length)


@given(steps=st.lists(st.one_of(st.integers(0, 1500), st.none()), max_size=200))
def test_what_is_sent_is_taken_once_whole_and_in_order(steps: list[int | None]) -> None:
    ring = Ring.create(4096)
    sender, receiver = Sender(ring), Receiver(ring)
    sent, taken = [], []
    for number, step in enumerate(steps):
        if step is None:
            taken += receiver.take()
            sender.flush()
        else:
            sent.append(record(number, step))
            sender.send(sent[-1])
    while sender.waiting_bytes:
        taken += receiver.take()
        sender.flush()
    taken += receiver.take()
    assert taken == sent
    assert receiver.take() == []
    ring.close()


def test_a_record_that_never_fits_is_refused(ring: Ring) -> None:
    with pytest.raises(RingFull, match="3000 bytes is too long for a ring of 4096"):
        Sender(ring).send(bytes(3000))


@processes
def test_another_process_takes_what_is_sent_while_it_is_sent(ring: Ring) -> None:
    back = Ring.create(4096)
    sent = [record(number, number * 7 % 900) for number in range(3000)]
    child = os.fork()
    if child == 0:  # sends each back
        receiver, sender, bell = Receiver(ring), Sender(back), select.poll()
        bell.register(ring.bell, select.POLLIN)
        count = 0
        while count < len(sent) or sender.waiting_bytes:
            bell.poll(1)
            for each in receiver.take():
                sender.send(each)
                count += 1
            sender.flush()
        os._exit(0)
    sender, receiver, bell = Sender(ring), Receiver(back), select.poll()
    bell.register(back.bell, select.POLLIN)
    taken: list[bytes] = []
    for each in sent:
        sender.send(each)
        taken += receiver.take()
    while len(taken) < len(sent):
        bell.poll(1)
        sender.flush()
        taken += receiver.take()
    assert os.waitpid(child, 0)[1] == 0
    assert taken == sent
    back.close()
