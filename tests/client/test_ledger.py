"""What is outstanding, what has ended, what is said next and what is waited for: decided without a daemon."""

from __future__ import annotations

import pytest

from kvsidecar.client.ledger import Flush, Ledger, Phase, SubmittedJob
from kvsidecar.client.ordering import RingSlots
from kvsidecar.client.send_queue import SendQueue
from kvsidecar.client.types import Blocks, JobDone
from kvsidecar.errors import ClientError
from kvsidecar.types import Direction, Outcome
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import hashes


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(10)


def job(
    ledger: Ledger, number: int, direction: Direction = Direction.STORE, phase: Phase = Phase.WAITING
) -> SubmittedJob:
    added = SubmittedJob(number, direction, [Blocks(0, hashes(number), [number])], phase=phase)
    ledger.add(added)
    return added


def ends(ledger: Ledger) -> dict[int, str]:
    return {done.job: done.reason for done in ledger.take_finished()}


# -- the ledger --------------------------------------------------------------------------------------------------------


def test_a_job_ends_once_and_is_reported_once(ledger: Ledger) -> None:
    job(ledger, 1)
    assert ledger.finish(JobDone(1, Outcome.DONE))
    assert not ledger.finish(JobDone(1, Outcome.FAILED, "later"))
    assert [done.outcome for done in ledger.take_finished()] == [Outcome.DONE]
    assert not ledger.take_finished()
    assert (ledger.count, ledger.finished) == (0, {})


def test_who_asks_for_some_leaves_the_others(ledger: Ledger) -> None:
    for number in (1, 2, 3):
        ledger.decline(number, "full")
    assert list(ledger.take([2, 4])) == [2]
    assert ends(ledger) == {1: "full", 3: "full"}


def test_a_lost_daemon_ends_what_it_was_never_told_of_at_once_and_the_rest_with_a_proof(ledger: Ledger) -> None:
    job(ledger, 1, phase=Phase.WAITING)
    job(ledger, 2, phase=Phase.QUEUED)
    job(ledger, 3, phase=Phase.SENT)
    job(ledger, 4, Direction.LOAD, phase=Phase.SENT)
    ledger.end_unsent("lost", "why")
    assert ends(ledger) == {1: "lost", 2: "lost"}
    ledger.end_stores("lost", "why")
    assert ends(ledger) == {3: "lost"}
    ledger.end_all("lost", "why")
    assert ends(ledger) == {4: "lost"}


def test_a_client_that_leaves_ends_only_what_still_waits(ledger: Ledger) -> None:
    for phase in Phase:
        job(ledger, phase + 1, phase=phase)
    ledger.end_waiting("closed")
    assert ends(ledger) == {1: "closed"}


def test_a_job_that_ends_gives_its_ring_entry_back_whatever_ends_it(ledger: Ledger) -> None:
    ring = RingSlots(1, ledger.is_outstanding)
    for end in (
        lambda: ledger.finish(JobDone(1, Outcome.DONE)),
        lambda: ledger.end_all("lost", ""),
        lambda: ledger.cancel_unsent(ledger.outstanding(), "cancelled"),
    ):
        job(ledger, 1, phase=Phase.QUEUED)
        assert ring.take(1) == 0
        assert ring.take(2) is None
        end()
        assert ring.take(2) == 0, "the entry is still the job's"
        ring.issued(0)


def test_a_job_goes_from_phase_to_phase_until_it_has_ended(ledger: Ledger) -> None:
    moved = job(ledger, 1)
    with pytest.raises(ClientError, match="cannot be SENT after WAITING"):
        ledger.advance(moved, Phase.SENT)
    assert [ledger.advance(moved, phase) for phase in (Phase.QUEUED, Phase.SENT)] == [True, True]
    for phase in Phase:
        with pytest.raises(ClientError, match="after SENT"):
            ledger.advance(moved, phase)
    ledger.finish(JobDone(1, Outcome.DONE))
    assert not ledger.advance(moved, Phase.QUEUED)
    assert moved.phase is Phase.SENT


# -- what is said next -------------------------------------------------------------------------------------------------


def said(send_queue: SendQueue) -> list[pb.AttachRequest]:
    messages = []
    while send_queue.waiting:
        message = pb.AttachRequest()
        if send_queue.take(message):
            messages.append(message)
    return messages


def test_what_is_put_is_said_in_order_and_nothing_behind_the_end(ledger: Ledger) -> None:
    send_queue = SendQueue(ledger)
    first, last = job(ledger, 1, phase=Phase.QUEUED), job(ledger, 2, Direction.LOAD, Phase.QUEUED)
    send_queue.put(first, pb.AttachRequest(idle=pb.Idle(idle=True)), last)
    send_queue.finish()
    send_queue.put(job(ledger, 3))
    assert [message.WhichOneof("message") for message in said(send_queue)] == ["store", "idle", "load"]
    assert send_queue.is_finished
    assert [first.phase, last.phase] == [Phase.SENT, Phase.SENT]


