"""The workers' side with a real daemon on the host device: neither vLLM nor torch is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsidecar.client import Blocks, JobDone, Outcome
from kvsidecar.errors import Refusal
from kvsidecar.integrations.vllm.adapters import AdapterLoad, AdapterLoads
from kvsidecar.integrations.vllm.metadata import LoadJob, RankReport, StepPlan, StoreJob
from kvsidecar.integrations.vllm.ranks import Place
from kvsidecar.integrations.vllm.retention import Retention
from kvsidecar.types import Priority
from tests.harness import LAYERS, ROW_BYTES, SECONDS, DaemonProcess, eventually, hashes
from tests.integrations.workers import LateKernels, Mark, Worker, blocks, load, store, stubbed
from tests.marks import lent_daemon

pytestmark = lent_daemon


def test_the_terms_of_a_store_reach_the_daemon(daemon: DaemonProcess) -> None:
    worker = Worker(daemon.socket).register()
    for number, retention in enumerate((Retention(ttl=1), Retention(idle_ttl=1), Retention(Priority.HIGH)), 1):
        worker.step(replace(store(number, retention.priority.name + str(number), at=[number]), retention=retention))
    worker.until(lambda w: len(w.report.stored) == 3)
    assert not worker.report.not_stored
    eventually(lambda: daemon.metric("kvsidecar_expired_blocks_total") == 2)
    assert daemon.metric("kvsidecar_blocks") == 1


def test_a_rank_copies_nothing_on_the_word_of_a_scheduler_that_does_not_know_its_adapters(
    daemon: DaemonProcess,
) -> None:
    """With asynchronous scheduling, a plan is made before the reports of the last steps are known."""
    resident = {1}
    adapters = AdapterLoads(resident.__contains__)
    worker = Worker(daemon.socket, adapters=adapters).register()
    adapters.add(1, "old")
    worker.step(store(1, "a", at=[1]))
    worker.until(lambda w: w.report.stored)
    assert not worker.report.not_stored
    assert worker.report.adapters == {0: (AdapterLoad(1, 1, "old"),)}
    adapters.add(1, "new")
    of_adapter = replace(load(3, "a", at=[2], request="q"), adapter=1)
    worker.step(store(2, "b", at=[1]), loads=(of_adapter, load(4, "a", at=[3])))
    worker.until(lambda w: w.report.loaded.keys() >= {3, 4})
    assert worker.report.not_stored == {2}
    assert worker.report.not_loaded == {3}
    worker.known_changes = 1
    worker.step(store(5, "b", at=[1]), loads=(replace(of_adapter, number=6),))
    worker.until(lambda w: w.report.loaded.keys() >= {6} and w.report.stored.keys() >= {5})
    assert worker.report.not_stored == {2}
    assert worker.report.not_loaded == {3}
    resident.clear()
    worker.step(loads=(replace(of_adapter, number=7),))
    worker.until(lambda w: w.report.loaded.keys() >= {7})
    assert worker.report.not_loaded == {3, 7}, "the rank has evicted it, and cannot say what it would load"
    worker.close()


def test_what_one_worker_stores_another_one_loads(daemon: DaemonProcess) -> None:
    one, other = Worker(daemon.socket, name="one").register(), Worker(daemon.socket, name="two").register()
    one.kv[...] = np.random.default_rng(0).integers(0, 256, one.kv.shape, np.uint8)
    one.step(store(1, "a", "b", at=[2, 5]))
    one.until(lambda w: w.report.stored)
    assert one.report.stored == {1: 1}
    assert not one.report.not_stored
    other.step(loads=(load(7, "a", "b", at=[6, 1]),))
    other.until(lambda w: w.report.loaded)
    assert other.report.loaded == {7: 1}
    assert not other.report.not_loaded
    assert (other.results.finished, other.results.failed) == ({"r"}, set())
    assert np.array_equal(other.kv[:, :, [6, 1]], one.kv[:, :, [2, 5]])
    stores, _ = one.side.take_transfers() or pytest.fail("nothing was counted")
    assert (stores.nbytes, stores.sizes) == (2 * LAYERS * ROW_BYTES, [2 * LAYERS * ROW_BYTES])
    assert one.side.take_transfers() is None
    one.close()
    other.close()


def test_blocks_that_are_gone_fail_the_load_and_name_request_and_blocks(daemon: DaemonProcess) -> None:
    worker = Worker(daemon.socket).register()
    worker.step(loads=(load(3, "never stored", at=[4], request="q"),))
    worker.until(lambda w: w.report.loaded)
    assert worker.report.not_loaded == {3}
    assert (worker.results.finished, worker.results.failed, worker.results.failed_block_ids) == ({"q"}, {"q"}, {4})
    worker.close()


def test_an_invalid_job_is_counted_and_the_daemons_reason_is_logged_once(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(daemon.socket).register()
    for number in (1, 2):
        worker.step(store(number, "a", "b", at=[3, 3]))
    worker.until(lambda w: len(w.report.stored) == 2)
    assert worker.report.not_stored == {1, 2}
    assert worker.report.refused == 2
    (text,) = [each.getMessage() for each in caplog.records if "refuses a job" in each.getMessage()]
    assert "invalid_request" in text
    assert "block id 3 appears twice" in text


def test_without_a_daemon_registration_returns_and_jobs_end_at_once(short_dir: Path) -> None:
    worker = Worker(str(short_dir / "nobody.sock")).register(attached=False)
    worker.step(store(1, "a", at=[0]), loads=(load(2, "b", at=[1]),))
    worker.until(lambda w: w.report.stored and w.report.loaded)
    assert worker.report.not_stored == {1}
    assert worker.report.not_loaded == {2}
    assert worker.results.failed == {"r"}
    assert not worker.report.attached
    worker.close()


def test_a_worker_that_never_registered_answers_every_job(short_dir: Path) -> None:
    worker = Worker(str(short_dir / "nobody.sock"))
    worker.step(store(1, "a", at=[0]), loads=(load(2, "b", at=[1]),))
    worker.step()
    assert (worker.report.not_stored, worker.report.not_loaded) == ({1}, {2})
    assert worker.results.failed == {"r"}


def test_what_ends_in_one_step_is_put_into_one_report_at_once(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged one by one, the thousands of jobs of a daemon that dies would hold up their engine for seconds."""
    worker, merged, merges = Worker(str(short_dir / "nobody.sock")), RankReport.merged, []

    def counted(report: RankReport, *others: RankReport) -> RankReport:
        merges.append(len(others))
        return merged(report, *others)

    monkeypatch.setattr(RankReport, "merged", counted)
    worker.step(loads=tuple(load(number, "a", at=[1]) for number in range(100)))
    assert worker.report.not_loaded == set(range(100))
    assert merges == [99, 1]  # the rank's own, and that of the test with the step's


