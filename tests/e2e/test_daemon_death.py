"""A daemon that dies, hangs, is cut off or is not there: the engine goes on, and comes back by itself."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from kvsidecar.client import (
    Backoff,
    Blocks,
    BreakerState,
    CircuitBreaker,
    DaemonUnreachable,
    Outcome,
)
from tests.e2e.endings import job_ends, no_leaks, pause, quick, until_declined, until_queued, works
from tests.harness import NAMESPACE, NO_WAIT, SECONDS, DaemonProcess, Gate, Rank, Relay, done, eventually, hashes
from tests.marks import both_protocols, lent_daemon, promise

pytestmark = [both_protocols, lent_daemon]


def second(point: str) -> str:
    """The second hit of a failpoint by a job: the copies of the self-test at the start pass those in the worker."""
    return f"{point}@{3 if point.endswith('in_flight') else 1}"


def kill(daemon: DaemonProcess) -> None:
    daemon.process.kill()
    daemon.process.wait(SECONDS)


# -- death ---------------------------------------------------------------------------------------------------------


@promise("engines serve without offload and attach again")
def test_an_engine_outlives_an_idle_daemon_and_comes_back_by_itself(
    short_dir: Path, caplog: pytest.LogCaptureFixture, local: bool
) -> None:
    caplog.set_level(logging.INFO, "kvsidecar.client")
    with no_leaks():
        with DaemonProcess(short_dir, local=local) as first:
            rank = Rank(first.wait_ready(), client=quick(first.socket, local))
            works(rank, "a", "b")
            epoch = rank.client.epoch
            kill(first)
        eventually(lambda: not rank.client.attached)
        began = time.monotonic()
        assert rank.store("c").reason == "daemon_lost"
        lost = rank.client.lookup(NAMESPACE, {0: hashes("a")}, lease_seconds=5)
        assert (lost.ready, lost.groups[0].hits, lost.lease, lost.reason) == (False, 0, None, "daemon_lost")
        assert not rank.client.release(1)
        assert time.monotonic() - began < NO_WAIT
        with DaemonProcess(short_dir, local=local) as second:
            assert rank.client.wait_attached(SECONDS)
            assert rank.client.wait_ready(SECONDS).ready
            assert rank.client.epoch not in (0, epoch)
            assert rank.hits("a") == 0, "what the dead daemon held is gone"
            works(rank, "a", "b")
            assert rank.client.poll() == []
            assert rank.client.close()
            assert second.terminate() == 0
    said = [
        record.message.removeprefix("kvsidecar: the daemon ").removeprefix("kvsidecar: ") for record in caplog.records
    ]
    begins = ["attached to the daemon at", "is ready", f"at {second.socket} is lost", "attached again", "is ready"]
    assert [text.startswith(begin) for text, begin in zip(said, begins, strict=True)] == [True] * 5, said


def fatal(point: str, gate: Gate) -> str:
    """The rule that lets the daemon be killed at the second hit of a point; one of a copier holds it there."""
    return f"{second(point)}={gate if 'in_flight' in point else 'kill'}"


def killed_at(daemon: DaemonProcess, point: str) -> None:
    daemon.wait_log("failpoint")
    if "in_flight" in point:
        daemon.process.kill()


@promise("nothing is half sealed")
@pytest.mark.parametrize(
    "point", ["store.after_reserve", "store.in_flight", "store.before_seal", "load.before_copy", "load.in_flight"]
)
def test_a_daemon_killed_mid_job_costs_its_jobs_and_nothing_else(
    short_dir: Path, gate: Gate, point: str, local: bool
) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=fatal(point, gate), local=local) as first:
        rank = Rank(first.wait_ready(), client=quick(first.socket, local))
        done(rank.store("a", "b"))
        stores = point.startswith("store")
        names = ["x", "y", "z"] if stores else ["a", "b"]
        if stores:
            for block_id, name in enumerate(names):
                rank.fill(block_id, name)
        else:
            done(rank.load("a", at=[4]))
        submit = rank.client.store if stores else rank.client.load
        jobs = [submit([Blocks(0, hashes(name), [i])]) for i, name in enumerate(names)]
        killed_at(first, point)
        ends = job_ends(rank.client, len(jobs))
        assert sorted(end.job for end in ends) == jobs
        assert {end.outcome for end in ends} <= {Outcome.FAILED, Outcome.DECLINED}
        assert {end.reason for end in ends} == {"daemon_lost"}
        first.process.wait(SECONDS)
    with DaemonProcess(short_dir, local=local):
        assert rank.client.wait_ready(SECONDS).ready
        assert rank.hits(names[0]) == 0
        works(rank, *names[:2])
        assert rank.client.poll() == [], "a job was reported twice"
        rank.close()


def test_a_load_is_not_over_while_a_hung_daemon_may_still_write_whatever_became_of_the_stream(
    short_dir: Path, gate: Gate, local: bool
) -> None:
    """Its copy is under way. What has not begun is over behind the fence: `tests.e2e.test_fence`."""
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"load.in_flight@2={gate}", local=local) as daemon:
        relay = Relay(daemon.wait_ready(), short_dir)
        began = time.monotonic()
        Rank(daemon, client=quick(relay.socket, local)).close()
        # More than this machine needs to send a job, or to attach, even if it stands still for a second; and it is over
        # before the test ends.
        patience = max(3.0, 20 * (time.monotonic() - began))
        rank = Rank(daemon, client=quick(relay.socket, local, timeout=patience))
        done(rank.store("a"))
        load = rank.client.load([Blocks(0, hashes("a"), [5])], timeout=patience)
        daemon.wait_log("failpoint")  # it has arrived, and its copy runs
        pause(daemon)
        relay.cut(rank.client)
        eventually(lambda: not rank.client.attached)
        assert rank.client.wait([load], 2.5 * patience) == {}, "reported although the daemon's process lives"
        assert rank.store("b").reason == "daemon_lost"
        assert rank.client.flush([load], timeout=0.05) == {load}
        kill(daemon)
        ended = rank.finish(load)
        assert (ended.outcome, ended.reason) == (Outcome.FAILED, "daemon_lost")
        relay.close()
        rank.close()


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_job_of_a_cut_stream_is_over_when_the_daemon_has_ended_the_session(
    short_dir: Path, gate: Gate, direction: str, local: bool
) -> None:
    with DaemonProcess(
        short_dir, KVSIDECAR_FAILPOINTS=f"{second(direction + '.in_flight')}={gate}", local=local
    ) as daemon:
        relay = Relay(daemon.wait_ready(), short_dir)
        rank = Rank(daemon, client=quick(relay.socket, local))
        done(rank.store("a"))
        done(rank.load("a", at=[1]))
        rank.fill(2, "b")
        submit = rank.client.load if direction == "load" else rank.client.store
        running, queued = ("a" if direction == "load" else "d", 4), ("a", 5) if direction == "load" else ("b", 2)
        jobs = [submit([Blocks(0, hashes(name), [block_id])]) for name, block_id in (running, queued)]
        until_queued(daemon, direction, 1)
        epoch = rank.client.epoch
        relay.cut(rank.client)
        until_declined(daemon, direction, 1)
        assert rank.client.wait(jobs, 0.3) == {}, "reported while a copy of it may run"
        gate.let_pass()
        ended = rank.client.wait(jobs, SECONDS)
        assert {(end.outcome, end.reason) for end in ended.values()} == {(Outcome.FAILED, "daemon_lost")}
        assert sorted(ended) == jobs
        rank.kv[:] = 0  # the engine gives the blocks to others
        assert rank.client.wait_attached(SECONDS)
        assert rank.client.epoch == epoch
        works(rank, "c")
        assert not rank.kv[:, [4, 5]].any(), "a lost load wrote after it was reported"
        if rank.hits("b"):
            done(rank.load("b", at=[6]))
            assert rank.holds(6, "b"), "a lost store read after it was reported"
        rank.close()
        relay.close()


def test_stores_that_were_queued_when_the_stream_broke_are_never_sealed(
    short_dir: Path, gate: Gate, local: bool
) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@2={gate}", local=local) as daemon:
        relay = Relay(daemon.wait_ready(), short_dir)
        rank = Rank(daemon, client=quick(relay.socket, local))
        for block_id, name in enumerate("abcd"):
            rank.client.store([Blocks(0, hashes(name), [block_id])])
        until_queued(daemon, "store", 3)
        relay.cut(rank.client)
        until_declined(daemon, "store", 3)
        assert daemon.metric('kvsidecar_jobs_running{direction="store"}') == 1
        gate.let_pass()
        assert {end.reason for end in job_ends(rank.client, 4)} == {"daemon_lost"}
        assert not daemon.metric('kvsidecar_jobs_running{direction="store"}'), "reported while its copy runs"
        assert rank.client.wait_attached(SECONDS)
        assert [rank.hits(name) for name in "bcd"] == [0, 0, 0], "a lost rank's blocks were read and sealed"
        rank.close()
        relay.close()


def test_a_daemon_that_dies_in_the_registration_is_joined_when_it_is_back(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS="attach.after_import@0=kill", local=local) as first:
        client = quick(first.socket, local)
        with pytest.raises(DaemonUnreachable):
            Rank(first.wait_ready(), client=client)
        first.process.wait(SECONDS)
        rank = Rank(first, client=client, retry=True)
    with DaemonProcess(short_dir, local=local):
        assert client.wait_ready(SECONDS).ready
        works(rank, "a")
        rank.close()


def test_a_scheduler_that_only_looks_up_comes_back_too(short_dir: Path, local: bool) -> None:
    scheduler = quick(str(short_dir / "kvs.sock"), local)
    began = time.monotonic()
    missing = scheduler.lookup(NAMESPACE, {0: hashes("a")}, lease_seconds=600)
    assert (missing.ready, missing.reason) == (False, "daemon_lost")
    assert time.monotonic() - began < NO_WAIT
    for _ in range(2):
        with DaemonProcess(short_dir, local=local) as daemon:
            rank = Rank(daemon.wait_ready())
            done(rank.store("a"))
            epoch = rank.client.epoch
            eventually(lambda epoch=epoch: scheduler.epoch == epoch)
            found = scheduler.lookup(NAMESPACE, {0: hashes("a")}, lease_seconds=600)
            assert (found.ready, found.groups[0].hits) == (True, 1)
            assert scheduler.release(found.lease or 0)
            rank.close()
    assert scheduler.close()


# -- a daemon that is not there, or hangs ----------------------------------------------------------------------------


def test_attach_without_a_daemon_raises_at_once_and_may_be_tried_again(short_dir: Path, local: bool) -> None:
    with no_leaks():
        nowhere = SimpleNamespace(socket=str(short_dir / "kvs.sock"), local=local)
        client = quick(nowhere.socket, local)
        began = time.monotonic()
        with pytest.raises(DaemonUnreachable, match="is the daemon running"):
            Rank(nowhere, client=client)  # type: ignore[arg-type]
        assert time.monotonic() - began < NO_WAIT
        with DaemonProcess(short_dir, local=local) as daemon:
            rank = Rank(daemon.wait_ready(), client=client)
            works(rank, "a")
            rank.close()


@promise("an engine attaches as soon as a daemon runs")
def test_attach_with_retry_returns_at_once_and_joins_when_the_daemon_appears(short_dir: Path, local: bool) -> None:
    with no_leaks():
        nowhere = SimpleNamespace(socket=str(short_dir / "kvs.sock"), local=local)
        client = quick(nowhere.socket, local)
        began = time.monotonic()
        rank = Rank(nowhere, client=client, retry=True)  # type: ignore[arg-type]
        assert time.monotonic() - began < NO_WAIT
        assert not client.attached
        assert rank.store("a").reason == "daemon_lost"
        with pytest.raises(DaemonUnreachable):
            client.wait_ready(0.1)
        with DaemonProcess(short_dir, local=local):
            assert client.wait_ready(SECONDS).ready
            works(rank, "a")
            rank.close()


@promise("lookups miss within their budget")
def test_a_hung_daemon_costs_a_few_budgets_and_is_used_again_when_it_goes_on(
    daemon: DaemonProcess, local: bool
) -> None:
    budget = 2.0
    breaker = CircuitBreaker(failures=3, backoff=Backoff(0.05, 0.1))
    rank = Rank(daemon, client=quick(daemon.socket, local, step_budget=budget, breaker=breaker))
    done(rank.store("a"))
    pause(daemon)
    waited, reasons = [], []
    for _ in range(20):
        began = time.monotonic()
        result = rank.client.lookup(NAMESPACE, {0: hashes("a")}, lease_seconds=1)
        waited.append(time.monotonic() - began)
        reasons.append(result.reason)
        assert (result.ready, result.groups[0].hits) == (False, 0)
    assert reasons == ["no_answer"] * 3 + ["breaker_open"] * 17
    assert min(waited[:3]) >= 0.99 * budget
    assert max(waited[:3]) < NO_WAIT, "a lookup waited for more than its budget"
    assert median(waited[3:]) < budget, "lookups waited although the breaker is open"
    assert rank.client.attached, "a daemon that hangs is not lost"
    daemon.process.send_signal(signal.SIGCONT)
    eventually(lambda: rank.client.breaker_state is BreakerState.CLOSED, "the breaker is closed")
    assert rank.client.lookup(NAMESPACE, {0: hashes("a")}, timeout=SECONDS).groups[0].hits == 1
    rank.close()


def test_jobs_for_a_hung_daemon_do_not_pile_up(daemon: DaemonProcess, local: bool) -> None:
    rank = Rank(daemon, client=quick(daemon.socket, local, max_outstanding=3))
    pause(daemon)
    rank.fill(0, "a")
    jobs = [rank.client.store([Blocks(0, hashes("a"), [0])]) for _ in range(5)]
    declined = {end.job: end.reason for end in rank.client.poll()}
    assert declined == dict.fromkeys(jobs[3:], "backpressure")
    assert rank.client.outstanding == 3
    daemon.process.send_signal(signal.SIGCONT)
    ended = rank.client.wait(jobs[:3], SECONDS)
    assert [ended[job].outcome for job in jobs[:3]] == [Outcome.DONE] * 3
    rank.close()


# -- the end ---------------------------------------------------------------------------------------------------------


def test_close_while_it_reconnects_ends_all_threads(short_dir: Path, local: bool) -> None:
    with no_leaks():
        with DaemonProcess(short_dir, local=local) as daemon:
            rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local, reconnect=Backoff(3600, 3600)))
            kill(daemon)
        eventually(lambda: rank.client.lost_reason)
        began = time.monotonic()
        assert rank.client.close(), "the process is gone: nothing is mapped any more"
        assert time.monotonic() - began < NO_WAIT
        closed = rank.finish(rank.client.store([]))
        assert closed.reason == "closed"
        rank.close()


def test_close_while_the_daemon_hangs_says_that_the_memory_may_still_be_written(
    daemon: DaemonProcess, local: bool
) -> None:
    with no_leaks():
        rank = Rank(daemon, client=quick(daemon.socket, local))
        done(rank.store("a"))
        pause(daemon)
        load = rank.client.load([Blocks(0, hashes("a"), [5])])
        eventually(lambda: rank.client._ledger.outstanding()[0].phase == 2, "it is on its way")
        began = time.monotonic()
        assert not rank.client.close(timeout=0.2)
        assert time.monotonic() - began < NO_WAIT
        assert rank.client.wait([load], 0) == {}, "a load was reported that may still write"
        assert not rank.client.unmapped()
        kill(daemon)
        eventually(rank.client.unmapped)  # its copiers end after it; until then it watches the processes


def test_close_while_the_daemon_hangs_in_the_greeting_ends_all_threads(short_dir: Path, local: bool) -> None:
    with no_leaks(), DaemonProcess(short_dir, local=local) as daemon:
        daemon.wait_ready()
        pause(daemon)
        client = quick(daemon.socket, local)
        Rank(daemon, client=client, retry=True)
        began = time.monotonic()
        client.close(timeout=0.1)
        assert time.monotonic() - began < NO_WAIT