def test_a_job_that_has_ended_before_its_turn_is_never_said(ledger: Ledger) -> None:
    send_queue = SendQueue(ledger)
    send_queue.put(ended := job(ledger, 1, phase=Phase.QUEUED), job(ledger, 2, phase=Phase.QUEUED))
    ledger.cancel_unsent([ended], "cancelled")
    assert [message.store.job for message in said(send_queue)] == [2]


def test_a_job_whose_time_is_over_at_its_turn_is_declined_and_not_said(ledger: Ledger) -> None:
    now = 100.0
    send_queue = SendQueue(ledger, lambda: now)
    late, timely = job(ledger, 1, phase=Phase.QUEUED), job(ledger, 2, phase=Phase.QUEUED)
    late.deadline, timely.deadline = 100.0, 100.5
    send_queue.put(late, timely)
    assert [(message.store.job, message.store.deadline_ms) for message in said(send_queue)] == [(2, 500)]
    assert ends(ledger) == {1: "deadline"}


def test_what_makes_no_message_is_declined(ledger: Ledger) -> None:
    send_queue = SendQueue(ledger)
    huge, wrong, text = (job(ledger, number) for number in (1, 2, 3))
    huge.blocks = [Blocks(0, bytes(5 << 20), [0])]
    wrong.blocks = [Blocks(0, hashes("a"), [2**70])]
    text.blocks = [Blocks(0, ["no bytes"], [0])]
    send_queue.put(huge, wrong, text, job(ledger, 4, phase=Phase.QUEUED))
    assert [message.store.job for message in said(send_queue)] == [4], "it costs another job"
    assert ends(ledger) == dict.fromkeys((1, 2, 3), "invalid_request")


def test_an_outbox_that_nobody_listens_to_forgets_what_waits(ledger: Ledger) -> None:
    send_queue = SendQueue(ledger)
    send_queue.put(waiting := job(ledger, 1))
    send_queue.close()
    send_queue.put(job(ledger, 2))
    assert not said(send_queue)
    assert waiting.phase is Phase.WAITING


# -- what is waited for ------------------------------------------------------------------------------------------------


def test_a_flush_asks_about_each_job_once_when_it_is_on_its_way(ledger: Ledger) -> None:
    waits = job(ledger, 1)
    job(ledger, 2, phase=Phase.QUEUED)
    job(ledger, 3, Direction.LOAD, Phase.SENT)
    flush = Flush(ledger, (), cancel=False)
    assert flush.take_unrequested() == [2], "all stores, and no load"
    assert flush.take_unrequested() == []
    waits.phase = Phase.SENT
    assert flush.take_unrequested() == [1]
    assert flush.pending() == {1, 2}


def test_a_flush_is_over_when_every_job_has_ended_or_the_daemon_says_so(ledger: Ledger) -> None:
    for number in (1, 2, 3):
        job(ledger, number, phase=Phase.SENT)
    flush = Flush(ledger, (1, 2, 3, 4711), cancel=False)
    flush.on_answer(flush.take_unrequested(), [2, 3])
    assert flush.pending() == {2, 3}
    ledger.finish(JobDone(2, Outcome.DONE))
    assert flush.pending() == {3}


def test_a_flush_that_cancels_ends_here_what_was_not_sent(ledger: Ledger) -> None:
    for phase in Phase:
        job(ledger, phase + 1, phase=phase)
    flush = Flush(ledger, (), cancel=True)
    assert ends(ledger) == {1: "cancelled", 2: "cancelled"}
    assert (flush.pending(), flush.take_unrequested()) == ({3}, [3])


def test_a_job_is_overdue_once_it_could_be_sent_and_its_deadline_is_past() -> None:
    ledger = Ledger(10)
    job = SubmittedJob(1, Direction.LOAD, [], deadline=5.0)
    ledger.add(job)
    ledger.add(SubmittedJob(2, Direction.LOAD, [], phase=Phase.SENT))
    assert not ledger.is_overdue(6.0), "it waits for its event, and the other one has no deadline"
    for job.phase in (Phase.QUEUED, Phase.SENT):
        assert (ledger.is_overdue(5.0), ledger.is_overdue(5.1)) == (False, True)
    ledger.finish(JobDone(1, Outcome.DONE))
    assert not ledger.is_overdue(6.0)


# -- the ring of events ------------------------------------------------------------------------------------------------


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