def test_it_says_once_to_which_daemon_it_is_attached(daemon: DaemonProcess) -> None:
    worker = Worker(daemon.socket, Place(tp_rank=1, tp_size=2)).register()
    worker.step()
    assert worker.report.attached == {1: worker.client.epoch}
    worker.report = RankReport()
    worker.step()
    assert worker.report == RankReport()
    worker.close()


def test_a_daemon_that_dies_fails_the_loads_and_the_next_one_is_used(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as first:
        first.wait_ready()
        worker = Worker(first.socket).register()
        worker.step()
        epoch = worker.report.attached[0]
        mark = Mark()
        # The load has not begun when the daemon dies.
        worker.step_behind(mark, loads=(load(1, "a", at=[0]),))
        first.process.kill()
        worker.until(lambda w: w.report.attached == {0: 0})
        mark.over.set()
        worker.until(lambda w: w.report.loaded)
        assert worker.results.failed == {"r"}
    with DaemonProcess(short_dir) as second:
        second.wait_ready()
        worker.until(lambda w: w.report.attached[0] not in (0, epoch))
        worker.step(store(2, "b", at=[3]))
        worker.until(lambda w: 2 in w.report.stored)
        assert 2 not in worker.report.not_stored
        worker.close()


def test_replicated_kv_is_stored_by_the_first_rank_and_loaded_by_all(daemon: DaemonProcess) -> None:
    ranks = [Worker(daemon.socket, Place(tp_rank=rank, tp_size=2, replicas={0: 2})).register() for rank in (0, 1)]
    for rank in ranks:
        rank.kv[...] = 7
        rank.step(store(1, "a", at=[2]))
    assert ranks[1].report.stored == {1: 2}, "what others store is reported at once"
    ranks[0].until(lambda w: w.report.stored)
    ranks[1].kv[:, :, 5] = 0
    ranks[1].step(loads=(load(2, "a", at=[5]),))
    ranks[1].until(lambda w: w.report.loaded)
    assert (ranks[1].kv[:, :, 5] == 7).all()
    for rank in ranks:
        rank.close()


def test_blocks_of_groups_whose_layers_other_stages_hold_are_theirs(daemon: DaemonProcess) -> None:
    stages_of = {0: (0, 1), 1: (1,)}
    first = Worker(daemon.socket, Place(num_stages=2, stage=0, stages_of=stages_of)).register()
    second = Worker(daemon.socket, Place(num_stages=2, stage=1, stages_of=stages_of), held=(0, 1)).register()
    both = StoreJob(1, blocks("a", at=[1]) + blocks("b", at=[2], group=1))
    only = store(2, "c", at=[3], group=1)
    for worker in (first, second):
        worker.kv[...] = worker.place.rank + 1
        worker.step(both, only)
        worker.until(lambda w: len(w.report.stored) == 2)
        assert not worker.report.not_stored
    for worker in (first, second):
        worker.kv[...] = 0
        worker.step(loads=(load(3, "c", at=[4], group=1), LoadJob(4, "s", both.blocks)))
        worker.until(lambda w: len(w.report.loaded) == 2)
        assert not worker.report.not_loaded
    assert (first.kv[0, :, 1] == 1).all()
    assert (second.kv[1, :, 2] == 2).all()
    assert (second.kv[1, :, 4] == 2).all()
    first.close()
    second.close()


def test_stores_of_a_step_that_saves_nothing_are_made_at_its_end(daemon: DaemonProcess) -> None:
    worker = Worker(daemon.socket).register()
    worker.step(store(1, "a", at=[0]), saves=False)
    worker.until(lambda w: w.report.stored)
    assert not worker.report.not_stored
    worker.close()


def test_a_registration_can_be_ended_and_begun_again(daemon: DaemonProcess) -> None:
    worker = Worker(daemon.socket).register()
    worker.step(store(1, "a", at=[0]))
    assert worker.side.unregister()
    assert worker.side.unregister(), "once more does nothing"
    worker.step()
    assert worker.report.stored == {1: 1}, "a job that was under way is over"
    assert worker.report.attached == {0: 0}
    worker.register()
    worker.step(store(2, "b", at=[1]))
    worker.until(lambda w: 2 in w.report.stored)
    assert 2 not in worker.report.not_stored
    worker.close()


def test_a_load_comes_after_what_the_stream_was_given_before_the_step(daemon: DaemonProcess) -> None:
    worker = Worker(daemon.socket).register()
    worker.kv[...] = 1
    worker.step(store(1, "a", at=[0]))
    worker.until(lambda w: w.report.stored)
    mark = Mark()
    worker.step_behind(mark, loads=(load(2, "a", at=[5]),))
    # A later job is over, this one is not: its copy has not begun.
    worker.step(store(3, "b", at=[1]))
    worker.until(lambda w: 3 in w.report.stored)
    worker.kv[:, :, 5] = 9  # a step in flight still writes
    assert not worker.report.loaded
    mark.over.set()
    worker.until(lambda w: w.report.loaded)
    assert (worker.kv[:, :, 5] == 1).all()
    worker.close()


def test_a_store_comes_after_what_the_stream_was_given_before_where_events_cannot_be_shared(
    daemon: DaemonProcess,
) -> None:
    worker = Worker(daemon.socket).register()
    mark = Mark()
    worker.step_behind(mark, store(1, "a", at=[0]))
    worker.step(store(2, "b", at=[1]))
    worker.until(lambda w: 2 in w.report.stored)
    worker.kv[:, :, 0] = 4  # the kernels that write the block end
    assert 1 not in worker.report.stored
    mark.over.set()
    worker.until(lambda w: 1 in w.report.stored)
    worker.step(loads=(load(3, "a", at=[5]),))
    worker.until(lambda w: w.report.loaded)
    assert (worker.kv[:, :, 5] == 4).all()
    worker.close()


def test_a_store_copies_what_kernels_before_it_write_late(daemon: DaemonProcess) -> None:
    """On a device with a ring of events, as an engine on a GPU has one."""
    kernels = LateKernels()
    worker = Worker(daemon.socket).register(order=kernels)
    worker.kv[...] = 1
    worker.step(store(1, "a", at=[0]))
    # A store that waits for nothing, and was sent later, is over: this one would be, too.
    later = worker.client.store([Blocks(0, hashes("b"), [1])])
    assert worker.client.wait([later], SECONDS)[later].outcome is Outcome.DONE
    worker.step()
    assert not worker.report.stored
    worker.kv[:, :, 0] = 4
    kernels.run()
    worker.until(lambda w: w.report.stored)
    assert not worker.report.not_stored
    worker.step(loads=(load(2, "a", at=[5]),))
    kernels.run()
    worker.until(lambda w: w.report.loaded)
    assert (worker.kv[:, :, 5] == 4).all()
    worker.close()


def test_jobs_carry_their_traceparents() -> None:
    worker, client = stubbed()
    stored, loaded = store(1, "a", at=[0]), load(2, "b", at=[1])
    worker.step(replace(stored, traceparent="s"), loads=(replace(loaded, traceparent="l"),))
    worker.step(stored)
    assert client.traceparents == ["l", "s", None]


@pytest.mark.parametrize("again", [False, True])
def test_the_end_of_a_registration_that_may_still_write_reports_loads_when_its_daemon_is_gone(again: bool) -> None:
    worker, client = stubbed()
    worker.step(store(1, "a", at=[0]), loads=(load(2, "a", at=[0]),))
    client.released = False
    assert not worker.side.unregister()
    worker.step()
    assert worker.report.not_stored == {1}
    if again:
        worker.register(attached=False)
        client.epoch = 6
        worker.step()
    assert not worker.report.loaded
    assert not worker.results.finished
    client.released = True
    worker.step()
    worker.step()
    assert worker.report.not_loaded == {2}
    assert worker.results.failed == {"r"}


def test_a_store_that_is_not_admitted_is_reported_so_and_is_no_allocation_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, client = stubbed()
    worker.step(store(1, "a", at=[0]))
    client.ended = [JobDone(1, Outcome.DECLINED, Refusal.NOT_ADMITTED.value)]
    worker.step()
    assert (worker.report.not_stored, worker.report.not_admitted) == ({1}, {1})
    assert worker.report.refused == 0
    assert worker.side.take_transfers() is None
    worker.step(store(2, "a", at=[0]))
    client.ended = [JobDone(2, Outcome.DECLINED, Refusal.POOL_FULL.value)]
    worker.step()
    assert worker.report.not_admitted == {1}
    assert not caplog.records


def test_a_rank_begins_the_jobs_of_a_lost_step_that_it_did_not_get_and_tells_again_what_has_ended(
    short_dir: Path,
) -> None:
    worker = Worker(str(short_dir / "nobody.sock"))
    got = StepPlan((store(1, "a", at=[0]),), number=1)
    missed = StepPlan((store(2, "b", at=[1]),), (load(3, "c", at=[2]),), number=2)
    worker.run(got)
    assert worker.report.stored == {1: 1}
    worker.report = RankReport()
    worker.run(StepPlan(number=3, lost=(got, missed), repeat=True))
    worker.run(StepPlan())
    assert (worker.report.stored, worker.report.loaded) == ({1: 1, 2: 1}, {3: 1})
    ends = sum(len(each.stored) + len(each.loaded) for each in worker.side._ends)
    assert ends == 3, "what it got before is not begun again"
    worker.report = RankReport()
    worker.run(StepPlan(number=4, lost=(missed,)))
    worker.run(StepPlan())
    assert worker.report == RankReport()
