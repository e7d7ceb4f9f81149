"""Records between the daemon and a copier."""

from __future__ import annotations

import numpy as np
import pytest

from kvsidecar.copier import messages
from kvsidecar.copier.messages import CHECK, Checks, Copy, CopyPart, Done, Ended
from kvsidecar.types import Direction

CHECKS = np.array([(4096, 4000, 0), (8192, 4000, (1 << 64) - 1)], CHECK)


@pytest.mark.parametrize("event", [None, 0, 3])
@pytest.mark.parametrize("checks", [None, CHECKS])
def test_a_copy_arrives_as_it_was_sent_and_no_byte_is_for_checks_that_there_are_not(
    event: int | None, checks: Checks | None
) -> None:
    ids = np.arange(3, dtype=np.int64)
    parts = [CopyPart(group, ids[group:], ids[group:] * 4096, slice=5 * group) for group in range(2)]
    record = Copy(7, 9, Direction.LOAD, parts, event, checks, weight=3).pack()
    assert len(record) == messages._COPY.size + 2 * messages._PART.size + 16 * (3 + 2) + 24 * (
        0 if checks is None else len(checks)
    )
    copy = Copy.unpack(record)
    assert (copy.number, copy.session, copy.direction, copy.event) == (7, 9, Direction.LOAD, event)
    assert [(part.group, part.slice, part.block_ids.tolist(), part.slots.tolist()) for part in copy.parts] == [
        (0, 0, [0, 1, 2], [0, 4096, 8192]),
        (1, 5, [1, 2], [4096, 8192]),
    ]
    assert (copy.checks is None) if checks is None else np.array_equal(copy.checks, checks)


@pytest.mark.parametrize(
    ("done", "more"),
    [
        (Done(7, Ended.COPIED, 4096, 0.1, 0.2, 0.3), 0),
        (Done(7, Ended.COPIED, 4096, 0.1, 0.2, 0.3, [5, (1 << 64) - 1]), 16),
        (Done(7, Ended.CORRUPT, values=[1]), 8),
        (Done(7, Ended.CANCELLED), 0),
        (Done(7, Ended.FAILED, error="größer"), 8),
    ],
)
def test_an_end_arrives_as_it_was_sent(done: Done, more: int) -> None:
    assert Done.unpack(done.pack()) == done
    assert len(done.pack()) == messages._DONE.size + more
